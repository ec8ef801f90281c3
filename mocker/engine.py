"""The engine: the iterations of a core laid out in time, whatever its family (`core.py`).

    step = engine.schedule(now)      # close a batch; return when it ends, and what it computes
    ...                              # the driver waits until step.end
    output = engine.complete()       # tokens, finishes, KV events

A step may span many iterations of one batch (a leap). Each iteration then only adds one token to each sequence, so the
durations follow a closed form and only block counts change. A leap that is cut at any iteration and continued has the
same schedules, times and events as its iterations taken one at a time.

With asynchronous scheduling, the engine closes a second batch as soon as a step starts. That batch is the next step,
whatever the first one produces, so an arriving sequence waits for the step in flight and for the one after it.

The engine copies KV between the GPU and host memory itself, and knows when a copy ends as soon as it starts. The driver
calls an idle engine again at `wake_s`. A leap ends when a load ends; a store ends it only if something has to happen at
once (`ends_at_stores`). What has ended is accounted for in `accounts.py`.

What only the driver can do is in `outbox` (`contract.py`): it transfers KV between engines, and serves the tiers behind
host memory.
"""

from array import array
from typing import Final

from mocker.accounts import Accounts
from mocker.adapter_slots import AdapterSlots
from mocker.batch import Batch
from mocker.contract import AdapterMemory, Backlog, EngineSettings, HostUse, Pause, Remaining, View
from mocker.core import Core
from mocker.gap_log import GapLog
from mocker.media import EncoderCounts
from mocker.prefix_cache_stats import PrefixCacheStats
from mocker.sequence import Sequence
from mocker.speculation.counts import DraftCounts
from mocker.step import Step, StepOutput
from mocker.step_times import StepTimes
from mocker.tiers.config import HostMemory
from mocker.tiers.copies import NO_WORK
from mocker.tiers.host_link import HostLink
from mocker.tiers.work import Found, LookUp, Read, Write
from mocker.timing.model import Ramp, TimingModel

NO_LIMIT: Final = 1 << 62


