"""TensorRT-LLM's scheduler as the core of an engine.

The scheduler's iteration has two halves, and its loop, plain or overlapped, is that of `Engine`:

    Core.schedule    the first half of iteration n
    Core.update      the second half; with overlap, that of n + 1 in which the tokens of n become known

A cancel is seen like a new request, when the next iteration begins: the request takes part in it once more, its output does not
count, and its blocks are free at its end. Until then it counts as running, or as waiting.

With attention DP, the scheduler has several ranks, whose steps begin and end together. The batch is that of all of them, and
its `parts` say what each computes. Steps are then taken one at a time.

What is refused: host memory, layers that keep less than all tokens, adapters, speculation, and KV events of ranks.
"""

from mocker.batch import NOBODY, Batch, BatchOfRanks
from mocker.contract import Backlog, NeverAdmittedError, Outbox, Pause, Remaining, View
from mocker.core import Core
from mocker.models.kv_groups import KvLayout
from mocker.prefix_cache_stats import PrefixCacheStats
from mocker.sequence import LOADED, OVER, RUNNING, WAITING, Sequence
from mocker.tiers.config import HostMemory
from mocker.trtllm.config import TrtllmConfig
from mocker.trtllm.leaps import Leaps
from mocker.trtllm.rank import RankStep
from mocker.trtllm.request import CONTEXT, GENERATING, INIT, TRANSFERRING, Request
from mocker.trtllm.requests import Requests
from mocker.trtllm.scheduler import Iteration, Scheduler
from mocker.trtllm.settings import settings_of

KV_EVENTS_OF_RANKS = (
    "KV events of ranks with enable_attention_dp are not modelled yet: routers would have to know the caches of ranks; "
    "choose a router mode that looks at no caches, or set enable_block_reuse to false"
)


