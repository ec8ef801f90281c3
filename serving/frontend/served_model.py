"""A model that requests are answered for."""

from serving.frontend.preparing.preparer import Preparer
from serving.frontend.text_model import TextModel
from serving.model.adapter import Adapter
from serving.routing.workers import Course, Workers

SHOWN_CHARACTERS = 128
"""How much of a model's name messages show."""


class ServedModel:
    """A model that can answer requests."""

    def __init__(self, text: TextModel, stages: Course, preparer: Preparer, adapter: Adapter | None = None) -> None:
        self.card = text.card
        self.text = text
        self.stages = stages
        self.preparer = preparer
        self.adapter = adapter
        """The adapter that it is with, if it is with one."""

    @property
    def workers(self) -> Workers:
        """The workers that answer."""
        return self.stages.decode
