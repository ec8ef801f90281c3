"""Engines on the clock: an engine that steps alone, or ranks that step together."""

import math
from collections.abc import Callable
from typing import Protocol

from dynabench.kv_use import KvUse
from dynabench.virtual.clock import COMPLETION, SCHEDULING, Clock
from mocker import Engine, Sequence, Step, StepOutput
from mocker.engine import NO_LIMIT
from mocker.tiers.work import TierWork
from mocker.timing.model import Faster


def number_of(sequence: Sequence) -> int:
    """Return the number of a sequence's request in the workload, which is the sequence's id."""
    assert isinstance(sequence.id, int)
    return sequence.id


class Listener(Protocol):
    """Whoever sends requests to ranks, and hears what comes of them."""

    def on_step(self, rank: "Rank", output: StepOutput) -> object:
        """Take the output of a step."""

    def on_loads(self, sequences: list[Sequence]) -> object:
        """Have the KV of sequences read, for which a rank has allocated blocks."""

    def on_second_token(self, sequence: Sequence, time: float) -> object:
        """Note when a sequence from `note_first_tokens` had its second token."""


class Rank:
    """A destination for requests: one engine on the clock, alone in its worker or with others."""

    def __init__(self, number: int, engine: Engine, clock: Clock, listener: Listener) -> None:
        self.number = number
        """Its number in the cluster, which is its slot at every router."""
        self.engine = engine
        self._outbox = engine.outbox
        self._num_blocks = engine.num_blocks
        self.prefills = engine.config.kv_role == "kv_producer"
        """Whether other ranks decode what it prefills."""
        self.reads_kv = False
        """Whether it reads KV that other ranks have computed."""
        self.on_tier_work: Callable[[list[TierWork]], object] | None = None
        """Called with the work for tiers behind host memory."""
        self.caught_up_s = -1.0
        """When the router last caught up with this rank's leap."""
        self.kv_use: KvUse | None = None
        """Records the share of the KV blocks in use."""
        self.lockstep: Lockstep | None = None
        """The ranks it steps with."""
        self.on_idle: Callable[[], object] | None = None
        """Called when it has nothing to do."""
        self.is_gone = False
        """Whether it has stopped for good."""
        self.is_handing_over = False
        """Whether its requests are being moved elsewhere, with their KV."""
        self.readers: dict[int, None] = {}
        """The moved requests whose KV other ranks have yet to read here, by number."""
        self._kv_since = (0.0, 0.0)  # when the share of the KV blocks in use was last recorded, and the share
        self._kv_due = 0.0  # when to record it next
        self._clock = clock
        self._listener = listener
        self._has_first_token: list[Sequence] = []
        self._is_idle = True
        self._idle_s = 0.0  # total idle time; while it is idle, less the present time
        self._wake_at = -1.0  # the completion that counts; others are left over from leaps that were cut short
        self._is_starting = False
        self._copy_s = math.inf  # time of the scheduled event for a copy that ends while it is idle
        self._usual_timing = engine.timing

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks in use."""
        return 1 - self.engine.num_free_blocks / self._num_blocks

    @property
    def num_waiting(self) -> int:
        """Requests that wait for blocks, for their KV or for a seat, like vLLM's gauge `num_requests_waiting`."""
        return self.engine.num_waiting

    @property
    def sequences(self) -> list[Sequence]:
        """Its requests: see `Engine.sequences`."""
        return self.engine.sequences()

    def add(self, sequence: Sequence) -> None:
        """Add a request."""
        self.engine.add(sequence)
        if self.on_tier_work is not None:
            self._tell_tier_work(self.on_tier_work)
        self.wake()

    def abort(self, sequence: Sequence) -> None:
        """Abort a request."""
        if not self.is_gone:
            self.engine.abort(sequence)
            self.wake()

    def end_load(self, sequence: Sequence, num_valid_blocks: int | None) -> None:
        """Deliver the KV that a sequence waits for, of which perhaps only `num_valid_blocks` blocks are valid."""
        if self.is_gone:
            return
        if over := self.engine.end_load(sequence, num_valid_blocks):
            self._listener.on_step(self, StepOutput(self._clock.now, [], over, []))
        self.wake()

    def release_kept(self, sequence: Sequence) -> None:
        """Free blocks that were held for other ranks; requests may be waiting for them."""
        if self.is_gone:
            return
        self.engine.release_kept(sequence)
        if self.num_waiting:
            self.wake()
        elif self.on_idle is not None:
            self.on_idle()

    def stop(self) -> None:
        """Stop for good; of the step in flight, only the iterations that have ended count."""
        self.engine.advance(self._clock.now)
        self.is_gone = True
        if not self._is_idle:
            self._is_idle = True
            self._idle_s -= self._clock.now

    @property
    def is_done(self) -> bool:
        """Whether it has no requests and holds no blocks for other ranks."""
        engine = self.engine
        return engine.step is None and engine.is_idle and not (self.readers or engine.view().num_retained)

    def on_read(self, number: int) -> None:
        """Note that the KV of a moved request was read, or is no longer needed."""
        del self.readers[number]
        if self.on_idle is not None:
            self.on_idle()

    def slow_down(self, factor: float) -> None:
        """Make each step, starting with the next, take `factor` times as long as usual."""
        if self.is_gone:
            return
        self.engine.advance(self._clock.now)
        self.engine.change_timing(
            Faster(self._usual_timing, 1 / factor, 1 / factor) if factor != 1 else self._usual_timing
        )
        self.wake()

    def wake(self) -> None:
        """Schedule as soon as the current iteration allows, because work arrived or blocks became free."""
        if self.is_gone:
            return
        if self.lockstep is not None:
            self.lockstep.wake()
            return
        step = self.engine.step
        if step is None:
            self._start_soon()
        elif step.cut(self._clock.now):
            self._wake_at = step.end
            self._clock.at(step.end, COMPLETION, self._complete)

    def schedule(self, now: float, max_iterations: int) -> Step | None:
        """Begin a step, if there is anything to do, and pass on what has to be loaded for later steps."""
        step = self.engine.schedule(now, max_iterations=max_iterations)
        if self.kv_use is not None and (step is None or now >= self._kv_due):
            self._note_kv(self.kv_use, now)
        if self._outbox.loads and self.reads_kv:
            self._listener.on_loads(self._outbox.take_loads())
        if self.on_tier_work is not None:
            self._tell_tier_work(self.on_tier_work)
        if step is None:
            self._await_copy()
        if (step is None) is not self._is_idle:
            self._is_idle = step is None
            self._idle_s += now if step is not None else -now
        if step is None and self.on_idle is not None:
            self.on_idle()
        return step

    def _await_copy(self) -> None:
        """Wake when a copy between GPU and host ends."""
        wake_s = self.engine.wake_s
        if wake_s < self._copy_s:
            self._copy_s = wake_s
            self._clock.at(wake_s, COMPLETION, self._end_copy)

    def _end_copy(self) -> None:
        self._copy_s = math.inf
        self.wake()

    def _note_kv(self, kv_use: KvUse, now: float) -> None:
        since, before = self._kv_since
        share = 1 - self.engine.num_free_blocks / self._num_blocks  # `kv_usage`, without a call in nearly every step
        kv_use.add(since, now, before if self._is_idle else (before + share) / 2)  # steps fill blocks steadily
        self._kv_since = now, share
        self._kv_due = now + kv_use.window_s / 8

    def note_first_tokens(self, output: StepOutput) -> None:
        """Note the sequences that got their first token, or their second if the first came with the KV."""
        for sequence in output.sampled:
            if sequence.is_token_shipped or sequence in self._has_first_token:
                self._has_first_token = [one for one in self._has_first_token if one is not sequence]
                self._listener.on_second_token(sequence, output.end)
            elif sequence.first_token_s == output.end:
                self._has_first_token.append(sequence)

    def await_second_token(self, sequence: Sequence) -> None:
        """Note that a sequence's next token is the second of its answer, because another rank generated the first."""
        self._has_first_token.append(sequence)

    def tell_second_tokens(self) -> None:
        """Tell which sequences have their second token at the end of the first iteration of the step in flight."""
        step = self.engine.step
        if step is None or not self._has_first_token:
            return
        waiting = []
        for sequence in self._has_first_token:
            if sequence.is_over:
                continue  # a step that was scheduled before it stopped may still compute it
            if sequence in step.batch.decodes:
                self._listener.on_second_token(sequence, step.boundary(1))
            else:
                waiting.append(sequence)
        self._has_first_token = waiting

    @property
    def busy_s(self) -> float:
        """How long it has been busy so far."""
        return (0.0 if self._is_idle else self._clock.now) - self._idle_s

    def finish_step(self) -> None:
        """End the step in flight and pass on its output."""
        self._listener.on_step(self, self.engine.complete())
        if self.on_tier_work is not None:
            self._tell_tier_work(self.on_tier_work)

    def _tell_tier_work(self, on_tier_work: Callable[[list[TierWork]], object]) -> None:
        if self._outbox.tier_work:
            on_tier_work(self._outbox.take_tier_work())

    def _start_soon(self) -> None:
        if not self._is_starting:
            self._is_starting = True
            self._clock.at(self._clock.now, SCHEDULING, self._start)

    def _start(self) -> None:
        self._is_starting = False
        if self.is_gone:
            return
        step = self.schedule(self._clock.now, NO_LIMIT)
        if step is not None:
            if self._has_first_token:
                self.tell_second_tokens()
            self._wake_at = step.end
            self._clock.at(step.end, COMPLETION, self._complete)

    def _complete(self) -> None:
        now = self._clock.now
        if now != self._wake_at or self.engine.step is None or self.is_gone:
            return
        self.finish_step()
        if self._clock.peek() > now:
            self._start()
        else:
            self._start_soon()


