"""Carry out a plan: bound layouts, try them on all cores, rank them; then examine more load, and the certainty."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from dynabench.arm import Arm, Settings
from dynabench.capacity.asking import Asking
from dynabench.capacity.candidates import has_one_size, reached
from dynabench.capacity.checks import check_plan
from dynabench.capacity.commands import deploy_commands
from dynabench.capacity.findings import Findings
from dynabench.capacity.floors import Floor
from dynabench.capacity.headroom import MOST, held_by
from dynabench.capacity.loads import choose, search_at
from dynabench.capacity.points import Points
from dynabench.capacity.search import Question, Search
from dynabench.capacity.settings import PlanConfig
from dynabench.capacity.sureness import at_cliff
from dynabench.capacity.unsearched import unsearched
from dynabench.deployment.engines import beyond_context
from dynabench.deployment.file import as_changed
from dynabench.experiment.head import model_errors
from dynabench.experiment.manifest import manifest_of
from dynabench.experiment.settings import ExperimentConfig
from dynabench.experiment.source import Given, Source, source_of
from dynabench.experiment.store import PointStore, identity_of
from dynabench.interrupt import Interrupt, InterruptError
from dynabench.progress import Display
from dynabench.terminal import Terminal
from foundation.files import replace_text
from mocker.config import UNCACHED
from reports.capacity import answer as capacity
from reports.capacity import report as plan_report
from reports.capacity.answer import SCHEMA, Alternative, AtLoad, Held, PlanAnswer, Sureness
from reports.figures.metrics import Goodput
from reports.figures.outcomes import of_requests
from reports.sweep.points import AnyPoint, Point
from reports.sweep.verdict import held, too_little

MODES = ("kv", "round-robin", "least-loaded")
"""Router modes that are compared if none is given; the search itself uses the first."""
NEAREST = 8
"""The layouts and numbers of workers that are tried with each other mode if the first meets the limits with none."""
SAFER = 4
"""The most layouts to try for one that certainly meets the limits, if the best does not."""

Variant = tuple[str, Question, dict[str, Any]]
"""The best layout with a setting changed: what it is called, its workers, and the change."""


def run_plan(
    given: Given,
    config: PlanConfig,
    experiment: ExperimentConfig,
    settings: Settings,
    *,
    console: Terminal,
    show: Callable[[Path, PlanAnswer], object] = lambda *_: None,
) -> tuple[Path, PlanAnswer]:
    """Search for the cheapest layout that meets the limits; resume a folder that has the same plan.

    The answer is saved and shown before the report is drawn, so that nothing which goes wrong there loses it.

    Raises:
        UserError: a limit cannot be judged, or the folder has something else.
        ValueError: a setting is not understood.
    """
    experiment = replace(experiment, router_mode=experiment.router_mode or MODES)
    # Before the workload is read, so that one that changes meanwhile is noticed.
    identity = identity_of(given, experiment, settings, config.identity)
    source = source_of(given, experiment)
    check_plan(config, experiment, settings, source)
    out = experiment.out or Path("results") / f"plan-{identity.key}"
    store = PointStore(out, identity, "plan")
    with Interrupt() as interrupt:
        display = Display("bounding layouts", "layouts", interrupt, console)
        points = Points(store, source, config, experiment, interrupt)
        planner = _Planner(given, config, experiment, settings, source, points, out, display)
        try:
            with display:
                planner.search()
                planner.look_around()
        except InterruptError:
            planner.is_complete = False
        store.check_unchanged(identity_of(given, experiment, settings, config.identity))
        answer = planner.answer()
        plan_report.save(out, answer)
        show(out, answer)
        plan_report.write(out, answer, planner.points(), experiment.limits)
        return out, answer


class _Planner:
    """A plan in progress."""

    def __init__(
        self,
        given: Given,
        config: PlanConfig,
        experiment: ExperimentConfig,
        settings: Settings,
        source: Source,
        points: Points,
        out: Path,
        display: Display,
    ) -> None:
        self._given, self._config, self._experiment, self._settings = given, config, experiment, settings
        self._source, self._points, self._out = source, points, out
        self._started = time.perf_counter()
        self._searches: dict[float, Search] = {}
        self._modes: list[Alternative] = []
        self._caching: list[Alternative] = []
        self._sureness: list[Sureness] = []
        self._safer = ""
        self._held: Held | None = None
        self._found = Findings(config, experiment, settings, mode=experiment.router_mode[0])
        self._asking = Asking(
            points, source, experiment.limits, config.attainment, display, num_modes=len(experiment.router_mode)
        )
        self._floors: list[Floor] = []
        self.is_complete = True

    def search(self) -> None:
        """Find the cheapest layout, with the first router mode that any layout meets the limits with.

        Raises:
            InterruptError: the user interrupted it.
        """
        self._floors = self._asking.floors(self._found, self._found.load)
        self._search_first({})
        for mode in self._experiment.router_mode[1:] if self._found.best is None else ():
            first = self._found
            known = self._nearest_with(mode)
            if any(point.state == "met" for point in known.values()):
                self._found = Findings(self._config, self._experiment, self._settings, mode=mode, without=first.mode)
                self._search_first(known)
                return
            first.also_missed[mode] = len(known)
        if self._found.best is None:
            self._asking.nearest(self._found)

    def _search_first(self, known: Mapping[Question, AnyPoint]) -> None:
        """Search at the load to plan for, from what is known of the router mode."""
        found = self._found
        found.search = found.new_search(self._floors, found.load)
        if not known:
            self._asking.announce(found, self._floors, len(self._source(self._settings.shape)))
        for question, point in known.items():
            found.keep(question, found.load, point)
            found.search.learn(question, point.state, point.outcomes)
        self._asking.drive(found, found.search, found.load)
        self._finish(found.load, found.search)

    def _nearest_with(self, mode: str) -> dict[Question, AnyPoint]:
        """Try another router mode where the first came nearest to the limits and there is a choice of workers."""
        found = self._found
        near = [question for question in found.nearest() if self._routes(question)][:NEAREST]
        points = self._points.ask([found.arm(question, found.load, router_mode=mode) for question in near])
        return dict(zip(near, points, strict=True))

    def _finish(self, load: float, search: Search) -> None:
        self._searches[load] = search
        self._found.finished.append(load)

    def look_around(self) -> None:
        """Find out what more load needs, whether the router mode or the cache matters, and how certain the answer is.

        Raises:
            InterruptError: the user interrupted it.
        """
        best = choose(self._asking, self._found)
        if best is None:
            return
        for load in self._config.multiples[1:]:
            self._finish(load, search_at(self._asking, self._found, load, best, self._floors))
        modes, caching = self._modes_of(best), self._caching_of(best)
        shown = [one for one in (*modes, *caching) if one[1] == best]  # with figures, even if they miss the limits
        self._points.ask([self._arm(*one) for one in shown], may_cut=False)  # all at once, on all cores
        self._points.ask([self._arm(*one) for one in modes])
        self._modes, self._caching = self._alternatives(modes), self._alternatives(caching)
        self._held = self._held_by(best)
        self._sureness = at_cliff(
            self._sure(best), self._held, self._found.arm(best, self._found.load).settings.deployment
        )
        if capacity.doubt(self._sureness, self._held) and all(sure.has_interval for sure in self._sureness):
            self._safer = self._told_safer(best)

    def _held_by(self, best: Question) -> Held | None:
        """Find the highest load at which a layout meets the limits; None if its load cannot be raised."""
        settings, planned = self._settings, self._found.load
        if not (settings.load.is_closed or self._source(settings.shape).duration_s):
            return None

        def at(load: float) -> AnyPoint:
            [point] = self._points.ask([self._found.arm(best, load)])
            return point

        return held_by(at, lambda times: reached(settings, planned * times, round), reached(settings, planned))

    def _sure(self, question: Question) -> list[Sureness]:
        return self._points.sure(self._found.arm(question, self._found.load))

    def _told_safer(self, best: Question) -> str:
        """Look for the cheapest layout that certainly meets the limits, among a few; say what was found."""
        wanted = self._found.safer(best)[:SAFER]
        for question in wanted:
            point = self._asking.point(self._found, question, self._found.load)
            if point.state == "met" and self._is_certain(question):
                return self._found.told_safer(question, len(wanted))
        return self._found.told_safer(None, len(wanted)) if wanted else ""

    def _is_certain(self, question: Question) -> bool:
        """Return whether a layout certainly meets the limits, also at as much more load as the model may be off."""
        sure = self._sure(question)
        if any(one.is_doubtful for one in sure):
            return False
        error = capacity.largest_error(sure) if self._held is not None else 0.0
        load = reached(self._settings, self._found.load * min(1 + error, MOST))
        [point] = self._points.ask([self._found.arm(question, load)])
        return point.state == "met"

    def _modes_of(self, best: Question) -> list[Variant]:
        """Return the router modes with these workers and with one fewer, which a better mode may save."""
        modes = self._experiment.router_mode
        counts = (best.workers, best.workers - 1)
        tried = [
            Question(best.layout, count) for count in counts if count >= self._found.search.layouts[best.layout].floor
        ]
        routing = [question for question in tried if self._routes(question)] if len(modes) > 1 else []
        return [(mode, question, {"router_mode": mode}) for question in routing for mode in modes]

    def _routes(self, best: Question) -> bool:
        """Return whether there is a choice of workers for a prompt, or for an answer."""
        return max(best.workers, self._found.prefill_workers(best.layout) or 0) > 1

    def _caching_of(self, best: Question) -> list[Variant]:
        """Return it with and without prefix caching, if prompts are known to share anything."""
        point = self._found.known(best)
        if not isinstance(point, Point) or not point.cache.hit_share:
            return []
        kind = self._found.arm(best, self._found.load).settings.deployment.pools[0].engine_type
        return [("with", best, {}), ("without", best, UNCACHED[kind])]

    def _arm(self, _name: str, question: Question, changes: dict[str, Any]) -> Arm:
        return self._found.arm(question, self._found.load, **changes)

    def _alternatives(self, wanted: list[Variant]) -> list[Alternative]:
        points = self._points.ask([self._arm(*one) for one in wanted])
        return [
            Alternative(
                name=name,
                workers=question.workers,
                gpus=self._found.search.layouts[question.layout].gpus(question.workers),
                outcomes=list(point.outcomes),
                ttft_mean_s=point.ttft_sched.mean if isinstance(point, Point) else None,
                state=point.state,
            )
            for (name, question, _), point in zip(wanted, points, strict=True)
        ]

    def _at_load(self, load: float) -> AtLoad:
        """Return what a multiple of the load was found to need."""
        search = self._searches[load]
        found = self._found.best_of(search, load)
        label = self._found.load_told(load, found)
        if found is None:
            return AtLoad(load, "-", None, None, [], label=label)
        point = self._found.known(found, load)
        assert point is not None
        layout = search.layouts[found.layout]
        prefill = self._found.prefill_workers(found.layout)
        gpus, cost = layout.gpus(found.workers), layout.cost(found.workers)
        return AtLoad(load, layout.name, gpus, found.workers, list(point.outcomes), prefill, cost, label)

    def answer(self) -> PlanAnswer:
        """Return what is known."""
        best, load = self._found.best, self._found.load
        workload = self._source(self._settings.shape)
        chosen = [] if best is None else [self._found.arm(best, load)]
        manifest = manifest_of(
            "virtual", self._given, workload, self._experiment, self._settings, chosen, []
        )  # the best arm describes the deployment
        if error := model_errors([candidate.settings.deployment for candidate in self._found.candidates]):
            manifest["head"]["Model error"] = error
        layouts = self._found.ranked()
        verdict = self._found.verdict(is_complete=self.is_complete, is_examined=bool(self._sureness))
        verdict += f" {self._held}" * (self._held is not None) + capacity.doubt(self._sureness, self._held)
        judged = self._found.judged
        return PlanAnswer(
            schema=SCHEMA,
            title=manifest["title"].partition(":")[0],
            subtitle=f"{self._settings.load.of(workload)}; {manifest['step_times'] or ''}",
            is_complete=self.is_complete,
            verdict=f"{verdict} {capacity.sizes_told(layouts)}".strip() + too_little(judged) + held(judged),
            limits=self._limits(),
            layouts=layouts,
            loads=[self._at_load(at) for at in self._config.multiples if at in self._searches] if best else [],
            modes=self._modes,
            caching=self._caching,
            sureness=self._sureness,
            held=self._held,
            too_little=[text for point in judged for text in point.too_little],
            commands=self._commands(chosen[0]) if chosen else [],
            simulated=self._points.num_asked,
            wall_s=time.perf_counter() - self._started,
            head=manifest["head"],
            command=manifest["command"],
            settings=manifest,
            notes=[
                *filter(
                    None, [beyond_context(workload, self._settings.deployment.pools[0]), self._settings.load.burst]
                ),
                *([] if best is None else self._notes(self._found.search.layouts[best.layout].gpus(best.workers))),
            ],
        )

    def points(self) -> dict[str, list[Point]]:
        """Return what was tried for each layout, from few workers to many."""
        found: dict[str, list[Point]] = {}
        for place, layout in enumerate(self._found.search.layouts):
            known = (self._found.known(Question(place, workers)) for workers in sorted(layout.states))
            found[layout.name] = [point for point in known if isinstance(point, Point)]
        return found

    def _notes(self, gpus: int) -> Iterator[str]:
        """Yield what else a reader should know about an answer with this many GPUs."""
        best = self._found.best
        if best and not self._routes(best) and len(self._experiment.router_mode) > 1:
            each = " of each kind" * (self._found.prefill_workers(best.layout) is not None)
            yield f"One worker{each}: there is nothing to route, so router modes are not compared."
        if self._found.without:
            yield (
                f"No layout that was tried meets the limits with router mode {self._found.without}; "
                f"this plan is for {self._found.mode}."
            )
        if self._safer:
            yield self._safer
        if told := capacity.modes_told(self._modes):
            yield told
        if saving := min(
            (mode for mode in self._modes if mode.state == "met" and mode.gpus < gpus),
            key=lambda mode: mode.gpus,
            default=None,
        ):
            yield (
                f"Router mode {saving.name} meets the limits with {saving.gpus} GPUs; to plan with it, use --router-mode {saving.name}."
            )
        yield from self._found.other_kinds()
        (pool,) = self._settings.deployment.pools
        if left := unsearched(self._config, self._experiment, pool.timing):
            yield left
        if has_one_size(self._config, pool.timing) and len(self._config.tensor_parallel_size) > 1:
            yield (
                "Step times are assumed to be for tensor parallel size 1; if they are not, set the size with "
                "--tensor-parallel-size."
            )
        if not self._source(self._settings.shape).knows_prefixes:
            yield (
                "The workload does not show which prefixes prompts share, so prefix caching is not judged and no "
                "router mode finds a prefix."
            )

    def _limits(self) -> list[str]:
        """Return the limits as outcomes name them; the per-request limits count together."""
        limits = self._experiment.limits
        each = of_requests(limits, Goodput(0, 0, None, None), self._config.attainment)
        return [str(limit) for limit in limits if limit.statistic is not None] + ([each.limit] if each else [])

    def _commands(self, arm: Arm) -> list[str]:
        """Write the deployment to a file, and return the commands that start it."""
        deployment = replace(arm.settings.deployment, router_mode=str(arm.changes["router_mode"]))
        file = self._out / "deployment.yaml"
        replace_text(file, yaml.safe_dump(as_changed(deployment), sort_keys=False))
        return deploy_commands(deployment, str(file))
