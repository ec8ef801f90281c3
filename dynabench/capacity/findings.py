"""The findings of a plan: which layouts meet the limits, with how many workers, and why fewer are not enough."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from dynabench.arm import Arm, Settings
from dynabench.capacity.candidates import Candidate, candidates_of, load_told, named
from dynabench.capacity.floors import Floor
from dynabench.capacity.search import Layout, Question, Search
from dynabench.capacity.settings import PlanConfig
from dynabench.experiment.settings import ExperimentConfig
from foundation.text import listed
from reports.capacity.answer import Ranked
from reports.figures.outcomes import Outcome, binding, outcomes_in_words
from reports.sweep.points import AnyPoint, Cut, Point


class Findings:
    """The layouts of a plan, the search among them, and the points that were simulated."""

    def __init__(
        self, config: PlanConfig, experiment: ExperimentConfig, settings: Settings, *, mode: str, without: str = ""
    ) -> None:
        """Start with nothing known.

        Args:
            config: what to search for.
            experiment: the axes.
            settings: everything else.
            mode: the router mode to search with.
            without: the router mode with which no layout was found.
        """
        self.config, self._settings = config, settings
        self.mode, self.without = mode, without
        self.also_missed: dict[str, int] = {}
        """Other router modes that met the limits nowhere, with the number of layouts tried: those nearest to the limits."""
        self.candidates, self._impossible = candidates_of(config, experiment, settings, mode)
        self.search = Search([], max_gpus=config.max_gpus)
        self._points: dict[tuple[Question, float], AnyPoint] = {}
        self.finished: list[float] = []
        """The multiples of the rate whose search is finished."""

    @property
    def load(self) -> float:
        """The multiple of the workload's rate to plan for."""
        return self.config.multiples[0]

    def new_search(self, floors: Sequence[Floor], load: float) -> Search:
        """Return a search among all layouts with known lower bounds; what the first search found raises them."""
        layouts = [self._layout(candidate, floor) for candidate, floor in zip(self.candidates, floors, strict=True)]
        if load > self.load and self.load in self.finished:
            for layout, first in zip(layouts, self.search.layouts, strict=True):
                layout.floor = max(layout.floor, first.low_at(load / self.load))
        return Search(layouts, max_gpus=self.config.max_gpus, breaks_ties=load == self.load)

    def _layout(self, candidate: Candidate, floor: Floor) -> Layout:
        prefill, prices = candidate.prefill, self.config.prices
        return Layout(
            candidate.name,
            candidate.counted.gpus_per_worker,
            0 if prefill is None else prefill.num_gpus,
            prices.get(candidate.counted.timing.gpu or "", 1.0),
            floor.workers,
            floor.rank,
            floor.impossible,
            fixed_price=None if prefill is None else prices.get(prefill.timing.gpu or "", 1.0),
            expected=floor.expected,
        )

    def arm(self, question: Question, load: float, **changes: Any) -> Arm:
        """Return the arm that answers a question."""
        return self.candidates[question.layout].arm(question.workers, load=load, changes=changes)

    def named(self, question: Question, load: float) -> str:
        """Name a layout with this many workers, and the load unless it is the one to plan for."""
        gpus = self.search.layouts[question.layout].gpus(question.workers)
        candidate = self.candidates[question.layout]
        at = f" at {self.load_told(load, question)} the load" if load != self.load else ""
        return f"{gpus} GPU{'s' * (gpus != 1)} ({named({candidate.number: question.workers, **candidate.said})}){at}"

    def load_told(self, load: float, question: Question | None = None) -> str:
        """Name a multiple of the load, which may depend on the layout."""
        return load_told(self._settings if question is None else self.candidates[question.layout].settings, load)

    def keep(self, question: Question, load: float, point: AnyPoint) -> None:
        """Keep the simulated point of a question that was asked; others that the folder has do not count."""
        self._points[question, load] = point

    def known(self, question: Question, load: float | None = None) -> AnyPoint | None:
        """Return the simulated point of a question that was asked."""
        return self._points.get((question, self.load if load is None else load))

    def prefill_workers(self, place: int) -> int | None:
        """Return the prefill workers of a layout; None if every worker handles whole requests."""
        prefill = self.candidates[place].prefill
        return None if prefill is None else prefill.replicas

    @property
    def best(self) -> Question | None:
        """The best layout at the load to plan for."""
        return self.best_of(self.search, self.load)

    def best_of(self, search: Search, load: float) -> Question | None:
        """Return, of the cheapest layouts, one that handles the most load, or of several the one furthest within limits."""
        return max(self._equal(search), key=lambda question: self._merit(question, load), default=None)

    @property
    def higher_loads(self) -> list[float]:
        """The multiples of the rate above the one to plan for."""
        return [load for load in self.config.multiples if load > self.load]

    def equally_cheap(self) -> list[Question]:
        """Return the cheapest layouts at the load to plan for, the one furthest within the limits first."""
        return sorted(self._equal(self.search), key=lambda one: -self._margin(one, self.load))

    def _equal(self, search: Search) -> list[Question]:
        """Return the cheapest layouts."""
        return [
            Question(place, layout.met)
            for place, layout in enumerate(search.layouts)
            if layout.met is not None and layout.cost(layout.met) <= search.cost * (1 + 1e-9)
        ]

    def _merit(self, question: Question, load: float) -> tuple[float, float]:
        """Return the rank among equally cheap layouts: the load at which it is known to meet the limits, and its margin."""
        return self._holds_to(question), self._margin(question, load)

    def _holds_to(self, question: Question) -> float:
        """Return the highest load with a finished search at which the limits are known to be met."""
        points = ((load, self.known(question, load)) for load in self.finished)
        return max((load for load, point in points if point is not None and point.state == "met"), default=self.load)

    def _margin(self, question: Question, load: float) -> float:
        point = self.known(question, load)
        nearest = binding(point.outcomes) if isinstance(point, Point) else None
        return float("-inf") if nearest is None or nearest.headroom is None else nearest.headroom

    def ranked(self) -> list[Ranked]:
        """Return the layouts that meet the limits by cost, best first; then the others by their least cost."""
        layouts = self.search.layouts

        def order(place: int) -> tuple[bool, bool, float, float, float]:
            layout = layouts[place]
            if layout.met is None:
                return bool(layout.impossible), True, layout.cost(layout.low), 0.0, 0.0
            holds, margin = self._merit(Question(place, layout.met), self.load)
            return False, False, layout.cost(layout.met), -holds, -margin

        found = [self._ranked(place) for place in sorted(range(len(layouts)), key=order)]
        return found + [Ranked(name, {}, impossible=reason) for name, reason in self._impossible.items()]

    def _ranked(self, place: int) -> Ranked:
        layout, candidate = self.search.layouts[place], self.candidates[place]
        if layout.impossible:
            return Ranked(layout.name, candidate.said, impossible=layout.impossible)
        tried = max((workers for workers, state in layout.states.items() if state != "met"), default=None)
        met = layout.met
        shown = tried if met is None else met
        point = None if shown is None else self.known(Question(place, shown))
        return Ranked(
            layout.name,
            candidate.said,
            gpus=None if met is None else layout.gpus(met),
            workers=met,
            cost=None if met is None else layout.cost(met),
            at_least=layout.gpus(layout.low),
            least_cost=layout.cost(layout.low),
            outcomes=[] if point is None else list(point.outcomes),
            tried=tried,
            prefill_workers=self.prefill_workers(place),
            fewer=[] if met is None else self._fewer(Question(place, met)),
            is_upper_bound=met is not None and layout.low < met,
        )

    def _fewer(self, question: Question) -> list[Outcome]:
        """Return the result with one worker fewer, as far as it is known."""
        layout, workers = self.search.layouts[question.layout], question.workers - 1
        if not workers:
            return []
        if workers < layout.floor:
            reason = f"the requests keep more than {workers} of its workers busy"
            return [Outcome("throughput", "missed", reason=reason)]
        point = self.known(Question(question.layout, workers))
        return [] if point is None else list(point.outcomes)

    def verdict(self, *, is_complete: bool, is_examined: bool = True) -> str:
        """Say in a sentence or two what was found; `is_examined`: how certain it is was examined."""
        best = self.best
        if best is None:
            return self._without(is_complete=is_complete)
        point = self.known(best)
        assert point is not None
        text = f"{self.named(best, self.load)}: {outcomes_in_words(point.outcomes)}."
        if self.config.price:
            text += f" It costs {self.search.layouts[best.layout].cost(best.workers):,.4g}."
        text += self._tied(best) + self._why_not_less() + self._why_not_as_dear(best)
        if not is_complete:
            text += f" Interrupted: {self._unfinished()}; run the same command again to resume it."
            text += " How certain this is was not examined." * (not is_examined)
        return text

    def safer(self, best: Question) -> list[Question]:
        """Return what may meet the limits with more certainty than the best, cheapest first.

        That is everything that met them, and the best layout with one and with two more workers.
        """
        layouts = self.search.layouts
        found = {
            Question(place, workers)
            for place, layout in enumerate(layouts)
            for workers, state in layout.states.items()
            if state == "met"
        }
        more = {Question(best.layout, best.workers + count) for count in (1, 2)}
        found |= {one for one in more if layouts[one.layout].gpus(one.workers) <= self.config.max_gpus}

        def order(one: Question) -> tuple[float, float]:
            return layouts[one.layout].cost(one.workers), -self._margin(one, self.load)

        return sorted(found - {best}, key=order)

    def told_safer(self, question: Question | None, num_tried: int) -> str:
        """Name the cheapest layout that certainly meets the limits, or say that none of those tried does."""
        if question is None:
            return f"None of the {num_tried} other layouts or numbers of workers tried meets the limits with certainty."
        point = self.known(question)
        assert point is not None
        cost = self._cost_told(self.search.layouts[question.layout].cost(question.workers))
        return f"The cheapest one tried that certainly meets the limits is {self.named(question, self.load)}{cost}: {outcomes_in_words(point.outcomes)}."

    def _tied(self, best: Question) -> str:
        """Name what was as good as the best in everything that it was chosen by."""
        margin = self._margin(best, self.load)
        others = [
            one
            for one in self._equal(self.search)
            if one != best and not self._holds_less(one, best) and math.isclose(self._margin(one, self.load), margin)
        ]
        if not others:
            return ""
        more = f" and {len(others) - 1} more" * (len(others) > 1)
        tie = "ties" if len(others) == 1 else "tie"
        return f" {self.named(others[0], self.load)}{more} {tie} with it, in cost and in headroom."

    def _why_not_as_dear(self, best: Question) -> str:
        """Say why the best was chosen among equally cheap layouts, if it was for the load that it takes."""
        held, layouts = self._holds_to(best), self.search.layouts
        equal = self._equal(self.search)
        others = [one for one in equal if self._holds_less(one, best)]
        if others:
            layout = layouts[others[0].layout]
            more = f" (and {len(others) - 1} more)" * (len(others) > 1)
            cost, does = ("costs", "does") if len(others) == 1 else ("cost", "do")
            return f" It meets the limits at {held:g}x the load; {layout.name}{more}, which {cost} as much, {does} not."
        if len(equal) < 2 or self._margin(best, self.load) < max(self._margin(one, self.load) for one in equal):
            return ""
        return f" Of the {len(equal)} layouts that cost this much, it has the most headroom, and none was found to take more load."

    def _holds_less(self, one: Question, best: Question) -> bool:
        """Return whether a layout is known to miss the limits at a load at which the best meets them."""
        held = self._holds_to(best)
        points = (self.known(one, load) for load in self.finished if load <= held)
        return any(point is not None and point.state != "met" for point in points)

    def nearest(self) -> list[Question]:
        """Return what was tried, nearest to the limits first."""
        tried = [Question(place, n) for place, layout in enumerate(self.search.layouts) for n in layout.states]

        def order(one: Question) -> tuple[float, int]:
            point = self.known(one)  # of those that were cut, the one that held out longest comes first
            return -self._margin(one, self.load), -(point.requests or 0) if isinstance(point, Cut) else 0

        return sorted(tried, key=order)

    @property
    def judged(self) -> list[Point]:
        """The point that the answer is about: the best or, if none meets the limits, the nearest; empty if none is known whole."""
        chosen = self.nearest()[:1] if self.best is None else [self.best]
        return [point for one in chosen if isinstance(point := self.known(one), Point)]

    def _unfinished(self) -> str:
        """Say what an interrupt left undone."""
        if self.load not in self.finished:
            return "fewer may be enough"
        done, left = (
            [f"{load:g}x" for load in self.config.multiples if (load in self.finished) is known]
            for known in (True, False)
        )
        if not left:
            return f"the search is finished at {listed(done)}, but the comparisons are not"
        return f"{listed(done)} {'is' if len(done) == 1 else 'are'} finished; {listed(left)} {'is' if len(left) == 1 else 'are'} not"

    def _why_not_less(self) -> str:
        """Return the result of the most expensive layout tried that costs less than the best."""
        tried = [
            Question(place, workers)
            for place, layout in enumerate(self.search.layouts)
            for workers in layout.states
            if layout.cost(workers) < self.search.cost * (1 - 1e-9)
        ]
        if not tried:
            return ""
        layouts = self.search.layouts
        nearest = max(tried, key=lambda one: (layouts[one.layout].cost(one.workers), self._margin(one, self.load)))
        point = self.known(nearest)
        assert point is not None
        return f" The nearest cheaper one is {self.named(nearest, self.load)}: {outcomes_in_words(missed(point.outcomes))}."

    def other_kinds(self) -> Iterator[str]:
        """Yield what is known about the best of each kind of layout to which the overall best does not belong."""
        best = self.best
        if best is None or self.load not in self.finished:
            return
        places: dict[str, list[int]] = {}
        for place, candidate in enumerate(self.candidates):
            for kind in candidate.kinds:
                places.setdefault(kind, []).append(place)
        for kind, its in places.items():
            if best.layout not in its:
                yield f"Of {kind}, {self._best_among(its)}."

    def _best_among(self, places: Sequence[int]) -> str:
        """Name the cheapest of some layouts that meets the limits, or what they need at least."""
        layouts = self.search.layouts
        met = [Question(place, workers) for place in places if (workers := layouts[place].met) is not None]
        if met:
            cost = min(layouts[one.layout].cost(one.workers) for one in met)
            equal = [one for one in met if layouts[one.layout].cost(one.workers) <= cost * (1 + 1e-9)]
            least, said = max(equal, key=lambda one: self._merit(one, self.load)), self._cost_told(cost)
            fewer = ", and fewer were not tried" * (layouts[least.layout].low < least.workers)
            return f"the cheapest that met the limits is {self.named(least, self.load)}{said}{fewer}{self._cheaper_maybe(places, cost)}"
        possible = [layouts[place] for place in places if not layouts[place].impossible]
        if not possible:
            return "none can meet the limits"
        nearest = min(possible, key=lambda layout: layout.cost(layout.low))
        gpus, said = nearest.gpus(nearest.low), self._cost_told(nearest.cost(nearest.low))
        return f"none is cheaper: {nearest.name} needs at least {gpus} GPU{'s' * (gpus != 1)}{said}"

    def _cheaper_maybe(self, places: Sequence[int], cost: float) -> str:
        """Say what others of a kind may cost, if the search ended before it was known whether one is cheaper than this."""
        layouts = self.search.layouts
        cheaper = [
            one
            for place in places
            if not (one := layouts[place]).impossible and one.met is None and one.cost(one.low) < cost * (1 - 1e-9)
        ]
        if not cheaper:
            return ""
        least = min(cheaper, key=lambda one: one.cost(one.low))
        gpus, said = least.gpus(least.low), self._cost_told(least.cost(least.low))
        return f"; {least.name}, which was not searched to its end, needs at least {gpus} GPU{'s' * (gpus != 1)}{said}"

    def _cost_told(self, cost: float) -> str:
        return f", at a cost of {cost:,.4g}" if self.config.price else ""

    def _without(self, *, is_complete: bool) -> str:
        """Explain that nothing is known to meet the limits."""
        if not is_complete:
            return (
                "Interrupted before any layout was found to meet the limits; run the same command again to resume it."
            )
        layouts, most = self.search.layouts, self.config.max_gpus
        if tried := self.nearest():
            point = self.known(tried[0])
            assert point is not None
            came = f"{self.named(tried[0], self.load)}: {outcomes_in_words(missed(point.outcomes))}"
            others = "".join(
                f" Nor do the {count} nearest layouts with {mode}."
                if count > 1
                else f" Nor does the nearest layout with {mode}."
                for mode, count in self.also_missed.items()
                if count
            )
            return (
                f"No layout of up to {most} GPU{'s' * (most != 1)} (--max-gpus) meets the limits with router mode {self.mode}. "
                f"The nearest is {came}.{others}"
            )
        if least := min(
            (layout for layout in layouts if not layout.impossible), key=lambda one: one.gpus(one.low), default=None
        ):
            one = "decode worker" if least.fixed_gpus else "worker"
            why = f"even with a single {one}" if least.low == 1 else "because the requests keep that many busy"
            return (
                f"No layout of up to {most} GPU{'s' * (most != 1)} (--max-gpus) can handle the load: {least.name} "
                "needs at least "
                f"{least.gpus(least.low)}, {why}."
            )
        return "No layout can meet the limits, for the reasons above."


def missed(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes that are not met."""
    return [outcome for outcome in outcomes if outcome.state != "met"]
