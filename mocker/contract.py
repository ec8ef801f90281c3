"""What every engine reports about itself, and what it asks of its driver.

A driver makes an engine with `new_engine`, and sees it as an `Engine` (`engine.py`). They exchange values only. What an
engine asks of its driver is in `engine.outbox`. Each kind has one taker:

    what is asked for                                the driver reports
    `loads`      KV to be read from another engine   `end_load`
    `shipped`    first tokens that came with KV      nothing: it sends them
    `tier_work`  work for tiers behind host memory   `end_look_up`, `end_read`, `end_write`
    `events`     KV events                           nothing: it passes them on

All stay there until they are taken, except `shipped`, which the next `schedule` empties. The driver also reports
`release_kept`, when another engine has read KV that is kept for it.
"""

from typing import Literal, NamedTuple, Protocol

from mocker.events import KvEvent
from mocker.sequence import Sequence
from mocker.tiers.host_link import Direction
from mocker.tiers.work import TierWork

Pause = Literal["new", "all"]
"""What a paused engine leaves alone: sequences that do not run yet and hold no blocks, or all sequences."""

KvRole = Literal["kv_producer", "kv_consumer", "kv_both"]

KV_EVENTS_OF_RANKS = (
    "KV events of ranks with attention DP are not modelled yet: routers would have to know the caches of ranks; choose a "
    "router mode that looks at no caches, or turn prefix caching off"
)


class NeverAdmittedError(Exception):
    """Sequences wait, nothing runs, and the first can never be admitted."""

    def __init__(self, sequence: Sequence, reason: str) -> None:
        super().__init__(f"{sequence} can never be admitted: {reason}")
        self.sequence = sequence


class EngineStoppedError(Exception):
    """The real engine would stop here, with all its requests."""


class Outbox:
    """What an engine asks of its driver, in order."""

    __slots__ = ("events", "loads", "shipped", "tier_work")

    def __init__(self) -> None:
        self.loads: list[Sequence] = []
        self.shipped: list[Sequence] = []
        self.tier_work: list[TierWork] = []
        self.events: list[KvEvent] = []

    def take_loads(self) -> list[Sequence]:
        """Return the sequences whose load starts; it fills all but `num_cached_blocks` of their blocks."""
        taken, self.loads = self.loads, []
        return taken

    def take_shipped(self) -> list[Sequence]:
        """Return the sequences that the last `schedule` admitted and whose first token arrived with their KV."""
        taken, self.shipped = self.shipped, []
        return taken

    def take_tier_work(self) -> list[TierWork]:
        """Return the work for tiers behind host memory, and the work that has become urgent."""
        taken, self.tier_work = self.tier_work, []
        return taken

    def take_events(self) -> list[KvEvent]:
        """Return the KV events of the iterations that have ended."""
        taken, self.events = self.events, []
        return taken


class View(NamedTuple):
    """What an engine is doing: the sequences by what they do now, and its KV blocks."""

    num_running: int
    num_queued: int
    """Sequences that wait and hold no blocks."""
    num_fetching: int
    """Those of them for which tiers behind host memory work."""
    num_to_load: int
    """Those of them whose KV another engine has, and whose load has not started."""
    num_loading: int
    """Sequences that hold blocks for KV that is on its way."""
    num_loaded: int
    """Sequences that wait although all the KV that they need has arrived."""
    num_retained: int
    """Sequences that have ended, and whose blocks are kept until a transfer has ended."""
    num_blocks: int
    """KV blocks that can hold tokens."""
    num_free_blocks: int
    """Those of them that could be allocated now."""

    @property
    def num_waiting(self) -> int:
        """Count the sequences that wait for blocks, for their KV or for a seat."""
        return self.num_queued + self.num_loading + self.num_loaded

    @property
    def num_used_blocks(self) -> int:
        """Count the blocks in use."""
        return self.num_blocks - self.num_free_blocks


class Backlog(NamedTuple):
    """The work of an engine in tokens, for planners."""

    queued_prefill_tokens: int
    """Prompt tokens that are still to be computed."""
    decode_kv_tokens: int
    """Context of the requests that are decoding."""
    queued_decode_kv_tokens: int
    """Context of the requests that wait to decode: their prompt is computed elsewhere, or they were preempted."""


class Remaining(NamedTuple):
    """What is left to do for a sequence, in tokens. Only a simulation knows how long answers will be."""

    to_compute: int
    """Of its prompt."""
    to_come: int
    """Of its answer."""
    context: int
    """Known now, prompt and answer together."""


class AdapterMemory(NamedTuple):
    """Room for adapters, and how long they take."""

    max_loras: int
    """Slots on the GPU."""
    max_cpu_loras: int
    """Adapters in host memory; those that have slots are there, too."""
    load_s: float
    """Time to copy one from host memory to a slot."""
    read_s: float
    """Time to read one from disk into host memory."""


class HostChunks(NamedTuple):
    """The chunks in host memory."""

    num_used: int
    num_evicted: int
    num_refused: int
    """How often a sequence's chunks found no room."""


class HostUse(NamedTuple):
    """What an engine's host memory contains, and what was copied."""

    chunks: HostChunks
    loads: Direction
    stores: Direction
    num_flushes: int
    """Copies that a step waited for."""
    stall_s: float
    """How long steps waited for them."""


class EngineSettings(Protocol):
    """The settings that engines of every family have."""

    @property
    def block_size(self) -> int:
        """Tokens in a KV block."""
        ...

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of a sequence."""
        ...

    @property
    def kv_role(self) -> KvRole | None:
        """Its part in disaggregation."""
        ...

    @property
    def is_async(self) -> bool:
        """Whether a batch is closed while the one before it is computed."""
        ...

    @property
    def is_kv_consumer(self) -> bool:
        """Whether it may read KV from other engines."""
        ...