class Engine:
    """One engine (one data-parallel rank): add, abort, schedule, complete."""

    def __init__(
        self,
        config: EngineSettings,
        core: Core,
        timing: TimingModel,
        *,
        host: HostMemory | None = None,
        adapters: AdapterMemory | None = None,
        kv_events: bool = True,
        ordered_events: bool = True,
    ) -> None:
        """Lay out the iterations of an idle core; see `new_engine` for the arguments."""
        self.config = config
        self._core = core
        self.outbox = core.outbox
        """What it asks of the driver."""
        self.host_memory = host
        """Its host memory, if it keeps KV there."""
        self._link = HostLink(host)
        self.adapters = None if adapters is None else AdapterSlots(adapters)
        """Its LoRA adapters, if loading them takes time."""
        self.ends_at_stores = kv_events
        """Whether a step ends when KV has arrived in host memory, because a caller takes that event at the end of a
        step. Callers that use `advance` see it without."""
        self.log = self._new_log(core)
        """The gaps between tokens."""
        self.step: Step | None = None
        """The step in flight."""
        self._is_async = config.is_async
        self._has_host = host is not None  # else there are no copies
        self._has_events = kv_events
        self._times = self._new_times(timing, core, may_load=config.is_kv_consumer or self._has_host)
        is_ordered = kv_events and ordered_events
        self._accounts = Accounts(core, self._link, self._times, self.log, is_ordered=is_ordered)
        self._ahead: Batch | None = None  # asynchronous: the batch after the step in flight
        self._ahead_s = 0.0  # when it was closed
        self._work = NO_WORK  # copies that start with the batch ahead
        self._aborts: list[Sequence] = []
        self._lead_s = 0.0  # before the next step starts

    def _new_log(self, core: Core) -> GapLog:
        return GapLog(core)

    def _new_times(self, model: TimingModel, core: Core, *, may_load: bool) -> StepTimes:
        return StepTimes(model, core, may_load=may_load)

    @property
    def is_idle(self) -> bool:
        """True if nothing waits or runs; blocks may still be kept for other engines."""
        core = self._core
        return not (core.running or core.num_waiting or self._ahead)

    @property
    def is_stuck(self) -> bool:
        """True if nothing can continue until a sequence is aborted."""
        return self.step is None and self._ahead is None and self._core.is_stuck

    @property
    def pause_kind(self) -> Pause | None:
        """What it leaves alone while it is paused; None if it is not."""
        return self._core.pause

    @property
    def ahead(self) -> Batch | None:
        """The batch that was closed ahead, if there is one."""
        return self._ahead

    @property
    def num_blocks(self) -> int:
        """Blocks that can hold tokens."""
        return self._core.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be allocated now."""
        return self._core.num_free_blocks

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for blocks, for their KV or for a seat."""
        return self._core.num_waiting

    @property
    def num_queued(self) -> int:
        """Those of them that hold no blocks."""
        return self._core.num_queued

    @property
    def prefix_cache_stats(self) -> PrefixCacheStats:
        """How much of the prompts was found in caches."""
        return self._core.prefix_cache_stats

    def view(self) -> View:
        """Return what it is doing."""
        return self._core.view()

    def backlog(self) -> Backlog:
        """Return its work in tokens."""
        return self._core.backlog()

    def remaining(self) -> list[Remaining]:
        """Return what is left to do for each of its sequences, up to the last iteration that is accounted for."""
        return self._core.remaining()

    def host_use(self) -> HostUse | None:
        """Return what its host memory contains and what was copied; None if there is none."""
        if self.host_memory is None:
            return None
        link = self._link
        return HostUse(self._core.host_chunks(), link.loads, link.stores, link.num_flushes, link.stall_s)

    @property
    def draft_counts(self) -> DraftCounts | None:
        """What came of its drafts; None if it does not speculate."""
        return None

    @property
    def encoder_counts(self) -> EncoderCounts | None:
        """What its encoder did; None if it has none."""
        return None

    def sequences(self) -> list[Sequence]:
        """Return its sequences, in arbitrary order, without those that were aborted during the step in flight."""
        found = self._core.sequences()
        return [sequence for sequence in found if sequence not in self._aborts] if self._aborts else found

    @property
    def wake_s(self) -> float:
        """When there may be work although nothing was added (s): the end of the next copy between GPU and host."""
        return self._link.next_end_s

    @property
    def known_until_s(self) -> float:
        """When the last accounted iteration ended (s)."""
        return self._times.last_end_s if self.step is None else self.step.start

    def num_known_tokens(self, sequence: Sequence) -> int:
        """Count the tokens of a sequence, prompt and output, up to the last step that ended.

        The scheduler is ahead of that by the closed batches that have not ended.
        """
        count, step, ahead = self._core.num_tokens(sequence), self.step, self._ahead
        if step is None:
            return count
        if ahead is not None and sequence in ahead.admitted:
            return count - sequence.is_token_shipped
        if sequence.decoding:
            num_starved = sum(sequence in batch.starved for batch in (step.batch, ahead) if batch is not None)
            return self._core.num_tokens(sequence, num_starved)
        is_awaited = ahead is not None and sequence in ahead.preempted and sequence in step.batch.decodes
        return count - (is_awaited and sequence not in self._core.dropped)

    @property
    def timing(self) -> TimingModel:
        """Its step-time model."""
        return self._times.model

    def change_timing(self, timing: TimingModel) -> None:
        """Use another step-time model from the next step on."""
        self._times.change(timing)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; it takes part from the next `schedule` on.

        Raises:
            ValueError: it can never fit into the cache or the model length.
        """
        self._core.add(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Remove a sequence, at once or when the step in flight ends; do nothing if it has finished."""
        if self.step is not None:
            self._aborts.append(sequence)
        else:
            self._remove(sequence)

    def _remove(self, sequence: Sequence) -> None:
        self._core.abort(sequence)
        self.log.has_sudden_end = True

    def pause(self, what: Pause) -> None:
        """Leave sequences alone until `resume`; the step in flight ends as usual."""
        self._core.pause = what

    def resume(self) -> None:
        """End a pause, if there is one."""
        self._core.pause = None

    def end_load(self, sequence: Sequence, num_valid_blocks: int | None = None) -> list[Sequence]:
        """Report that a sequence's KV is loaded; it counts now or when the step in flight ends.

        Args:
            sequence: one of `outbox.take_loads`, even if it has been aborted since.
            num_valid_blocks: if reading failed, how many blocks of its prompt are good, cached ones included.

        Returns:
            the sequences that end at once; others that end because of it are in a step's `finished`.
        """
        self._accounts.ended_loads.append((sequence, num_valid_blocks))
        return [] if self.step is not None else self._accounts.end_transfers()

    def release_kept(self, sequence: Sequence) -> None:
        """Free the blocks that a sequence with `is_remote_decode` left for another engine, now or when the step in flight ends."""
        self._accounts.released.append(sequence)
        if self.step is None:
            self._accounts.end_transfers()

    def end_look_up(self, look_up: LookUp, found: list[Found]) -> None:
        """Record where the chunks of a look-up are: tier by tier, from the first chunk on; the rest is in no tier.

        A sequence may be ready now, so this cuts a leap in progress, as a new one does; so does `end_read`.
        """
        self._core.end_look_up(look_up, found)

    def end_read(self, read: Read, num_chunks: int) -> None:
        """Report that a read has ended with its first `num_chunks` chunks."""
        self._core.end_read(read, num_chunks)

    def end_write(self, write: Write) -> None:
        """Report that a write has ended, whether or not the tier accepted it."""
        self._core.end_write(write)

    def reset_prefix_cache(self, *, preempts_running: bool = False) -> bool:
        """Forget all cached blocks, or return False if any is in use; call it between steps.

        With `preempts_running`, sequences that run do not stand in the way: they are preempted. The next step that ends
        brings the event.

        Raises:
            RuntimeError: they were preempted, or cannot be, and blocks are still in use.
        """
        assert self.step is None, "complete the step in flight first"
        return self._core.reset_prefix_cache(preempts_running=preempts_running)

    def schedule(self, now: float, *, max_iterations: int = 1) -> Step | None:
        """Close a batch and return its step, or None if there is nothing to do.

        Args:
            now: the current time (s).
            max_iterations: how many iterations the step may span if nothing happens in between.

        Raises:
            NeverAdmittedError: sequences wait, and the first can never be admitted: it may be aborted.
        """
        assert self.step is None, "complete the step in flight first"
        if self.outbox.shipped:
            self.outbox.take_shipped()
        if self._link.next_end_s <= now:
            self._accounts.end_copies(now)
        batch = self._next_batch(now)
        if batch is None:
            return None
        if batch.decodes and self._times.last_end_s < now:
            self.log.end_pause(batch, self._times.last_end_s)
        # Before the next batch is closed: that advances `num_computed`.
        duration = 0.0
        if not batch.is_undisturbed:
            duration = self._times.mixed_s(batch) + self._lead_s
            if self.adapters is not None:
                duration += self.adapters.begin(batch)
            if self._has_host and self._link.awaited_s:
                duration = self._link.overlapped(now, duration)
        if self._is_async:
            self._ahead, self._ahead_s = self._core.schedule(), now
            if self._has_host:
                self._work = self._core.take_copies()
                if self._work is not NO_WORK:  # copies start when it ends
                    max_iterations = 1
        if batch.is_undisturbed:
            is_alone = self.log.is_first_after_pause or (self._is_async and self._ahead is not batch)
            limit = 1 if is_alone else max_iterations
            self.step = step = self._times.decoding_step(batch, now, limit)
            if self._link.next_end_s < step.end and (end_s := self._next_end_s()) < step.end:
                step.cut(end_s)
        else:
            self.step = step = Step(batch, now, Ramp(duration), 0, 1, now + duration)
        return step

    def _next_batch(self, now: float) -> Batch | None:
        """Return the batch that was closed ahead, or close one. A batch without computation ends at once."""
        core, has_host = self._core, self._has_host
        batch, closed_s, self._ahead = self._ahead, self._ahead_s, None
        stall_s = self._lead_s = self._link.begin(self._work, now) if has_host else 0.0
        while batch is None or not (batch.decodes or batch.chunks):
            if batch is not None:
                self.log.begin_batch(batch, closed_s, self._times.last_end_s)
                _, finished = core.update(batch)
                assert not finished, "an empty batch cannot end a sequence"
            batch, closed_s = core.schedule(), now
            if has_host:
                stall_s = max(stall_s, self._link.begin(core.take_copies(), now))
            self._lead_s = stall_s + self._times.model.lead_s  # the GPU is idle meanwhile
            if batch is None:
                if has_host:
                    self._link.begin(NO_WORK, now)  # there is no next batch for stores to wait for
                if (stall := core.stall()) is not None:
                    raise stall
                break
        self._work = NO_WORK
        if batch is not None and not batch.is_undisturbed:
            self.log.begin_batch(batch, closed_s, self._times.last_end_s)
        return batch

    def _next_end_s(self) -> float:
        """Return the end of the next copy that cuts a step (s)."""
        link = self._link
        return link.next_end_s if self.ends_at_stores or self._core.ends_at_stores else link.loads.next_end_s

    def stretch(self, end: float) -> None:
        """Extend the step in flight, if any, to a later time; it must have one iteration."""
        if self.step is not None and self.step.end != end:
            self.step = self._times.stretched(self.step, end)

    def complete(self) -> StepOutput:
        """End the step in flight: account for its aborts, tokens, finishes and blocks, in vLLM's order."""
        step = self.step
        assert step is not None, "no step in flight"
        core, link, log, accounts, batch = self._core, self._link, self.log, self._accounts, step.batch
        if step.num_iterations > 1 and link.next_end_s <= step.end:
            accounts.end_stores(step, step.end)
        has_aborts = bool(self._aborts)
        if has_aborts:
            self._end_aborted(step)
        if step.num_iterations > 1:
            core.leap(step.num_iterations - 1, is_ordered=accounts.is_ordered)
        self._times.num_passed += step.num_iterations
        if batch.decodes:
            log.add(step, step.num_iterations)
        if core.dropped:
            log.begin_waits(core.dropped, self._times.last_end_s)
        sampled, finished = core.update(batch, step.num_iterations)
        if accounts.ended_loads or accounts.released:
            finished = [*finished, *accounts.end_transfers()]
        if self.adapters is not None and finished:
            self.adapters.leave(finished)
        log.is_first_after_pause, log.has_sudden_end = False, has_aborts
        if sampled or finished:
            log.end_step(step.end, sampled, finished)
        if self._has_events:
            core.publish()
        if link.next_end_s <= step.end:
            accounts.end_copies(step.end)
        self.step = None
        self._times.last_end_s = step.end
        return StepOutput(step.end, sampled, finished, batch.chunks)

    def _end_aborted(self, step: Step) -> None:
        """Remove the sequences that were aborted during the step, before its last iteration ends."""
        if step.num_iterations > 1:
            self._accounts.add(step, step.num_iterations - 1)
        aborts, self._aborts = self._aborts, []
        for sequence in aborts:
            self._remove(sequence)

    def advance(self, now: float) -> None:
        """Account for the iterations of the step in flight that have ended by now, so that their events can be taken."""
        if self.step is not None:
            self._accounts.advance(self.step, now)

    @property
    def may_evict(self) -> bool:
        """Whether the step in flight may evict cached blocks, from the GPU or from host memory, before its last iteration."""
        step = self.step
        if step is None or step.num_iterations == 1:
            return False
        return self._has_host or self._core.may_evict(step.num_iterations)

    def take_gaps(self) -> "array[float]":
        """Return the rows of the gaps between tokens so far, and begin a new log."""
        return self.log.take()

    def add_gap(self, since_s: float, until_s: float) -> None:
        """Log a gap that no step of this engine ends: the last token of an answer came with its KV."""
        self.log.add_gap(since_s, until_s)

    def decoded(self) -> list[Sequence]:
        """Return the sequences that get a token from decoding in the step in flight."""
        assert self.step is not None, "no step in flight"
        return [sequence for sequence in self.step.batch.decodes if self._core.is_delivered(sequence)]
