"""A LoRA adapter of a model."""

from typing import NamedTuple


class Adapter(NamedTuple):
    """See the module."""

    name: str
    path: str
    """Where its weights come from: a folder or a Hugging Face id."""

    @property
    def salt(self) -> str:
        """What keeps the cached blocks of its prompts apart from those of others."""
        return f"{self.name}\0{self.path}\0"
