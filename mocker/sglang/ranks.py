"""SGLang with attention DP as the core of one engine: a scheduler for each rank, and steps that all take together.

    controller --> rank 0: scheduler, KV cache -+
               --> rank 1: ...                  +-- one step: it lasts as long as the slowest rank's batch
               --> rank 2: nothing to do        +   (a rank without a batch computes an empty one)

Each rank decides for itself, so one may compute prompts while another decodes: they do so in the same step. What a rank
takes from the settings of the engine is `SglangConfig.of_rank`.

Source: SGLang 0.5.23, `srt/managers/scheduler_components/dp_attn.py` (`prepare_mlp_sync_batch_raw`). No recording has ranks.
"""

from collections.abc import Iterable

from mocker.batch import Batch, BatchOfRanks
from mocker.contract import KV_EVENTS_OF_RANKS, Backlog, NeverAdmittedError, Outbox, Pause, Remaining, View
from mocker.core import Core
from mocker.models.kv_groups import KvLayout
from mocker.prefix_cache_stats import PrefixCacheStats
from mocker.sequence import Sequence
from mocker.sglang.config import SglangConfig
from mocker.sglang.controller import Controller
from mocker.sglang.core import SglangCore
from mocker.sglang.rows import Work
from mocker.tiers.config import HostMemory


