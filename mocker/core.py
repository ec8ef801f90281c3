"""What a family of engines brings: a core that decides who is computed, iteration by iteration, and does not know the time.

`Engine` lays the iterations of a core out in time. It asks:

    batch = core.schedule()                     # iteration i: who computes what
    sampled, finished = core.update(batch)      # what it brought is known

With asynchronous scheduling, iteration i + 1 is scheduled before iteration i is known. A batch in which each sequence only
decodes may continue for many iterations (`num_leap_iterations`, `leap`, `end_iterations`).

A class to derive from and not a protocol: the engine asks a core a dozen things in each iteration, and compiled code
finds them in a native class at once. How a core is made is asked once for each engine, and is a protocol (`NewCore`).
"""

from abc import ABC, abstractmethod
from typing import Protocol, TypeVar

from mocker.batch import NOBODY, Batch
from mocker.contract import Backlog, EngineSettings, HostChunks, NeverAdmittedError, Outbox, Pause, Remaining, View
from mocker.models.kv_groups import KvLayout
from mocker.prefix_cache_stats import PrefixCacheStats
from mocker.sequence import Sequence
from mocker.tiers.config import HostMemory
from mocker.tiers.copies import NO_WORK, Copy, Work
from mocker.tiers.work import Found, LookUp, Read, Write

S = TypeVar("S", bound=EngineSettings, contravariant=True)


class Core(ABC):
    """The core of one engine. Without host memory for KV, what is asked of it has the answers given here."""

    outbox: Outbox
    """What it asks of the driver. It adds loads, shipped tokens and tier work as they arise; events when asked (`publish`)."""
    pause: Pause | None
    """Which sequences it leaves alone."""
    running: list[Sequence]
    dropped: list[Sequence]
    """Sequences whose output in flight does not count."""
    prefix_cache_stats: PrefixCacheStats

    # Iterations

    @abstractmethod
    def schedule(self) -> Batch | None:
        """Close the next iteration's batch, or return None when nothing can run."""

    @abstractmethod
    def update(self, batch: Batch, num_iterations: int = 1) -> tuple[list[Sequence], list[Sequence]]:
        """End iterations of a batch: return sequences that completed prefill, and finished ones."""

    @abstractmethod
    def num_leap_iterations(self, batch: Batch, limit: int) -> int:
        """Return how many iterations the batch in flight may span; it must be the last scheduled one."""

    @abstractmethod
    def may_evict(self, num_iterations: int) -> bool:
        """Return whether this many more iterations of the last batch might evict a cached block."""

    @abstractmethod
    def leap(self, num_iterations: int, *, is_ordered: bool) -> None:
        """Schedule the last batch for this many more iterations.

        Events are in the exact order of the real engine if `is_ordered`, else one sequence after another.
        """

    @abstractmethod
    def end_iterations(self, num_iterations: int) -> None:
        """Record this many iterations of a leap, which produce only a token for each sequence."""

    @abstractmethod
    def publish(self) -> None:
        """Put the events of the iterations that are known into the outbox, then those of host memory."""

    # Sequences

    @abstractmethod
    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence.

        Raises:
            ValueError: it can never fit.
        """

    @abstractmethod
    def abort(self, sequence: Sequence) -> None:
        """Remove a sequence, unless it has ended, and free its blocks; its tokens in flight are dropped."""

    def take_failed(self) -> list[Sequence]:
        """Return the sequences that failed since, and that no iteration has reported."""
        return NOBODY

    @abstractmethod
    def end_load(self, sequence: Sequence, num_valid_blocks: int | None = None) -> bool:
        """Record that a sequence's KV, or only this many of its first blocks, is loaded; return whether that ends it."""

    @abstractmethod
    def release_kept(self, sequence: Sequence) -> None:
        """Free the blocks that a sequence left for another engine."""

    @abstractmethod
    def reset_prefix_cache(self, *, preempts_running: bool = False) -> bool:
        """Forget all cached blocks, unless any is in use (then False). At most one iteration is in flight."""

    # What it is doing

    @property
    @abstractmethod
    def num_ended(self) -> int:
        """Count the iterations that are known."""

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """Count the sequences that wait for blocks, for their KV or for a seat."""

    @property
    @abstractmethod
    def num_queued(self) -> int:
        """Count those of them that hold no blocks."""

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Blocks that can hold tokens."""

    @property
    @abstractmethod
    def num_free_blocks(self) -> int:
        """Blocks that could be allocated now."""

    @property
    @abstractmethod
    def is_stuck(self) -> bool:
        """Whether nothing can continue until a sequence is aborted, if no iteration is in flight."""

    @abstractmethod
    def stall(self) -> NeverAdmittedError | None:
        """Return that the first waiting sequence can never be admitted, if so. Nothing runs, and no batch resulted."""

    @abstractmethod
    def num_tokens(self, sequence: Sequence, num_starved: int = 0) -> int:
        """Count a sequence's tokens, prompt and output, that are known (or about to be, if it was preempted).

        `num_starved` of the batches that have not ended have no place for it: they bring it no token.
        """

    @abstractmethod
    def is_delivered(self, sequence: Sequence) -> bool:
        """Return whether the token counts that the oldest step in flight computes for a sequence."""

    @abstractmethod
    def sequences(self) -> list[Sequence]:
        """Return all its sequences, in arbitrary order."""

    @abstractmethod
    def view(self) -> View:
        """Return what its sequences do, and its blocks."""

    @abstractmethod
    def backlog(self) -> Backlog:
        """Return its work in tokens."""

    @abstractmethod
    def remaining(self) -> list[Remaining]:
        """Return what is left to do for each of its sequences."""

    # Host memory

    def take_copies(self) -> Work:
        """Return the copies between GPU and host that the last `schedule` wants, once."""
        return NO_WORK

    def end_copy(self, copy: Copy) -> None:
        """Record that a copy has ended."""
        raise NotImplementedError

    @property
    def ends_at_stores(self) -> bool:
        """Whether a step ends when KV has arrived in host memory, because something has to happen then."""
        return False

    def end_look_up(self, look_up: LookUp, found: list[Found]) -> None:
        """Record where the chunks of a look-up are."""
        raise NotImplementedError

    def end_read(self, read: Read, num_chunks: int) -> None:
        """Record that a read has ended with its first `num_chunks` chunks."""
        raise NotImplementedError

    def end_write(self, write: Write) -> None:
        """Record that a write has ended."""
        raise NotImplementedError

    def publish_host_events(self) -> None:
        """Put the events of host memory into the outbox."""
        raise NotImplementedError

    def host_chunks(self) -> HostChunks:
        """Count the chunks in host memory."""
        raise NotImplementedError


class NewCore(Protocol[S]):
    """Makes the core of an engine from the settings of its family; the class of the core itself will do."""

    def __call__(
        self,
        config: S,
        num_blocks: int,
        host: HostMemory | None,
        layout: KvLayout | None,
        *,
        kv_events: bool,
    ) -> Core:
        """Return an idle core; see `new_engine` for the arguments."""
        ...


class NewCoreOfRanks(Protocol[S]):
    """Makes the core of an engine whose ranks have attention and KV of their own (attention DP)."""

    def __call__(
        self,
        config: S,
        num_blocks: int,
        host: HostMemory | None,
        layout: KvLayout | None,
        *,
        num_ranks: int,
        kv_events: bool,
    ) -> Core:
        """Return an idle core; see `new_engine` for the arguments."""
        ...
