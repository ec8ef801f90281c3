"""The life of a request: who takes it, and what is next. A pure state machine that the frontend and the simulator act out."""

from serving.life.config import DisaggregationConfig
from serving.life.life import Finished, Life, PlaceAgain, Refused, Stage

__all__ = ["DisaggregationConfig", "Finished", "Life", "PlaceAgain", "Refused", "Stage"]
