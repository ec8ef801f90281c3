"""The simulations of a plan: each carried out once, on all cores, and kept in its folder."""

from collections.abc import Iterator, Sequence
from typing import Any

from dynabench.capacity.settings import PlanConfig
from dynabench.capacity.sureness import sureness_of
from dynabench.capacity.trial import attempt
from dynabench.experiment.parallel import in_parallel
from dynabench.experiment.settings import ExperimentConfig
from dynabench.experiment.source import Source
from dynabench.experiment.store import PointStore
from dynabench.interrupt import Interrupt, InterruptError
from dynabench.plan import Arm
from reports.capacity import Sureness
from reports.points import AnyPoint


class Simulations:
    """What was simulated, by this command and by earlier ones in the same folder."""

    def __init__(
        self, config: PlanConfig, experiment: ExperimentConfig, source: Source, store: PointStore, interrupt: Interrupt
    ) -> None:
        self._config, self._experiment, self._source = config, experiment, source
        self._store, self._interrupt = store, interrupt
        self._simulated: set[str] = set()
        self._asked: set[str] = set()
        """What was simulated, and what the answer rests on; more cores simulate more in advance, but it rests on the same."""
        self._sure: dict[str, list[Sureness]] = {}

    @property
    def count(self) -> int:
        """The simulations of this command that the answer rests on."""
        return len(self._simulated & self._asked)

    @property
    def num_carried_out(self) -> int:
        """The simulations of this command."""
        return len(self._simulated)

    def is_known(self, arm: Arm) -> bool:
        """Return whether an arm was simulated."""
        return self._store.known(arm) is not None

    def points(self, arms: Sequence[Arm]) -> list[AnyPoint]:
        """Return the results of some arms, simulating those that are not known.

        Raises:
            InterruptError: the user interrupted it.
        """
        self.carry_out(arms)
        found = [self._store.known(arm) for arm in arms]
        if any(point is None for point in found):
            raise InterruptError
        self._asked |= {str(arm.changes) for arm in arms}
        return [point for point in found if point is not None]

    def carry_out(self, arms: Sequence[Arm]) -> None:
        """Simulate those of some arms that are not known, and save the results.

        Raises:
            InterruptError: the user interrupted it.
        """
        todo = [arm for arm in arms if not self.is_known(arm)]
        ask, planned = self._experiment, self._config.multiples[0]
        rest = (self._source, ask.seed, ask.repeats, ask.limits, self._config.attainment, self._interrupt.flag)
        calls = [(attempt, (arm, *rest, arm.changes.get("load", 1.0) == planned)) for arm in todo]
        for place, (point, sure) in self._each(calls):
            self._store.keep(todo[place], point)
            self._simulated.add(key := str(todo[place].changes))
            self._sure[key] = sure

    def sure(self, arm: Arm) -> list[Sureness]:
        """Return how certain it is that the limits are met, which is not saved with the results.

        Raises:
            InterruptError: the user interrupted it.
        """
        if not (found := self._sure.get(str(arm.changes))):
            ask = self._experiment
            call = (sureness_of, (arm, self._source, ask.seed, ask.limits, self._config.attainment))
            [(_, found)] = self.parallel([call])
        return list(found)

    def parallel(self, calls: list[Any]) -> list[tuple[int, Any]]:
        """Carry out calls on all cores.

        Raises:
            InterruptError: the user interrupted it.
        """
        return list(self._each(calls))

    def _each(self, calls: list[Any]) -> Iterator[tuple[int, Any]]:
        """Carry out calls on all cores, and yield each result as soon as it is known.

        Raises:
            InterruptError: the user interrupted it; what was yielded counts.
        """
        if calls:
            yield from in_parallel(calls, self._experiment.jobs, interrupt=self._interrupt)
        if self._interrupt.is_asked:
            raise InterruptError
