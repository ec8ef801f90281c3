"""A LoRA adapter of a model."""

from typing import NamedTuple


class Adapter(NamedTuple):
    """See the module."""

    id: int
    """Its number, from 1; an adapter that replaces another of the same name keeps it."""
    name: str
    path: str
    """Where its weights come from: a folder or a Hugging Face id."""