class SglangRanks(Core):
    """The cores of the ranks, which are scheduled and end their iterations together."""

    def __init__(
        self,
        config: SglangConfig,
        num_blocks: int,
        host: HostMemory | None = None,
        layout: KvLayout | None = None,
        *,
        num_ranks: int,
        kv_events: bool = True,
    ) -> None:
        """Start idle, with `num_blocks` for each rank; see `new_engine` for the other arguments.

        Raises:
            ValueError: it is to have something that is not modelled.
        """
        if kv_events and not config.disable_radix_cache:
            raise ValueError(KV_EVENTS_OF_RANKS)
        own = config.of_rank(num_ranks)
        self.ranks = [SglangCore(own, num_blocks, host, layout, kv_events=False) for _ in range(num_ranks)]
        self.outbox = Outbox()
        self.pause: Pause | None = None
        self.running: list[Sequence] = []
        self.dropped: list[Sequence] = []
        self.prefix_cache_stats = PrefixCacheStats()
        for rank in self.ranks:
            rank.prefix_cache_stats = self.prefix_cache_stats
        self._controller = Controller(config.load_balance_method, [rank.scheduler for rank in self.ranks])
        self._rank_of: dict[Sequence, SglangCore] = {}
        self._aborted: list[Sequence] = []  # whose requests have not ended yet
        self._in_flight: list[list[Batch | None]] = []  # for each iteration, the batch of each rank
        self._iteration = 0
        self._num_ended = 0

    # Iterations

    def schedule(self) -> Batch | None:
        """See `Core`."""
        if self.pause == "all":
            return None
        works = self._next_works()
        parts = [rank.describe(work) for rank, work in zip(self.ranks, works, strict=True)]
        self._look()
        if all(part is None for part in parts):
            return None
        self._in_flight.append(parts)
        return self._together(parts)

    def _next_works(self) -> list[Work]:
        """Return the next iteration of each rank. If all are idle, and only count down, that ends at once."""
        ranks = self.ranks
        for rank in ranks:
            rank.pause = self.pause
            rank.prepare()
        while True:
            was_deferring = any(rank.scheduler.is_deferring for rank in ranks)
            works = [rank.scheduler.schedule() for rank in ranks]
            has_prompts = any(bool(work.prefills) for work in works)
            for rank in ranks:
                rank.scheduler.inbox.has_prompts_elsewhere = has_prompts
            if any(
                work.kind != "idle" or bool(rank.scheduler.in_flight) for rank, work in zip(ranks, works, strict=True)
            ):
                return works
            self._rest()
            is_counting = was_deferring or any(bool(rank.scheduler.inbox.requests) for rank in ranks)
            if not is_counting or any(bool(work.requeued) for work in works):
                return works

    def _rest(self) -> None:
        for number, rank in enumerate(self.ranks):
            rank.scheduler.rest()
            self._controller.report_load(number)

    def _together(self, parts: list[Batch | None]) -> Batch:
        """Return the batches of all ranks as one."""
        batch = BatchOfRanks(self._iteration)
        found = [part for part in parts if part is not None]
        batch.decodes = _all([part.decodes for part in found])
        batch.sampled = _all([part.sampled for part in found])
        batch.admitted = _all([part.admitted for part in found])
        batch.resumed = _all([part.resumed for part in found])
        batch.preempted = _all([part.preempted for part in found])
        batch.starved = _all([part.starved for part in found])
        batch.delayed = _all([part.delayed for part in found])
        for part in found:
            batch.chunks += part.chunks
        batch.parts = [
            _as_timed(part, rank.num_kv_tokens(part))
            for rank, part in zip(self.ranks, parts, strict=True)
            if part is not None
        ]
        batch.num_kv_tokens = sum([part.num_kv_tokens for part in batch.parts])
        if not batch.is_empty:
            self._iteration += 1
        return batch

    def update(self, batch: Batch, num_iterations: int = 1) -> tuple[list[Sequence], list[Sequence]]:
        """See `Core`."""
        assert num_iterations == 1, "ranks step one iteration at a time"
        sampled: list[Sequence] = []
        finished: list[Sequence] = []
        for number, part in enumerate(self._in_flight.pop(0)):
            self._controller.end_step(number, has_prompts=part is not None and bool(part.chunks))
            if part is not None:
                brought = self.ranks[number].update(part)
                sampled += brought[0]
                finished += brought[1]
        for sequence in finished:
            del self._rank_of[sequence]
        self._forget_aborted()
        if not batch.is_empty:
            self._num_ended += 1
        self._look()
        return sampled, finished

    def _look(self) -> None:
        """Take what changes in each iteration from the ranks."""
        self.running = _all([rank.running for rank in self.ranks])
        self.dropped = _all([rank.dropped for rank in self.ranks])

    def publish(self) -> None:
        """See `Core`: there are no events."""

    # Leaps: any rank may delay the others in any step

    def num_leap_iterations(self, batch: Batch, limit: int) -> int:
        """See `Core`."""
        return 1

    def may_evict(self, num_iterations: int) -> bool:
        """See `Core`."""
        return False

    def leap(self, num_iterations: int, *, is_ordered: bool) -> None:
        """See `Core`."""
        raise NotImplementedError

    def end_iterations(self, num_iterations: int) -> None:
        """See `Core`."""
        raise NotImplementedError

    # Sequences

    def add(self, sequence: Sequence) -> None:
        """See `Core`."""
        if all(rank.is_done for rank in self.ranks):
            self._spin()
        rank = self.ranks[self._controller.pick(sequence.num_prompt)]
        rank.queue(sequence)
        self._rank_of[sequence] = rank
        self._look()

    def _spin(self) -> None:
        """Let the loops of all ranks turn, as they do while there is nothing to do."""
        num_turns = 2
        while num_turns > 0 or any(rank.scheduler.is_deferring for rank in self.ranks):
            for rank in self.ranks:
                rank.scheduler.inbox.has_prompts_elsewhere = False
                rank.scheduler.schedule()
            self._rest()
            num_turns -= 1

    def abort(self, sequence: Sequence) -> None:
        """See `Core`."""
        rank = self._rank_of.get(sequence)
        if rank is not None:
            rank.abort(sequence)
            self._aborted.append(sequence)
            self._forget_aborted()
            self._look()

    def _forget_aborted(self) -> None:
        if self._aborted:
            kept = [sequence for sequence in self._aborted if self._rank_of[sequence].has(sequence)]
            for sequence in self._aborted:
                if sequence not in kept:
                    del self._rank_of[sequence]
            self._aborted = kept

    def end_load(self, sequence: Sequence, num_valid_blocks: int | None = None) -> bool:
        """See `Core`: no sequence of this family loads."""
        raise NotImplementedError

    def release_kept(self, sequence: Sequence) -> None:
        """See `Core`: no sequence of this family leaves KV to others."""
        raise NotImplementedError

    def reset_prefix_cache(self, *, preempts_running: bool = False) -> bool:
        """See `Core`: ranks that are idle forget theirs, even if others are not."""
        were_reset = [rank.reset_prefix_cache(preempts_running=preempts_running) for rank in self.ranks]
        return all(were_reset)

    # What it is doing

    @property
    def num_ended(self) -> int:
        """See `Core`."""
        return self._num_ended

    @property
    def num_waiting(self) -> int:
        """See `Core`."""
        return sum([rank.num_waiting for rank in self.ranks])

    @property
    def num_queued(self) -> int:
        """See `Core`."""
        return self.num_waiting

    @property
    def num_blocks(self) -> int:
        """See `Core`."""
        return sum([rank.num_blocks for rank in self.ranks])

    @property
    def num_free_blocks(self) -> int:
        """See `Core`."""
        return sum([rank.num_free_blocks for rank in self.ranks])

    @property
    def is_stuck(self) -> bool:
        """See `Core`: all that runs can go on."""
        return False

    def stall(self) -> NeverAdmittedError | None:
        """See `Core`."""
        stalls = [stall for rank in self.ranks if (stall := rank.stall()) is not None]
        return stalls[0] if stalls else None

    def num_tokens(self, sequence: Sequence, num_starved: int = 0) -> int:
        """See `Core`."""
        rank = self._rank_of.get(sequence)
        return sequence.num_known if rank is None else rank.num_tokens(sequence, num_starved)

    def is_delivered(self, sequence: Sequence) -> bool:
        """See `Core`."""
        rank = self._rank_of.get(sequence)
        return rank is not None and rank.is_delivered(sequence)

    def sequences(self) -> list[Sequence]:
        """See `Core`."""
        return _all([rank.sequences() for rank in self.ranks])

    def view(self) -> View:
        """See `Core`."""
        columns = zip(*[rank.view() for rank in self.ranks], strict=True)
        return View(*[sum(column) for column in columns])

    def backlog(self) -> Backlog:
        """See `Core`."""
        columns = zip(*[rank.backlog() for rank in self.ranks], strict=True)
        return Backlog(*[sum(column) for column in columns])

    def remaining(self) -> list[Remaining]:
        """See `Core`."""
        return [each for rank in self.ranks for each in rank.remaining()]


def _all(lists: Iterable[list[Sequence]]) -> list[Sequence]:
    return [sequence for some in lists for sequence in some]


def _as_timed(part: Batch, num_kv_tokens: int) -> Batch:
    """Return what the step-time model asks of a rank's batch, which may have been closed some iterations ago."""
    timed = Batch(part.iteration)
    timed.decodes, timed.chunks, timed.num_kv_tokens = part.decodes, part.chunks, num_kv_tokens
    return timed