class Lockstep:
    """Data-parallel ranks that share experts: each waits for the slowest, and all pad to the largest batch.

    They step one iteration at a time, because any rank may delay the others at any step.
    """

    def __init__(self, clock: Clock, ranks: list[Rank]) -> None:
        self._clock = clock
        self._ranks = ranks
        self._is_busy = False
        self._is_due = False  # woken since the last step began, perhaps by something an idle rank received then
        for rank in ranks:
            rank.lockstep = self

    def wake(self) -> None:
        """Start a step at this instant, unless one is in progress."""
        self._is_due = True
        if not self._is_busy:
            self._is_busy = True
            self._clock.at(self._clock.now, SCHEDULING, self._start)

    def _start(self) -> None:
        now = self._clock.now
        self._is_due = False
        if self._ranks[0].is_gone:  # they share a process
            return
        steps = [step for rank in self._ranks if (step := rank.schedule(now, 1)) is not None]
        if not steps:
            self._is_busy = False
            if self._is_due:
                self.wake()
            return
        end = max(step.end for step in steps)
        for rank in self._ranks:
            rank.engine.stretch(end)
            rank.tell_second_tokens()
        self._clock.at(end, COMPLETION, self._complete)

    def _complete(self) -> None:
        for rank in self._ranks:
            if rank.engine.step is not None and not rank.is_gone:
                rank.finish_step()
        self._clock.at(self._clock.now, SCHEDULING, self._start)