class TrtllmCore(Core):
    """The scheduler, and what engines and drivers ask beyond its rule."""

    def __init__(
        self,
        config: TrtllmConfig,
        num_blocks: int,
        host: HostMemory | None = None,
        layout: KvLayout | None = None,
        *,
        num_ranks: int = 1,
        kv_events: bool = True,
    ) -> None:
        """Start idle; see `new_engine` for the arguments. TensorRT-LLM has no null block: all blocks hold tokens.

        Raises:
            ValueError: something is asked for that is not modelled.
        """
        _refuse(host, layout)
        if num_ranks > 1 and kv_events and config.enable_block_reuse:
            raise ValueError(KV_EVENTS_OF_RANKS)
        self.config = config
        self.outbox = Outbox()
        self.pause: Pause | None = None
        self.dropped: list[Sequence] = []
        self.prefix_cache_stats = PrefixCacheStats()
        self.scheduler = Scheduler(settings_of(config, num_blocks, num_ranks))
        self._ranks = self.scheduler.ranks
        self._has_ranks = num_ranks > 1
        self.pool = self._ranks[0].pool
        self.pool.has_listener = kv_events
        self._requests = Requests(config, num_blocks)
        self.running = self._requests.running
        self._leaps = Leaps(self.scheduler)
        self._steady: Batch | None = None  # the last batch, if it continues unless something happens
        self._cancels: list[Request] = []  # not seen yet by the scheduler
        self._num_leaving = 0  # cancelled requests that it has seen and not ended
        self._is_stuck = False
        self._starved = NOBODY  # in the last iteration
        self._awaited = NOBODY  # paused while their token is in flight
        self.iteration = 0
        """The next to be scheduled."""
        self._num_ended = 0

    # Iterations

    def schedule(self) -> Batch | None:
        """See `Core`."""
        if self.pause == "all":
            return None
        self._is_stuck = False
        if self.scheduler.is_open:  # with overlap: nothing was in flight, so that nothing ended it
            self._end_iteration()
        if self._steady is not None and self._leaps.may_repeat():
            self.scheduler.repeat(1)
            return self._count(self._steady)
        self._steady = None
        while True:
            self._see_cancels()
            is_idle = not self.scheduler.has_in_flight
            iteration = self.scheduler.schedule(takes_new=self.pause is None)
            has_paused = any(bool(step.passed.paused) for step in iteration.ranks)
            step = iteration.ranks[0]
            if step.passed.inits:
                self._begin_loads(step.passed.inits)
            if iteration.is_forward or not (is_idle and self._drop_cancelled()):
                break
        if not (iteration.is_forward or has_paused):
            self._is_stuck = is_idle and self.pause is None and bool(self.running)
            return None
        if self._has_ranks:
            return self._count(self._describe_ranks(iteration))
        batch = Batch(self.iteration)
        self._describe(batch, step)
        is_eventless = not (batch.starved or batch.delayed or self._num_leaving)
        if iteration.is_forward and is_eventless and self._leaps.begin(step, len(self.running)):
            batch.is_undisturbed = True
            self._steady = batch
        return self._count(batch)

    def _begin_loads(self, requests: list[Request]) -> None:
        """Have the KV of prompts sent for which there are blocks now."""
        raise NotImplementedError

    def _count(self, batch: Batch) -> Batch:
        self.iteration += 1
        return batch

    def _describe_ranks(self, iteration: Iteration) -> BatchOfRanks:
        """Return what the step of each rank computes, and who starts or is paused."""
        batch = BatchOfRanks(self.iteration)
        for step in iteration.ranks:
            for request in step.passed.paused:
                batch.preempted = [*batch.preempted, self._requests.pause(request)]
            if iteration.is_forward:
                batch.parts.append(self._describe_rank(batch, step))
        self._awaited = [sequence for sequence in batch.preempted if self._is_awaited(sequence)]
        self._find_starved(batch, [request for step in iteration.ranks for request in step.batch.generating])
        return batch

    def _describe_rank(self, batch: Batch, step: RankStep) -> Batch:
        """Add what a rank computes to the batch of all; return it by itself, for its time."""
        part = Batch(batch.iteration)
        generating = [request for request in step.batch.generating if not request.is_dummy]
        part.decodes = [request.sequence for request in generating]
        part.num_kv_tokens = sum([request.slots for request in generating])
        self._describe_chunks(batch, step)
        part.chunks = [(request.sequence, count) for request, _, count in step.chunks]
        batch.decodes = [*batch.decodes, *part.decodes]
        batch.num_kv_tokens += part.num_kv_tokens
        return part

    def _describe(self, batch: Batch, step: RankStep) -> None:
        """Record in a batch what a step computes, and who starts or is paused."""
        self._describe_arrived(batch)
        if step.passed.paused:
            batch.preempted = [self._requests.pause(request) for request in step.passed.paused]
            self._awaited = [s for s in batch.preempted if self._is_awaited(s)]
        batch.decodes = [request.sequence for request in step.batch.generating]
        batch.num_kv_tokens = sum([request.slots for request in step.batch.generating])
        self._find_starved(batch, step.batch.generating)
        self._describe_late(batch)
        self._describe_chunks(batch, step)

    def _describe_chunks(self, batch: Batch, step: RankStep) -> None:
        if not step.chunks:
            return
        batch.admitted, batch.resumed, batch.sampled = [*batch.admitted], [*batch.resumed], [*batch.sampled]
        for request, start, count in step.chunks:
            sequence = request.sequence
            sequence.num_computed = start + count
            batch.chunks.append((sequence, count))
            if self._requests.start(request):
                self.prefix_cache_stats.count(sequence, step.hits.get(request, 0))
                (batch.resumed if sequence.num_preemptions else batch.admitted).append(sequence)
            if start + count == request.num_prompt:
                sequence.decoding = True
                batch.sampled.append(sequence)

    def _describe_arrived(self, batch: Batch) -> None:
        """Record the sequences that start because their KV has arrived."""

    def _describe_late(self, batch: Batch) -> None:
        """Record those of them that generate for the first time since."""

    def _find_starved(self, batch: Batch, generating: list[Request]) -> None:
        """Record which generating sequences have no place in a step, and which have one again."""
        before, self._starved = self._starved, NOBODY
        if len(self.running) > len(generating) or self._has_ranks:
            placed = set(generating)
            left = [r for rank in self._ranks for r in rank.active if r.state == GENERATING and r not in placed]
            self._starved = [request.sequence for request in left if request.blocks]  # else it was paused
        batch.starved = self._starved
        if before:
            batch.delayed = [sequence for sequence in batch.decodes if sequence in before]

    def _is_awaited(self, sequence: Sequence) -> bool:
        """Return whether a token of a paused sequence is in flight."""
        for index in range(len(self._ranks)):
            settled = self.scheduler.settled_step(index)
            if settled is not None and any(not r.is_dummy and r.sequence is sequence for r in settled.batch.generating):
                return True
        return False

    def update(self, batch: Batch, num_iterations: int = 1) -> tuple[list[Sequence], list[Sequence]]:
        """See `Core`."""
        if num_iterations > 1:
            self.end_iterations(num_iterations - 1)
        self._num_ended += 1
        sampled = [sequence for sequence in batch.sampled if sequence.state != OVER]
        if not self.scheduler.is_open:  # with overlap, in a pause
            self.scheduler.skip()
        return sampled, self._end_iteration()

    def _end_iteration(self) -> list[Sequence]:
        """Do the second half of the scheduler's iteration; return the sequences that it ends."""
        ended = [request for gone in self.scheduler.update({}) if gone is not None for request in gone]
        self._awaited = NOBODY
        if self._steady is not None and not self._leaps.is_steady():
            self._steady = None
        return self._remove(ended) if ended or self.scheduler.dropped else NOBODY

    def _remove(self, ended: list[Request]) -> list[Sequence]:
        """Remove requests that have ended or were cancelled; return those that nobody cancelled."""
        finished = [request.sequence for request in ended if request.sequence.state != OVER]
        self._num_leaving -= len(ended) - len(finished) + len(self.scheduler.dropped)
        for request in (*ended, *self.scheduler.dropped):
            self._requests.remove(request)
        return finished

    # Leaps

    def num_leap_iterations(self, batch: Batch, limit: int) -> int:
        """See `Core`."""
        return self._leaps.num_iterations(limit) if batch is self._steady else 1

    def may_evict(self, num_iterations: int) -> bool:
        """See `Core`."""
        return self._leaps.may_evict(num_iterations)

    def leap(self, num_iterations: int, *, is_ordered: bool) -> None:
        """See `Core`. Blocks are stored only when requests end, so the order within is the same in either case."""
        self.scheduler.repeat(num_iterations)
        self.iteration += num_iterations

    def end_iterations(self, num_iterations: int) -> None:
        """See `Core`."""
        self._leaps.end(num_iterations)
        self._num_ended += num_iterations

    def publish(self) -> None:
        """See `Core`."""
        if self.pool.events:
            self.outbox.events += self.pool.events
            self.pool.events = []

    # Sequences

    def add(self, sequence: Sequence) -> None:
        """See `Core`."""
        self.scheduler.add(self._requests.add(sequence))
        if len(self._ranks[0].active) < self.scheduler.settings.active_limit:
            self._steady = None

    def abort(self, sequence: Sequence) -> None:
        """See `Core`; its blocks are free at the end of the next iteration."""
        if sequence.state != OVER:
            self._cancels.append(self._requests.of[sequence])
            sequence.state = OVER
            sequence.decoding = False
            self._steady = None
            self._is_stuck = False

    def _see_cancels(self) -> None:
        for request in self._cancels:
            self.scheduler.cancel(request)
        self._num_leaving += len(self._cancels)
        self._cancels = []

    def _drop_cancelled(self) -> bool:
        """Remove cancelled requests when no iteration does it, because none computes anything; return whether there were any."""
        ended = [request for rank in self._ranks for request in rank.end()]
        self.scheduler.drop_cancelled()
        has_any = bool(ended or self.scheduler.dropped)
        self._remove(ended)
        return has_any

    def end_load(self, sequence: Sequence, num_valid_blocks: int | None = None) -> bool:
        """See `Core`."""
        raise NotImplementedError("loads of KV from other engines by TensorRT-LLM are not modelled yet")

    def release_kept(self, sequence: Sequence) -> None:
        """See `Core`."""
        raise NotImplementedError("KV that TensorRT-LLM keeps for other engines is not modelled yet")

    def reset_prefix_cache(self, *, preempts_running: bool = False) -> bool:
        """See `Core`.

        Raises:
            RuntimeError: running sequences would have to be preempted.
        """
        if preempts_running and self.running:
            raise RuntimeError("TensorRT-LLM does not pause requests to reset its prefix cache: wait until none runs")
        were_reset = [rank.pool.reset() for rank in self._ranks]
        return all(were_reset)

    # What it is doing

    @property
    def num_ended(self) -> int:
        """See `Core`."""
        return self._num_ended

    @property
    def num_waiting(self) -> int:
        """See `Core`."""
        return len(self.scheduler.waiting) + sum([len(rank.active) for rank in self._ranks]) - len(self.running)

    @property
    def num_queued(self) -> int:
        """See `Core`."""
        return self.num_waiting

    @property
    def num_blocks(self) -> int:
        """See `Core`."""
        return sum([rank.pool.num_blocks for rank in self._ranks])

    @property
    def num_free_blocks(self) -> int:
        """See `Core`."""
        return sum([rank.pool.num_free for rank in self._ranks])

    @property
    def is_stuck(self) -> bool:
        """See `Core`.

        By the rule of GUARANTEED_NO_EVICT, the first prompt that does not fit stops those behind it, even if they have
        started. A prompt that was skipped for reuse, and so was overtaken, may stop one of which a chunk is computed and
        whose blocks it would need.
        """
        return self._is_stuck

    def stall(self) -> NeverAdmittedError | None:
        """See `Core`."""
        if self.pause or self.running or not self.num_waiting:
            return None
        request = [*[request for rank in self._ranks for request in rank.active], *self.scheduler.waiting][0]
        config = self.config
        return NeverAdmittedError(
            request.sequence,
            f"{self.pool.num_free} of {self.pool.num_blocks} blocks are free, nothing runs, its prompt has "
            f"{request.num_prompt} tokens, max_num_tokens is {config.max_num_tokens} and enable_chunked_context is "
            f"{'true' if config.enable_chunked_context else 'false'}",
        )

    def num_tokens(self, sequence: Sequence, num_starved: int = 0) -> int:
        """See `Core`."""
        request = self._requests.of.get(sequence)
        if request is None:
            return sequence.num_known
        return request.num_tokens + (sequence in self._awaited)

    def is_delivered(self, sequence: Sequence) -> bool:
        """See `Core`."""
        return sequence.state != OVER

    def sequences(self) -> list[Sequence]:
        """See `Core`."""
        return [sequence for sequence in self._requests.of if sequence.state != OVER]

    def view(self) -> View:
        """See `Core`."""
        return View(
            num_running=len(self.running),
            num_queued=self.num_queued,
            num_fetching=0,
            num_to_load=0,
            num_loading=0,
            num_loaded=0,
            num_retained=0,
            num_blocks=self.num_blocks,
            num_free_blocks=self.num_free_blocks,
        )

    def backlog(self) -> Backlog:
        """See `Core`."""
        to_compute = decode_kv = queued_decode_kv = 0
        for sequence, request in self._requests.of.items():
            if sequence.state == WAITING and sequence.num_preemptions:
                queued_decode_kv += request.num_prompt
            elif request.state in (INIT, TRANSFERRING) or sequence.state == LOADED:
                queued_decode_kv += request.num_tokens
            elif request.state == CONTEXT:
                to_compute += request.num_to_compute
            elif sequence.state == RUNNING:
                decode_kv += request.num_tokens
        return Backlog(to_compute, decode_kv, queued_decode_kv)

    def remaining(self) -> list[Remaining]:
        """See `Core`."""
        found = []
        for sequence, request in self._requests.of.items():
            if sequence.state != OVER:
                to_compute = request.num_to_compute if request.state == CONTEXT else 0
                found.append(
                    Remaining(to_compute, max(request.last_output - request.num_outputs, 0), request.num_tokens)
                )
        return found


def _refuse(host: HostMemory | None, layout: KvLayout | None) -> None:
    """Refuse what the scheduler has and the core does not model yet, or neither of them."""
    asked = {
        "host memory for KV": host is not None,
        "layers that do not keep all tokens": layout is not None,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise ValueError(f"{name}: not modelled yet for TensorRT-LLM")
