"""An architecture: how its layers are read from a config.json."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mocker.models import feed_forward as feed
from mocker.models import kinds as by
from mocker.models import other_parameters as others
from mocker.models.attention import MixerOf, attention
from mocker.models.feed_forward import FeedForwardOf
from mocker.models.keys import Keys
from mocker.models.kinds import Kinds

HEADS = attention()


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How the layers of an architecture are read."""

    attention: MixerOf = HEADS
    state: MixerOf | None = None
    """What layers have that keep a state: instead of attention, or in addition to it."""
    feed_forward: FeedForwardOf = feed.gated
    kinds: Kinds = by.full
    num_attentions: int = 1
    """In each layer, one after the other."""
    is_tied: bool = False
    """Whether embeddings are the head where the file does not say."""
    other_parameters: Callable[[Keys], int] = others.none
    """Parameters outside the layers, embeddings and head, in 16 bits."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Of keys that files leave out."""
    ignored: tuple[str, ...] = ()
    """Keys that say nothing here."""
    no_ops: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that say nothing here, where other values do."""
    approximation: str = ""
    """What is not simulated as the architecture has it, in a clause."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Of modules in checkpoints, where they differ from those that readers use."""

    def ignores(self, name: str, value: object) -> bool:
        """Return whether a key says nothing here."""
        return name in self.ignored or (name in self.no_ops and value == self.no_ops[name])
