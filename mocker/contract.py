"""What a driver may ask of an engine, of whatever family, and what the engine wants of its driver.

A driver makes an engine with `new_engine`, and sees it as a `DrivenEngine`:

    step = engine.schedule(now)      # close a batch; the driver waits until step.end
    output = engine.complete()       # tokens and finishes
    engine.effects                   # what the engine wants, until the driver takes it

Effects are values, and `effects` is the only door for them. Each kind has one taker:

    what is wanted                                   the driver reports
    `loads`      KV to be read from another engine   `arrive`
    `shipped`    first tokens that came with KV      nothing: it sends them
    `tier_work`  work for tiers behind host memory   `answer`, `end_read`, `end_write`
    `events`     KV events                           nothing: it passes them on
"""

from typing import Literal, NamedTuple, Protocol

from mocker.batch import Batch
from mocker.events import KvEvent
from mocker.look_ups import LookUps
from mocker.sequence import Sequence
from mocker.step import Step, StepLog, StepOutput
from mocker.tiers.config import HostMemory
from mocker.tiers.host_link import Direction
from mocker.tiers.work import Found, LookUp, Read, TierWork, Write
from mocker.timing.model import TimingModel

Pause = Literal["new", "all"]
"""What a paused engine leaves alone: sequences that do not run yet and hold no blocks, or all sequences."""

KvRole = Literal["kv_producer", "kv_consumer", "kv_both"]


class Effects:
    """What an engine wants from outside, in order, until its driver takes it."""

    __slots__ = ("events", "loads", "shipped", "tier_work")

    def __init__(self) -> None:
        self.loads: list[Sequence] = []
        self.shipped: list[Sequence] = []
        self.tier_work: list[TierWork] = []
        self.events: list[KvEvent] = []

    def take_loads(self) -> list[Sequence]:
        """Return the sequences whose load starts; it fills all but `num_cached_blocks` of their blocks."""
        taken = self.loads[:]
        self.loads.clear()
        return taken

    def take_shipped(self) -> list[Sequence]:
        """Return the sequences that the last `schedule` admitted and whose first token arrived with their KV."""
        taken = self.shipped[:]
        self.shipped.clear()
        return taken

    def take_tier_work(self) -> list[TierWork]:
        """Return the work for tiers behind host memory, and the work that has become urgent."""
        taken = self.tier_work[:]
        self.tier_work.clear()
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
    is_copying: bool
    """Whether KV is being copied to or from host memory, or fetched from a tier behind it."""
    is_locked: bool
    """Whether nothing can continue until a sequence is aborted."""

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
    """The settings of an engine that a driver may rely on in every family."""

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


class DrivenEngine(Protocol):
    """An engine as its driver sees it."""

    timing: TimingModel
    log: StepLog
    """The gaps between tokens."""
    step: Step | None
    """The step in flight."""
    has_end_at_stores: bool
    """Whether a step ends when KV has arrived in host memory, because the driver takes that event at the end of a step."""

    @property
    def config(self) -> EngineSettings:
        """Its settings."""
        ...

    @property
    def effects(self) -> Effects:
        """What it wants from outside."""
        ...

    @property
    def host_memory(self) -> HostMemory | None:
        """Its host memory, if it keeps KV there."""
        ...

    # Sequences

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; it takes part from the next `schedule` on.

        Raises:
            ValueError: it can never fit.
        """
        ...

    def abort(self, sequence: Sequence) -> None:
        """Remove a sequence, at once or when the step in flight ends; do nothing if it has finished."""
        ...

    def arrive(self, sequence: Sequence, num_valid_blocks: int | None = None) -> list[Sequence]:
        """Report that a sequence's KV is loaded; return the sequences that end at once."""
        ...

    def let_go(self, sequence: Sequence) -> None:
        """Free the blocks that a sequence left for another engine."""
        ...

    def reset_prefix_cache(self, *, preempts_running: bool = False) -> bool:
        """Forget all cached blocks, or return False if any is in use."""
        ...

    def pause(self, what: Pause) -> None:
        """Leave sequences alone until `resume`."""
        ...

    def resume(self) -> None:
        """End a pause, if there is one."""
        ...

    # Time

    def schedule(self, now: float, *, max_iterations: int = 1) -> Step | None:
        """Close a batch and return its duration, or None if there is nothing to do."""
        ...

    def stretch(self, end: float) -> None:
        """Extend the step in flight, if any, to a later time; it must have one iteration."""
        ...

    def advance(self, now: float) -> None:
        """Account for the iterations of the step in flight that have ended by now."""
        ...

    def complete(self) -> StepOutput:
        """End the step in flight."""
        ...

    def change_timing(self, timing: TimingModel) -> None:
        """Use another step-time model from the next step on."""
        ...

    def split_log(self, now: float) -> int:
        """Account for the iterations that have ended, and return the number of rows in the log."""
        ...

    # Host memory, and the tiers behind it

    def answer(self, look_up: LookUp, found: list[Found]) -> None:
        """Record where the chunks of a look-up are."""
        ...

    def end_read(self, read: Read, num_chunks: int) -> None:
        """Report that a read has ended with its first `num_chunks` chunks."""
        ...

    def end_write(self, write: Write) -> None:
        """Report that a write has ended, whether or not the tier accepted it."""
        ...

    def publish_host_events(self) -> None:
        """Put the events of host memory into the effects, even in the middle of a step."""
        ...

    # What it is doing

    @property
    def is_idle(self) -> bool:
        """True if nothing waits or runs; blocks may still be held for other engines."""
        ...

    @property
    def is_locked(self) -> bool:
        """True if nothing can continue until a sequence is aborted."""
        ...

    @property
    def paused(self) -> Pause | None:
        """What it leaves alone."""
        ...

    @property
    def ahead(self) -> Batch | None:
        """The batch that was closed ahead, if there is one."""
        ...

    @property
    def num_blocks(self) -> int:
        """KV blocks that can hold tokens."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be allocated now."""
        ...

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for blocks, for their KV or for a seat."""
        ...

    @property
    def num_queued(self) -> int:
        """Those of them that hold no blocks."""
        ...

    @property
    def wake_s(self) -> float:
        """When there may be work although nothing was added (s)."""
        ...

    @property
    def known_until_s(self) -> float:
        """When the last accounted iteration ended (s)."""
        ...

    @property
    def look_ups(self) -> LookUps:
        """How much of the prompts was found in caches."""
        ...

    def view(self) -> View:
        """Return what it is doing."""
        ...

    def backlog(self) -> Backlog:
        """Return its work in tokens."""
        ...

    def remaining(self) -> list[Remaining]:
        """Return what is left to do for each of its sequences."""
        ...

    def host_use(self) -> HostUse | None:
        """Return what its host memory contains and what was copied; None if there is none."""
        ...

    def sequences(self) -> list[Sequence]:
        """Return all its sequences, in arbitrary order."""
        ...

    def decoded(self) -> list[Sequence]:
        """Return the sequences that get a token from decoding in the step in flight."""
        ...

    def num_known_tokens(self, sequence: Sequence) -> int:
        """Count the tokens of a sequence, prompt and output, up to the last step that ended."""
        ...
