"""Load on a running server: settings, requests and results (``fidelab bench serve``)."""

from fidelab.bench.serving.capacity import MOST, measure_capacity
from fidelab.bench.serving.conduct import ServingWatch, measure_serving
from fidelab.bench.serving.contact import Contact, reach
from fidelab.bench.serving.record import Keeper, Requests
from fidelab.bench.serving.settings import ServingSettings

__all__ = [
    "MOST",
    "Contact",
    "Keeper",
    "Requests",
    "ServingSettings",
    "ServingWatch",
    "measure_capacity",
    "measure_serving",
    "reach",
]
