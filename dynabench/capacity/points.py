"""The simulated points of a plan: those that the folder has, and new ones, simulated on all cores."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from dynabench.arm import Arm
from dynabench.capacity.settings import PlanConfig
from dynabench.capacity.sureness import sureness_of
from dynabench.capacity.trial import attempt
from dynabench.experiment.parallel import Call, in_parallel, num_at_once
from dynabench.experiment.settings import ExperimentConfig
from dynabench.experiment.source import Source
from dynabench.experiment.store import PointStore, key_of
from dynabench.interrupt import Interrupt, InterruptError
from reports.capacity.answer import Sureness
from reports.sweep.points import AnyPoint, Cut


class Points:
    """Simulates arms once, and counts those that were asked for.

    What is simulated in advance depends on the number of cores; what is asked for does not.
    """

    def __init__(
        self, store: PointStore, source: Source, config: PlanConfig, experiment: ExperimentConfig, interrupt: Interrupt
    ) -> None:
        self._store, self._experiment, self._interrupt = store, experiment, interrupt
        self._backend, self._address = config.backend, config.cluster
        self._asked: set[str] = set()
        self._simulated: set[str] = set()
        ask = experiment
        self._rest = (source, ask.seed, ask.repeats, ask.limits, config.attainment, interrupt.flag)
        self._planned = config.multiples[0]
        self._sure: dict[str, list[Sureness]] = {}
        self._spent_s = 0.0

    @property
    def each_s(self) -> float | None:
        """How long a simulation took on average, with others at once (s); None if there was none."""
        return self._spent_s / len(self._simulated) if self._simulated else None

    @property
    def at_once(self) -> int:
        """How many simulations run at once."""
        return num_at_once(self._experiment.jobs, self._backend, self._address)

    @property
    def num_simulated(self) -> int:
        """How many points were simulated, in advance or not."""
        return len(self._simulated)

    @property
    def num_asked(self) -> int:
        """How many of these were asked for."""
        return len(self._simulated & self._asked)

    def is_known(self, arm: Arm) -> bool:
        """Return whether an arm was simulated before."""
        return self._store.known(arm) is not None

    def ask(self, arms: Sequence[Arm], *, may_cut: bool = True) -> list[AnyPoint]:
        """Return the results of some arms, simulating those that are not known, if needed to their ends.

        Raises:
            InterruptError: the user interrupted it.
        """
        self.simulate(arms, may_cut=may_cut)
        found = [self._store.known(arm) for arm in arms]
        if any(point is None for point in found):
            raise InterruptError
        self._asked |= {key_of(arm) for arm in arms}
        return [point for point in found if point is not None]

    def simulate(self, arms: Sequence[Arm], *, may_cut: bool = True) -> None:
        """Simulate those of some arms that are not known, and save the results.

        Raises:
            InterruptError: the user interrupted it; what was saved counts.
        """
        todo = [arm for arm in arms if not self._is_enough(self._store.known(arm), may_cut=may_cut)]
        calls = [(attempt, (arm, *self._rest, arm.changes.get("load", 1.0) == self._planned, may_cut)) for arm in todo]
        started = time.monotonic()
        for place, (point, sure) in self._each(calls):
            self._store.keep(todo[place], point)
            self._simulated.add(key := key_of(todo[place]))
            self._sure[key] = sure
        self._spent_s += time.monotonic() - started

    @staticmethod
    def _is_enough(point: AnyPoint | None, *, may_cut: bool) -> bool:
        """Return whether what is known of an arm is what was asked for."""
        return point is not None and (may_cut or not isinstance(point, Cut))

    def whole(self, arm: Arm) -> AnyPoint:
        """Return the result of an arm that was asked for, simulated to its end if it was cut.

        Raises:
            InterruptError: the user interrupted it.
        """
        point = self._store.known(arm)
        assert point is not None
        if isinstance(point, Cut):
            [(point, _)] = self.carry_out([(attempt, (arm, *self._rest, False, False))])
            self._store.keep(arm, point)
        return point

    def sure(self, arm: Arm) -> list[Sureness]:
        """Return how certain it is that the limits are met, which is not saved with the points.

        Raises:
            InterruptError: the user interrupted it.
        """
        if not (found := self._sure.get(key_of(arm))):
            source, seed, _, limits, attainment, _ = self._rest
            [found] = self.carry_out([(sureness_of, (arm, source, seed, limits, attainment))])
        return list(found)

    def carry_out(self, calls: Sequence[Call]) -> list[Any]:
        """Carry out any calls on all cores; return their results in order.

        Raises:
            InterruptError: the user interrupted it.
        """
        return [result for _, result in sorted(self._each(calls), key=lambda each: each[0])]

    def _each(self, calls: Sequence[Call]) -> Iterator[tuple[int, Any]]:
        """Yield each result as soon as it is known."""
        if calls:
            yield from in_parallel(
                calls, self._experiment.jobs, interrupt=self._interrupt, backend=self._backend, address=self._address
            )
        if self._interrupt.is_asked:
            raise InterruptError
