"""Carrying a plan out: layouts are bounded, tried on all cores, ranked; then what more load takes, and how sure it is."""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from dynabench.capacity.candidates import candidates_of
from dynabench.capacity.commands import deploy_commands
from dynabench.capacity.floors import floor_of
from dynabench.capacity.search import Layout, Question, Search
from dynabench.capacity.settings import PlanConfig
from dynabench.capacity.sureness import sureness_of
from dynabench.capacity.trial import attempt
from dynabench.deployment.file import as_plain
from dynabench.experiment.arms import layout_name
from dynabench.experiment.manifest import manifest_of
from dynabench.experiment.parallel import in_parallel
from dynabench.experiment.run import source_of
from dynabench.experiment.settings import ExperimentConfig
from dynabench.experiment.store import PointStore, identity_of
from dynabench.interrupt import Interrupt, InterruptError
from dynabench.plan import Arm, Settings
from dynabench.progress import Display
from dynabench.terminal import Terminal
from foundation.errors import UserError
from foundation.files import replace_text
from reports import capacity
from reports.capacity import SCHEMA, Alternative, Answer, AtLoad, Ranked, Sureness
from reports.conditions import Condition
from reports.metrics import LEAST_SAMPLES, Goodput
from reports.outcomes import binding, of_requests, told
from reports.points import AnyPoint, Point

MODES = ("kv", "round-robin", "least-loaded")
"""Router modes that are compared where none is given; the search itself goes by the first."""


def run_plan(
    files: tuple[Path, ...], config: PlanConfig, experiment: ExperimentConfig, settings: Settings, *, console: Terminal
) -> tuple[Path, Answer]:
    """Search for the cheapest layout that meets the limits; a folder that holds the same plan is resumed.

    Raises:
        UserError: there are no limits, or the folder holds something else.
        ValueError: a setting is not understood.
    """
    if not experiment.limits:
        raise UserError("a plan needs limits: give --slo 'ttft.p99 <= 2s', say, or --slo-preset")
    _check_counts(experiment.limits, len(source_of(files, experiment)(settings.shape)))
    experiment = replace(experiment, router_mode=experiment.router_mode or MODES)
    identity = identity_of(files, experiment, settings, asdict(config))
    out = experiment.out or Path("results") / f"plan-{identity}"
    store = PointStore(out, identity, "plan")
    with Interrupt() as interrupt:
        display = Display("reckoning bounds", "calculations", interrupt, console)
        planner = _Planner(files, config, experiment, settings, store, out, interrupt, display)
        try:
            with display:
                planner.search()
                planner.look_around()
        except InterruptError:
            planner.is_complete = False
        answer = planner.answer()
        capacity.write(out, answer, planner.points())
        return out, answer


def _check_counts(limits: Sequence[Condition], num_requests: int) -> None:
    """Refuse percentiles of so few requests that they mean nothing: no layout could be seen to meet them.

    Raises:
        UserError: a limit is of such a percentile.
    """
    for limit in limits:
        statistic = limit.statistic or ""
        least = LEAST_SAMPLES[int(statistic[1:])] if statistic.startswith("p") else 1
        if limit.metric != "itl" and num_requests < least:
            raise UserError(
                f"slo '{limit}' cannot be told from {num_requests:,} requests; a {limit.statistic} takes {least:,}: use more of "
                "the workload, or limit a lower percentile"
            )


