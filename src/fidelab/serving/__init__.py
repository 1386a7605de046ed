"""Load on a server somebody started: what it is, what it is asked, what came of it (``fidelab bench serve``)."""

from fidelab.serving.conduct import Watch, measure_serving
from fidelab.serving.contact import Contact, reach
from fidelab.serving.record import Keeper, Requests
from fidelab.serving.settings import ServingSettings

__all__ = ["Contact", "Keeper", "Requests", "ServingSettings", "Watch", "measure_serving", "reach"]
