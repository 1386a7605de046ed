"""Load on a running server: settings, requests and results (``fidelab bench serve``)."""

from fidelab.bench.serving.capacity import MAX_CONCURRENCY, measure_capacity
from fidelab.bench.serving.contact import Contact, reach
from fidelab.bench.serving.measure import ServingWatch, measure_serving
from fidelab.bench.serving.record import Keeper, Requests
from fidelab.bench.serving.settings import ServingSettings

__all__ = [
    "MAX_CONCURRENCY",
    "Contact",
    "Keeper",
    "Requests",
    "ServingSettings",
    "ServingWatch",
    "measure_capacity",
    "measure_serving",
    "reach",
]
