"""Engines on the clock: one that takes its steps alone, or ranks that take them together."""

import math
from collections.abc import Callable

from dynabench.kv_use import KvUse
from dynabench.virtual.clock import COMPLETION, SCHEDULING, Clock
from mocker import Engine, Sequence, Step, StepOutput
from mocker.engine import NO_LIMIT
from mocker.offload.tiers import TierWork
from mocker.timing.model import Faster


def number_of(sequence: Sequence) -> int:
    """Return the number of a request in the workload, by which a cluster names its sequences."""
    assert isinstance(sequence.id, int)
    return sequence.id


class Rank:
    """What requests can be sent to: one engine on the clock, alone in its worker or with others."""

    def __init__(
        self,
        number: int,
        engine: Engine,
        clock: Clock,
        *,
        on_step: Callable[["Rank", StepOutput], object],
        on_second_token: Callable[[Sequence, float], object],
    ) -> None:
        """Put an engine on the clock.

        Args:
            number: its number in the cluster, which is its slot at every router.
            engine: what takes the steps.
            clock: says when.
            on_step: is told what each step brought.
            on_second_token: is told when those of `note_first_tokens` have their second token.
        """
        self.number = number
        self.engine = engine
        self.prefills = engine.config.kv_role == "kv_producer"
        """Whether others decode what it prefills."""
        self.on_loads: Callable[[list[Sequence]], object] | None = None
        """Is told for which sequences KV is to be loaded."""
        self.on_tier_work: Callable[[list[TierWork]], object] | None = None
        """Is told what is to be done with tiers behind host memory."""
        self.caught_up_s = -1.0
        """When the router last took in this rank's leap."""
        self.kv_use: KvUse | None = None
        """Where the share of the KV blocks in use is noted."""
        self.lockstep: Lockstep | None = None
        """The ranks it takes its steps with."""
        self.on_idle: Callable[[], object] | None = None
        """Is told when it has nothing to do."""
        self.is_gone = False
        """Whether it takes no more steps."""
        self.is_handing_over = False
        """Whether its requests are to go on elsewhere, with their KV."""
        self.num_readers = 0
        """Requests whose KV other ranks have yet to read here."""
        self._kv_since = (0.0, 0.0)  # when its share of the KV blocks in use was last noted, and the share
        self._kv_due = 0.0  # when to note it next
        self._clock = clock
        self._on_step = on_step
        self._on_second_token = on_second_token
        self._has_first_token: list[Sequence] = []
        self._is_idle = True
        self._idle_s = 0.0  # how long it had nothing to do; while it is idle, less the present time
        self._wake_at = -1.0  # the appointment that counts; others are left over from cut leaps
        self._is_starting = False
        self._copy_s = math.inf  # the next appointment with a copy that ends while it is idle
        self._usual_timing = engine.timing
        self._given_up: list[Sequence] = []

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks in use."""
        return 1 - self.engine.num_free_blocks / self.engine.scheduler.pool.num_blocks

    @property
    def num_waiting(self) -> int:
        """Requests that wait for blocks, for their KV or for a seat, as vLLM's gauge `num_requests_waiting` counts them."""
        return self.engine.scheduler.num_waiting

    @property
    def sequences(self) -> list[Sequence]:
        """Its requests, in no order that matters, without those that were given up during the step in flight."""
        scheduler = self.engine.scheduler
        found = [*scheduler.running, *scheduler.holding, *scheduler.queued()]
        return [sequence for sequence in found if sequence not in self._given_up] if self._given_up else found

    def add(self, sequence: Sequence) -> None:
        """Take a request."""
        self.engine.add(sequence)
        self._tell_tier_work()
        self.wake()

    def abort(self, sequence: Sequence) -> None:
        """Give up a request."""
        if not self.is_gone:
            self.engine.abort(sequence)
            if self.engine.step is not None:
                self._given_up.append(sequence)
            self.wake()

    def arrive(self, sequence: Sequence, num_valid_blocks: int | None) -> None:
        """Take the KV that a sequence waits for, or the news that only so many of its blocks are good."""
        if self.is_gone:
            return
        if over := self.engine.arrive(sequence, num_valid_blocks):
            self._on_step(self, StepOutput(self._clock.now, [], over, []))
        self.wake()

    def let_go(self, sequence: Sequence) -> None:
        """Free blocks that were held for other ranks, and for which requests may wait here."""
        if self.is_gone:
            return
        self.engine.let_go(sequence)
        if self.num_waiting:
            self.wake()
        elif self.on_idle is not None:
            self.on_idle()

    def stop(self) -> None:
        """Take no more steps; of the one in flight, only the iterations that have ended count."""
        self.engine.advance(self._clock.now)
        self.is_gone = True
        if not self._is_idle:
            self._is_idle = True
            self._idle_s -= self._clock.now

    @property
    def is_done(self) -> bool:
        """Whether it has no request, and holds no blocks for other ranks."""
        engine = self.engine
        return engine.step is None and engine.is_idle and not (engine.scheduler.retention.held or self.num_readers)

    def on_read(self) -> None:
        """Take note that the KV of a request was read, or is no longer needed."""
        self.num_readers -= 1
        if self.on_idle is not None:
            self.on_idle()

    def slow_down(self, factor: float) -> None:
        """Make each step, from the next one on, take `factor` times as long as usual."""
        if self.is_gone:
            return
        self.engine.advance(self._clock.now)
        self.engine.change_timing(
            Faster(self._usual_timing, 1 / factor, 1 / factor) if factor != 1 else self._usual_timing
        )
        self.wake()

    def wake(self) -> None:
        """Schedule as soon as the iteration under way allows: something has come, or become free."""
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
        """Begin a step, if there is anything to do, and say what is to be loaded for the next ones."""
        step = self.engine.schedule(now, max_iterations=max_iterations)
        if self.kv_use is not None and (step is None or now >= self._kv_due):
            self._note_kv(self.kv_use, now)
        if self.on_loads is not None and (loads := self.engine.take_loads()):
            self.on_loads(loads)
        self._tell_tier_work()
        if step is None:
            self._await_copy()
        elif self._has_first_token:
            self._tell_second_tokens(step)
        if (step is None) is not self._is_idle:
            self._is_idle = step is None
            self._idle_s += now if step is not None else -now
        if step is None and self.on_idle is not None:
            self.on_idle()
        return step

    def _await_copy(self) -> None:
        """Wake once a copy between GPU and host ends."""
        wake_s = self.engine.wake_s
        if wake_s < self._copy_s:
            self._copy_s = wake_s
            self._clock.at(wake_s, COMPLETION, self._end_copy)

    def _end_copy(self) -> None:
        self._copy_s = math.inf
        self.wake()

    def _note_kv(self, kv_use: KvUse, now: float) -> None:
        since, before = self._kv_since
        share = self.kv_usage
        kv_use.add(since, now, before if self._is_idle else (before + share) / 2)  # steps fill blocks steadily
        self._kv_since = now, share
        self._kv_due = now + kv_use.window_s / 8

    def note_first_tokens(self, output: StepOutput) -> None:
        """Take note of those that a step brought past their prompt; a token that came with the KV was their first."""
        for sequence in output.sampled:
            if sequence.is_token_shipped or sequence in self._has_first_token:
                self._has_first_token = [one for one in self._has_first_token if one is not sequence]
                self._on_second_token(sequence, output.end)
            elif sequence.first_token_s == output.end:
                self._has_first_token.append(sequence)

    def await_second_token(self, sequence: Sequence) -> None:
        """Take note that the next token of a sequence is the second of its answer, as another rank gave the first."""
        self._has_first_token.append(sequence)

    def _tell_second_tokens(self, step: Step) -> None:
        waiting = []
        for sequence in self._has_first_token:
            if sequence.is_over:
                continue  # though a step that was scheduled before it stopped may compute more
            if sequence in step.batch.decodes:
                self._on_second_token(sequence, step.boundary(1))
            else:
                waiting.append(sequence)
        self._has_first_token = waiting

    @property
    def busy_s(self) -> float:
        """How long it took steps until now."""
        return (0.0 if self._is_idle else self._clock.now) - self._idle_s

    def finish_step(self) -> None:
        """End the step in flight and pass on what it brought."""
        if self._given_up:
            self._given_up = []
        self._on_step(self, self.engine.complete())
        self._tell_tier_work()

    def _tell_tier_work(self) -> None:
        if self.on_tier_work is not None and (work := self.engine.take_tier_work()):
            self.on_tier_work(work)

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

    Their steps are taken one iteration at a time, as any rank may hold up the others at any step.
    """

    def __init__(self, clock: Clock, ranks: list[Rank]) -> None:
        self._clock = clock
        self._ranks = ranks
        self._is_busy = False
        self._is_due = (
            False  # woken since the last step began, perhaps by what a rank that had nothing to do was told then
        )
        for rank in ranks:
            rank.lockstep = self

    def wake(self) -> None:
        """Take a step at this instant, unless one is under way."""
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
        self._clock.at(end, COMPLETION, self._complete)

    def _complete(self) -> None:
        for rank in self._ranks:
            if rank.engine.step is not None and not rank.is_gone:
                rank.finish_step()
        self._clock.at(self._clock.now, SCHEDULING, self._start)
