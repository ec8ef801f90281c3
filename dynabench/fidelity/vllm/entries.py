"""What a recording of vLLM's scheduler says, in order: the calls that it received, what it scheduled, what came of it."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from dynabench.fidelity.recordings import Json
from mocker import EngineConfig
from mocker.media import MediaItem
from mocker.models.kv_groups import KvLayout
from mocker.tiers.config import HostMemory


@dataclass
class Action:
    """A call of the scheduler: `add`, `abort` or `reset`."""

    kind: str
    id: str = ""
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    max_tokens: int = 0
    stops: frozenset[int] = frozenset()
    """Tokens that end the answer, including EOS."""
    end_token: int | None = None
    """EOS, if it does."""
    priority: int = 0
    salt: str | None = None
    adapter: str = ""
    adapter_number: int | None = None
    media: tuple[MediaItem, ...] = ()
    """Images in the prompt."""
    remote: str | None = None
    """The role of another engine: `decode` if this one loads KV from it, `prefill` if it reads KV from this one."""
    is_done: bool | None = None
    """Whether vLLM carried out a reset."""
    facts: Json = field(default_factory=dict)
    """What vLLM says of a request that is added or aborted."""
    hashes: dict[int, Hashable] = field(default_factory=dict)
    """vLLM's names of some of its prompt's blocks, by their places."""


OF_GROUP = " of group "


class Event(NamedTuple):
    """A KV event of the GPU's memory."""

    kind: str
    """stored, removed or cleared, and of which group of layers if there are several."""
    hashes: list[Hashable]
    """Its blocks."""
    facts: Json
    """What else it says, by vLLM's fields; `tokens` are their number and the CRC of their ids."""


@dataclass
class Ended:
    """What a recording says of a request at its end."""

    id: str
    facts: Json


@dataclass
class Scheduled:
    """What vLLM put into a step."""

    number: int
    facts: Json
    ended: list[str] = field(default_factory=list)
    """Requests that had ended, in the order in which vLLM handled them, if that is recorded."""
    tables: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    """By request that has new blocks: how many it had before, and vLLM's numbers of the new ones. With one table each."""


@dataclass
class Updated:
    """The output of a step, and the KV events that vLLM published with it."""

    number: int
    facts: Json
    events: list[Event]
    duration_s: float | None = None
    arrivals: list[tuple[str, int | None]] = field(default_factory=list)
    """Requests whose KV had arrived, with the number of valid blocks if some are invalid."""
    sent: list[str] = field(default_factory=list)
    """Requests whose KV was read or given up."""
    copies: list[int] = field(default_factory=list)
    """Numbers of the completed copies to or from host memory."""
    host_events: list[tuple[str, list[Hashable]]] = field(default_factory=list)
    """KV events of host memory; the last hash of a stored chunk identifies it."""
    accepted: dict[str, int] = field(default_factory=dict)
    """How many of each request's drafts the model accepted."""
    drafts: dict[str, int] = field(default_factory=dict)
    """How many drafts there were then for each request's next step, if scheduling was synchronous."""


Entry = Action | Scheduled | Updated | Ended
UNNAMED = "of unknown version"
"""Follows the name of an engine whose version a recording does not name."""


@dataclass
class Recording:
    """A scenario and what vLLM did, in order; asynchronously, each step is scheduled before the last one ends."""

    path: Path
    config: EngineConfig
    version: str
    offloading: HostMemory | None
    """Host memory, if it stores KV."""
    num_stages: int
    """Stages of the pipeline."""
    layout: KvLayout | None
    """Groups of layers, if they were recorded."""
    entries: list[Entry]
    not_compared: list[str] = field(default_factory=list)
    """Fields that it has, and that no replay compares."""
