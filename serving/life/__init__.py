"""The life of a request: who gets it, and what happens next. Pure; the frontend and the simulator act on it."""

from serving.life.config import DisaggregationConfig
from serving.life.leg import Stage
from serving.life.life import Finished, Life, PlaceAgain, Refused

__all__ = ["DisaggregationConfig", "Finished", "Life", "PlaceAgain", "Refused", "Stage"]
