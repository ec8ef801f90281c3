"""Ask for what a search wants to know: bounds and points, with the progress of both on the screen."""

from collections.abc import Sequence

from dynabench.arm import Arm
from dynabench.capacity.findings import Findings
from dynabench.capacity.floors import Floor, floor_of
from dynabench.capacity.points import Points
from dynabench.capacity.search import Question, Search
from dynabench.experiment.source import Source
from dynabench.interrupt import noted
from dynabench.progress import Display
from reports.figures.conditions import Condition
from reports.sweep.points import AnyPoint


class Asking:
    """Answers the questions of a search."""

    def __init__(
        self, points: Points, source: Source, limits: Sequence[Condition], attainment: float, display: Display
    ) -> None:
        self._points, self._source, self._display = points, source, display
        self._limits, self._attainment = limits, attainment

    @property
    def at_once(self) -> int:
        """How many simulations run at once."""
        return self._points.at_once

    def simulate(self, arms: Sequence[Arm]) -> None:
        """Simulate what will be asked for: see `Points.simulate`."""
        self._points.simulate(arms)

    def floors(self, found: Findings, load: float, places: Sequence[int] | None = None) -> list[Floor]:
        """Return what each layout (default: all) needs at least."""
        chosen = found.candidates if places is None else [found.candidates[place] for place in places]
        at = "" if load == found.load else f" at {found.load_told(load)} the load"
        self._display.what, self._display.unit = f"bounding layouts{at}", "layouts"
        settings = [candidate.arm(1, load=load).settings for candidate in chosen]
        return self._points.carry_out(
            [(floor_of, (each, self._source, self._limits, self._attainment)) for each in settings]
        )

    def point(self, found: Findings, question: Question, load: float) -> AnyPoint:
        """Return the result of a question, and keep it.

        Raises:
            InterruptError: the user interrupted it.
        """
        [point] = self._points.ask([found.arm(question, load)])
        found.keep(question, load, point)
        return point

    def drive(self, found: Findings, search: Search, load: float) -> None:
        """Simulate what a search asks for until it is finished."""
        best = search.best
        self._display.what, self._display.unit = "none found so far", "simulations"
        while (question := search.next()) is not None:
            if not self._points.is_known(found.arm(question, load)):
                self._points.simulate([found.arm(one, load) for one in search.ahead(self.at_once)])
            point = self.point(found, question, load)
            with noted():  # a search that has learnt half of it would be wrong
                search.learn(question, point.state, point.outcomes)
            if search.best != best:
                best = search.best
                assert best is not None
                self._display.say(f"{found.named(best, load)} meets the limits")
            known = "none" if best is None else found.named(best, load)
            self._display.what = f"best so far {known}, {self._points.num_simulated} simulated"
