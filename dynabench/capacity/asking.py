"""Ask for what a search wants to know: bounds and points, with the progress of both on the screen."""

from collections.abc import Sequence

from dynabench.arm import Arm
from dynabench.capacity.estimate import num_left, told
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
        self,
        points: Points,
        source: Source,
        limits: Sequence[Condition],
        attainment: float,
        display: Display,
        *,
        num_modes: int,
    ) -> None:
        self._points, self._source, self._display = points, source, display
        self._limits, self._attainment, self._num_modes = limits, attainment, num_modes

    def compare(self, arms: Sequence[Arm], at: str) -> None:
        """Simulate layouts of the same cost that will be asked for, as many at once as there are cores."""
        self._display.what, self._display.unit = f"comparing layouts of the same cost at {at} the load", "simulations"
        self._points.simulate(arms[: self._points.at_once])

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

    def nearest(self, found: Findings) -> None:
        """Simulate what came nearest to the limits to its end, so that it is known how far away it is.

        Raises:
            InterruptError: the user interrupted it.
        """
        for question in found.nearest()[:1]:
            found.keep(question, found.load, self._points.whole(found.arm(question, found.load)))

    def drive(self, found: Findings, search: Search, load: float) -> None:
        """Simulate what a search asks for until it is finished."""
        best = search.best
        self._display.what, self._display.unit = f"none found so far{self._left(found, search)}", "simulations"
        while (question := search.next()) is not None:
            if not self._points.is_known(found.arm(question, load)):
                self._points.simulate([found.arm(one, load) for one in search.ahead(self._points.at_once)])
            point = self.point(found, question, load)
            with noted():  # a search that has learnt half of it would be wrong
                search.learn(question, point.state, point.outcomes)
            if search.best != best:
                best = search.best
                assert best is not None
                self._display.say(f"{found.named(best, load)} meets the limits")
            known = "none" if best is None else found.named(best, load)
            many = f"{self._points.num_simulated} simulated{self._left(found, search)}"
            self._display.what = f"best so far {known}, {many}"

    def _left(self, found: Findings, search: Search) -> str:
        """Say about how long the rest takes, once something was simulated."""
        count = num_left(found, search, num_modes=self._num_modes)
        each_s = self._points.each_s
        return f", about {count} simulations follow" if each_s is None else f", {told(count, each_s)}"

    def announce(self, found: Findings, floors: Sequence[Floor], num_requests: int) -> None:
        """Say what will be simulated, before anything is."""
        count = num_left(found, found.search, num_modes=self._num_modes)
        possible = sum(not floor.impossible for floor in floors)
        self._display.say(
            f"{possible} of {len(floors)} layouts may meet the limits: about {count} simulations of up to {num_requests:,} requests"
        )
