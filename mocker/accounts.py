"""What has ended is accounted for: iterations of a leap, copies between GPU and host, and transfers of KV between engines.

A leap of five, of which two have ended (`add(step, 2)`):

    iteration       1           2           3           4           5
    closed by    schedule    leap(1)     leap(1)     later       later
    its events   published   published   kept until it ends

The rest is the same step, three iterations long. The last iteration always stays for `Engine.complete`.

A copy counts at the end of the iteration in which it ends, and a transfer at the end of the step.
"""

from mocker.core import Core
from mocker.gap_log import GapLog
from mocker.sequence import Sequence
from mocker.step import Step
from mocker.step_times import StepTimes
from mocker.tiers.host_link import HostLink


class Accounts:
    """Tells the core, the step times and the log what has ended, in the order in which it did."""

    def __init__(self, core: Core, link: HostLink, times: StepTimes, log: GapLog, *, is_ordered: bool) -> None:
        """Begin with an idle engine; see `Core.leap` for `is_ordered`."""
        self._core = core
        self._link = link
        self._times = times
        self._log = log
        self.is_ordered = is_ordered
        self.ended_loads: list[tuple[Sequence, int | None]] = []
        """Loads from other engines that have ended, with the number of valid blocks."""
        self.released: list[Sequence] = []
        """Sequences whose KV other engines have read."""

    def advance(self, step: Step, now: float) -> None:
        """Account for the iterations that have ended by now, up to the last but one."""
        if step.num_iterations == 1:
            return
        if self._link.next_end_s <= now:
            self.end_stores(step, now)
        count = min(step.num_ended(now), step.num_iterations - 1)
        if count > 0:
            self.add(step, count)

    def end_stores(self, step: Step, now: float) -> None:
        """Account for the stores that have ended inside a leap, each at the end of its iteration."""
        link, core = self._link, self._core
        while link.stores.next_end_s <= now:
            count = step.first_boundary(link.stores.next_end_s)
            if count >= step.num_iterations or (boundary_s := step.boundary(count)) > now:
                return
            self.add(step, count)
            for store in link.ended(boundary_s, has_loads=False):
                core.end_copy(store)
            core.publish_host_events()

    def add(self, step: Step, count: int) -> None:
        """Account for the first `count` iterations of a leap; at least one must remain."""
        core = self._core
        if count > 1:
            core.leap(count - 1, is_ordered=self.is_ordered)
        core.publish()
        self._log.add(step, count)
        core.leap(1, is_ordered=self.is_ordered)  # closes the next iteration; its events come when it ends
        core.end_iterations(count)
        self._times.num_passed += count
        step.advance(count)

    def end_copies(self, now: float) -> None:
        """Account for the copies that have ended, between two steps."""
        for copy in self._link.ended(now):
            self._core.end_copy(copy)
        self._core.publish()

    def end_transfers(self) -> list[Sequence]:
        """Account for the transfers that have ended, incoming ones first as vLLM does; return the sequences that end."""
        loads, self.ended_loads = self.ended_loads, []
        over = [sequence for sequence, num_valid_blocks in loads if self._core.end_load(sequence, num_valid_blocks)]
        released, self.released = self.released, []
        for sequence in released:
            self._core.release_kept(sequence)
        return [*over, *self._core.take_failed()]