class _Planner:
    """A plan on its way."""

    def __init__(
        self,
        files: tuple[Path, ...],
        config: PlanConfig,
        experiment: ExperimentConfig,
        settings: Settings,
        store: PointStore,
        out: Path,
        interrupt: Interrupt,
        display: Display,
    ) -> None:
        self._files, self._config, self._experiment, self._settings = files, config, experiment, settings
        self._store, self._out, self._interrupt, self._display = store, out, interrupt, display
        self._source = source_of(files, experiment)
        self._started = time.perf_counter()
        self._num_simulated = 0
        self._loads: list[AtLoad] = []
        self._modes: list[Alternative] = []
        self._caching: list[Alternative] = []
        self._sureness: list[Sureness] = []
        self.is_complete = True
        self._candidates, self._impossible = candidates_of(config, experiment, settings, experiment.router_mode[0])
        self._search = Search([], max_gpus=config.max_gpus)

    def search(self) -> None:
        """Find the cheapest layout.

        Raises:
            InterruptError: the user wants no more.
        """
        load = self._config.multiples[0]
        self._search = self._begin(load)
        self._drive(self._search, load)

    def _begin(self, load: float) -> Search:
        """Return a search whose layouts know what they need at least."""
        wanted = [candidate.arm(1, load=load).settings for candidate in self._candidates]
        calls = [(floor_of, (settings, self._source, self._experiment.limits)) for settings in wanted]
        floors = dict(self._parallel(calls))
        prices = self._config.prices
        return Search(
            [
                Layout(
                    candidate.name,
                    candidate.gpus_per_worker,
                    candidate.fixed_gpus,
                    prices.get(candidate.gpu, 1.0),
                    floors[place].workers,
                    floors[place].rank,
                    floors[place].impossible,
                )
                for place, candidate in enumerate(self._candidates)
            ],
            max_gpus=self._config.max_gpus,
        )

    def _drive(self, search: Search, load: float) -> None:
        """Simulate what a search asks for until it asks no more."""
        best = search.best
        while questions := search.questions(self._at_once):
            arms = [self._arm(question, load) for question in questions]
            for question, point in zip(questions, self._points(arms), strict=True):
                search.learn(question, point.state)
            if search.best != best:
                best = search.best
                assert best is not None
                self._display.say(f"{self._named(best, load)} meets the limits")
            self._display.what = f"best so far {'none' if best is None else self._named(best, load)}"

    @property
    def _at_once(self) -> int:
        return self._experiment.jobs or len(os.sched_getaffinity(0))

    def _arm(self, question: Question, load: float = 1.0, **changes: Any) -> Arm:
        return self._candidates[question.layout].arm(question.workers, load=load, changes=changes)

    def _named(self, question: Question, load: float) -> str:
        layout = self._search.layouts[question.layout]
        at = f" at {load:g}x the load" if load != self._config.multiples[0] else ""
        return f"{layout.gpus(question.workers)} GPUs ({layout_name(dict(self._said(question)))}){at}"

    def _said(self, question: Question) -> dict[str, Any]:
        candidate = self._candidates[question.layout]
        return {
            candidate.number: question.workers,
            **{n: v for n, v in candidate.changes.items() if n != "router_mode"},
        }

    def _points(self, arms: Sequence[Arm]) -> list[AnyPoint]:
        """Return what became of some arms, simulating those that are not known.

        Raises:
            InterruptError: the user wants no more.
        """
        todo = [arm for arm in arms if self._store.known(arm) is None]
        experiment = self._experiment
        calls = [
            (
                attempt,
                (
                    arm,
                    self._source,
                    experiment.seed,
                    experiment.repeats,
                    experiment.limits,
                    self._config.attainment,
                    self._interrupt.flag,
                ),
            )
            for arm in todo
        ]
        for place, point in self._parallel(calls):
            if point.is_complete:
                self._store.keep(todo[place], point)
                self._num_simulated += 1
        found = [self._store.known(arm) for arm in arms]
        if any(point is None for point in found):
            raise InterruptError
        return [point for point in found if point is not None]

    def _parallel(self, calls: list[Any]) -> list[tuple[int, Any]]:
        """Carry out calls on all cores.

        Raises:
            InterruptError: the user wants no more.
        """
        if not calls:
            return []
        found = list(in_parallel(calls, self._experiment.jobs, interrupt=self._interrupt))
        if self._interrupt.is_asked:
            raise InterruptError
        return found

    def look_around(self) -> None:
        """Find out what more load takes, whether a router mode or the cache matters, and how sure the answer is.

        Raises:
            InterruptError: the user wants no more.
        """
        best = self._best_of_equals()
        if best is None:
            return
        self._sureness = self._sure(best)
        self._modes = self._compared_modes(best)
        self._caching = self._compared_caching(best)
        self._loads = [self._at_load(load, best) for load in self._config.multiples]

    def _best_of_equals(self) -> Question | None:
        """Return, of those that cost least, the one that is farthest within the limits."""
        search = self._search
        if search.best is None:
            return None
        equal = [
            Question(place, layout.met)
            for place, layout in enumerate(search.layouts)
            if layout.met is not None and layout.cost(layout.met) <= search.cost * (1 + 1e-9)
        ]
        return max(equal, key=lambda question: self._margin(self._known(question)))

    def _known(self, question: Question, load: float | None = None) -> AnyPoint | None:
        return self._store.known(self._arm(question, self._config.multiples[0] if load is None else load))

    @staticmethod
    def _margin(point: AnyPoint | None) -> float:
        nearest = binding(point.outcomes) if isinstance(point, Point) else None
        return float("-inf") if nearest is None or nearest.margin is None else nearest.margin

    def _sure(self, best: Question) -> list[Sureness]:
        call = (sureness_of, (self._arm(best, self._config.multiples[0]), self._source, self._experiment.seed, self._experiment.limits))  # fmt: skip
        [(_, found)] = self._parallel([call])
        return list(found)

    def _compared_modes(self, best: Question) -> list[Alternative]:
        """Try the router modes with these workers, and with one fewer: a better mode may save it."""
        modes = self._experiment.router_mode
        layout = self._search.layouts[best.layout]
        counts = [best.workers] + [best.workers - 1] * (best.workers > max(layout.floor, 1))
        wanted = (
            [(mode, Question(best.layout, count)) for count in counts for mode in modes]
            if len(modes) > 1 and best.workers > 1
            else []
        )
        return self._alternatives([(mode, question, {"router_mode": mode}) for mode, question in wanted])

    def _compared_caching(self, best: Question) -> list[Alternative]:
        """Try it without prefix caching, if the workload knows what its prompts share."""
        arm = self._arm(best)
        if not any(request.hash_ids for request in self._source(arm.settings.shape)):
            return []
        point = self._known(best)
        if not isinstance(point, Point) or not point.cache.hit_share:
            return []
        flags = (("with", True), ("without", False))
        return self._alternatives([(name, best, {"enable_prefix_caching": flag}) for name, flag in flags])

    def _alternatives(self, wanted: list[tuple[str, Question, dict[str, Any]]]) -> list[Alternative]:
        load = self._config.multiples[0]
        points = self._points([self._arm(question, load, **changes) for _, question, changes in wanted])
        return [
            Alternative(
                name=name,
                workers=question.workers,
                gpus=self._search.layouts[question.layout].gpus(question.workers),
                outcomes=list(point.outcomes),
                ttft_mean_s=point.ttft_sched.mean if isinstance(point, Point) else None,
                state=point.state,
            )
            for (name, question, _), point in zip(wanted, points, strict=True)
        ]

    def _at_load(self, load: float, best: Question) -> AtLoad:
        """Find what a multiple of the rate takes, among the layouts that were best."""
        if load == self._config.multiples[0]:
            search, found = self._search, best
        else:
            search = self._begin(load)
            near = {place for place, layout in enumerate(self._search.layouts) if layout.met is not None}
            for place, layout in enumerate(search.layouts):
                if place not in near:
                    layout.impossible = layout.impossible or "not among the best at the first load"
                elif load > self._config.multiples[0]:
                    layout.floor = max(layout.floor, self._search.layouts[place].low)
            self._drive(search, load)
            if search.best is None:
                return AtLoad(load, "-", None, None, [])
            found = search.best
        point = self._known(found, load)
        assert point is not None
        layout = search.layouts[found.layout]
        return AtLoad(load, layout.name, layout.gpus(found.workers), found.workers, list(point.outcomes))

    def answer(self) -> Answer:
        """Return what is known."""
        best = self._best_of_equals()
        ranked = sorted(
            (self._ranked(place) for place in range(len(self._search.layouts))),
            key=lambda one: (
                bool(one.impossible),
                one.cost if one.cost is not None else float("inf"),
                -_margin_of(one),
                one.at_least or 0,
            ),
        )
        load = self._config.multiples[0]
        workload = self._source(self._settings.shape)
        chosen = [] if best is None else [self._arm(best, load)]
        manifest = manifest_of(
            "virtual", self._files, workload, self._experiment, self._settings, chosen, []
        )  # the best arm names what is deployed
        return Answer(
            schema=SCHEMA,
            title=manifest["title"].partition(":")[0],
            subtitle=f"{len(workload):,} requests in {workload.duration_s:,.0f} s; {manifest['step_times'] or ''}",
            is_complete=self.is_complete,
            verdict=self._verdict(best),
            limits=self._limits(),
            layouts=ranked + [Ranked(name, {}, impossible=reason) for name, reason in self._impossible.items()],
            loads=self._loads,
            modes=self._modes,
            caching=self._caching,
            sureness=self._sureness,
            commands=[] if best is None else self._commands(chosen[0]),
            simulated=self._num_simulated,
            wall_s=time.perf_counter() - self._started,
            head=manifest["head"],
            command=manifest["command"],
            settings=manifest,
        )

    def points(self) -> dict[str, list[Point]]:
        """Return what was tried of each layout, from few workers to many."""
        layouts = self._search.layouts
        known = [
            [self._known(Question(place, workers)) for workers in sorted(layout.states)]
            for place, layout in enumerate(layouts)
        ]
        return {
            layout.name: [point for point in found if isinstance(point, Point)]
            for layout, found in zip(layouts, known, strict=True)
        }

    def _limits(self) -> list[str]:
        """Return what is limited, as outcomes name it: limits of each request count together."""
        limits = self._experiment.limits
        each = of_requests(limits, Goodput(0, 0, None, None), self._config.attainment)
        return [str(limit) for limit in limits if limit.statistic is not None] + ([each.limit] if each else [])

    def _commands(self, arm: Arm) -> list[str]:
        """Write the deployment down, and return what starts it."""
        deployment = replace(arm.settings.deployment, router_mode=str(arm.changes["router_mode"]))
        file = self._out / "deployment.yaml"
        replace_text(file, yaml.safe_dump(as_plain(deployment), sort_keys=False))
        return deploy_commands(deployment, str(file))

    def _verdict(self, best: Question | None) -> str:
        if best is None:
            tried = max(
                (layout.gpus(max(layout.states)) for layout in self._search.layouts if layout.states), default=0
            )
            if not self.is_complete:
                return (
                    "Interrupted before any layout was known to meet the limits; run the same command again to go on."
                )
            if not tried:
                return "No layout can meet the limits; the reasons are below."
            return f"No layout of up to {tried} GPUs meets the limits (--max-gpus {self._config.max_gpus})."
        point = self._known(best)
        assert point is not None
        text = f"{self._named(best, self._config.multiples[0])}: {told(point.outcomes)}."
        layout = self._search.layouts[best.layout]
        prices = self._config.prices
        if prices:
            text += f" It costs {layout.cost(best.workers):,.4g}."
        if not self.is_complete:
            text += " Interrupted: fewer may do; run the same command again to go on."
        return text

    def _ranked(self, place: int) -> Ranked:
        layout, candidate = self._search.layouts[place], self._candidates[place]
        changes = {name: value for name, value in candidate.changes.items() if name != "router_mode"}
        if layout.impossible:
            return Ranked(layout.name, changes, impossible=layout.impossible)
        tried = max((workers for workers, state in layout.states.items() if state != "met"), default=None)
        shown = layout.met if layout.met is not None else tried
        point = None if shown is None else self._known(Question(place, shown))
        met = layout.met
        return Ranked(
            layout.name,
            changes,
            gpus=None if met is None else layout.gpus(met),
            workers=met,
            cost=None if met is None else layout.cost(met),
            at_least=layout.gpus(layout.low),
            outcomes=[] if point is None else list(point.outcomes),
            tried=tried,
        )


def _margin_of(ranked: Ranked) -> float:
    nearest = binding(ranked.outcomes)
    return float("-inf") if nearest is None or nearest.margin is None else nearest.margin
