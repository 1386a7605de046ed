"""Load on a running server: settings, requests and results (``fidelab bench serve``)."""

from fidelab.bench.serving.contact import Contact, reach
from fidelab.bench.serving.measure import ServingWatch, measure_serving
from fidelab.bench.serving.record import Keeper, Requests
from fidelab.bench.serving.settings import ServingSettings

__all__ = ["Contact", "Keeper", "Requests", "ServingSettings", "ServingWatch", "measure_serving", "reach"]
