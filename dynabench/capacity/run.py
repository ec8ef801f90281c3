"""Carry out a plan: bound layouts, try them on all cores, rank them; then examine more load, and the certainty."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from msgspec import structs

from dynabench.capacity.candidates import has_one_size
from dynabench.capacity.commands import deploy_commands
from dynabench.capacity.findings import Findings
from dynabench.capacity.floors import floor_of
from dynabench.capacity.headroom import next_load
from dynabench.capacity.search import Question, Search
from dynabench.capacity.settings import PlanConfig
from dynabench.capacity.sureness import sureness_of
from dynabench.capacity.trial import attempt
from dynabench.deployment.engines import beyond_context
from dynabench.deployment.file import as_plain
from dynabench.experiment.axes import setting_of
from dynabench.experiment.manifest import manifest_of
from dynabench.experiment.parallel import in_parallel
from dynabench.experiment.settings import ExperimentConfig
from dynabench.experiment.source import source_of
from dynabench.experiment.store import PointStore, identity_of
from dynabench.interrupt import Interrupt, InterruptError, noted
from dynabench.plan import Arm, Settings
from dynabench.progress import Display
from dynabench.terminal import Terminal
from foundation.errors import UserError
from foundation.files import replace_text
from mocker.timing.catalog import find_gpu
from mocker.timing.config import TimingConfig
from reports import capacity, plan_report
from reports.capacity import SCHEMA, Alternative, Answer, AtLoad, Held, Sureness
from reports.conditions import Condition
from reports.metrics import LEAST_SAMPLES, Goodput
from reports.outcomes import of_requests
from reports.points import AnyPoint, Point

MODES = ("kv", "round-robin", "least-loaded")
"""Router modes that are compared if none is given; the search itself uses the first."""
SAFER = 4
"""The most layouts to try for one that certainly meets the limits, if the best does not."""


def run_plan(
    files: tuple[Path, ...],
    config: PlanConfig,
    experiment: ExperimentConfig,
    settings: Settings,
    *,
    console: Terminal,
    show: Callable[[Path, Answer], None],
) -> tuple[Path, Answer]:
    """Search for the cheapest layout that meets the limits; resume a folder that has the same plan.

    The answer is saved and shown before the report is drawn, so that nothing which goes wrong there loses it.

    Raises:
        UserError: there are no limits, or the folder has something else.
        ValueError: a setting is not understood.
    """
    if not experiment.limits:
        raise UserError("a plan needs limits: use --slo, such as --slo 'ttft.p99 <= 2s', or --slo-preset")
    (pool,) = settings.deployment.pools
    if pool.timing.is_generic and not config.price:
        raise UserError(
            "a plan needs the step times of your engine: use --model and --gpu (`dynabench hardware` lists them), --price with "
            "several GPUs, or --timing-file"
        )
    _check_gpus(config, experiment, pool.timing)
    _check_sizes(config, pool.timing)
    _check_counts(experiment.limits, len(source_of(files, experiment)(settings.shape)))
    experiment = replace(experiment, router_mode=experiment.router_mode or MODES)
    identity = identity_of(files, experiment, settings, config.identity)
    out = experiment.out or Path("results") / f"plan-{identity}"
    store = PointStore(out, identity, "plan")
    with Interrupt() as interrupt:
        display = Display("bounding layouts", "layouts", interrupt, console)
        planner = _Planner(files, config, experiment, settings, store, out, interrupt, display)
        try:
            with display:
                planner.search()
                planner.look_around()
        except InterruptError:
            planner.is_complete = False
        answer = planner.answer()
        plan_report.save(out, answer)
        show(out, answer)
        plan_report.write(out, answer, planner.points(), experiment.limits)
        return out, answer


def _check_gpus(config: PlanConfig, experiment: ExperimentConfig, timing: TimingConfig) -> None:
    """Refuse unknown GPUs, and sizes that no layout can have, before the workload is read.

    Raises:
        UserError: no GPU was measured with any of the sizes.
        ValueError: a GPU is not known.
    """
    if timing.timing_name != "roofline":
        return
    gpus = [find_gpu(name) for name in (config.prices or [timing.gpu]) if name is not None]
    varied = {setting_of(text) for text in experiment.vary}
    if not gpus or "gpu" in varied:
        return
    possible = {1}.union(*(gpu.all_reduce for gpu in gpus))
    if "tensor_parallel_size" not in varied and not possible.intersection(config.tensor_parallel_size):
        sizes, names = (
            " or ".join(map(str, part)) for part in (config.tensor_parallel_size, [gpu.name for gpu in gpus])
        )
        raise UserError(f"tensor_parallel_size {sizes} was not measured on {names}; expected one of {sorted(possible)}")


def _check_sizes(config: PlanConfig, timing: TimingConfig) -> None:
    """Refuse several sizes if there are step times for only one.

    Raises:
        UserError: there are several sizes.
    """
    sizes = config.tensor_parallel_size
    if has_one_size(config, timing) and len(sizes) > 1 and sizes != PlanConfig().tensor_parallel_size:
        raise UserError(
            f"tensor_parallel_size {' and '.join(map(str, sizes))} are given; expected only the one used to measure "
            "the step times; "
            "run one plan for each"
        )


def _check_counts(limits: Sequence[Condition], num_requests: int) -> None:
    """Refuse percentiles of too few requests: no layout could be shown to meet them.

    Raises:
        UserError: a limit is on such a percentile.
    """
    for limit in limits:
        statistic = limit.statistic or ""
        least = LEAST_SAMPLES[int(statistic[1:])] if statistic.startswith("p") else 1
        if limit.metric != "itl" and num_requests < least:
            raise UserError(
                f"slo '{limit}' cannot be judged from {num_requests:,} requests; a {limit.statistic} needs {least:,}: use more of "
                "the workload, or limit a lower percentile"
            )


class _Planner:
    """A plan in progress."""

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
        self._searches: dict[float, Search] = {}
        self._modes: list[Alternative] = []
        self._caching: list[Alternative] = []
        self._sureness: list[Sureness] = []
        self._safer = ""
        self._held: Held | None = None
        self._found = Findings(config, experiment, settings, store)
        self.is_complete = True

    def search(self) -> None:
        """Find the cheapest layout.

        Raises:
            InterruptError: the user interrupted it.
        """
        self._found.search = self._begin(self._found.load)
        self._drive(self._found.search, self._found.load)
        self._finish(self._found.load, self._found.search)

    def _finish(self, load: float, search: Search) -> None:
        self._searches[load] = search
        self._found.finished.append(load)

    def _begin(self, load: float) -> Search:
        """Return a search among all layouts or, at later loads, among those that met the limits at the first."""
        found, at = self._found, "" if load == self._found.load else f" at {load:g}x the load"
        places = [
            place for place in range(len(found.candidates)) if not at or found.search.layouts[place].met is not None
        ]
        wanted = [found.candidates[place].arm(1, load=load).settings for place in places]
        self._display.what, self._display.unit = f"bounding layouts{at}", "layouts"
        floors = dict(
            self._parallel([(floor_of, (settings, self._source, self._experiment.limits)) for settings in wanted])
        )
        return found.new_search({place: floors[number] for number, place in enumerate(places)})

    def _drive(self, search: Search, load: float) -> None:
        """Simulate what a search asks for until it is finished."""
        best = search.best
        self._display.what, self._display.unit = "none found so far", "simulations"
        while questions := search.questions(self._at_once):
            arms = [self._found.arm(question, load) for question in questions]
            points = self._points(arms)
            with noted():  # a search that has learnt half of it would be wrong
                for question, point in zip(questions, points, strict=True):
                    search.learn(question, point.state)
            if search.best != best:
                best = search.best
                assert best is not None
                self._display.say(f"{self._found.named(best, load)} meets the limits")
            known = "none" if best is None else self._found.named(best, load)
            self._display.what = f"best so far {known}, {self._num_simulated} simulated"

    @property
    def _at_once(self) -> int:
        return self._experiment.jobs or len(os.sched_getaffinity(0))

    def _points(self, arms: Sequence[Arm]) -> list[AnyPoint]:
        """Return the results of some arms, simulating those that are not known.

        Raises:
            InterruptError: the user interrupted it.
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
        for place, point in self._each(calls):
            self._store.keep(todo[place], point)
            self._num_simulated += 1
        found = [self._store.known(arm) for arm in arms]
        if any(point is None for point in found):
            raise InterruptError
        return [point for point in found if point is not None]

    def _parallel(self, calls: list[Any]) -> list[tuple[int, Any]]:
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

    def look_around(self) -> None:
        """Find out what more load needs, whether the router mode or the cache matters, and how certain the answer is.

        Raises:
            InterruptError: the user interrupted it.
        """
        if self._found.best is None:
            return
        for load in self._config.multiples:
            if load not in self._searches:
                self._search_at(load)
        best = self._found.best  # of the cheapest, the one that handles more load
        self._held = self._held_by(best)
        self._sureness = self._sure(best)
        if any(sure.is_doubtful for sure in self._sureness) and all(sure.has_interval for sure in self._sureness):
            self._safer = self._told_safer(best)
        self._modes = self._compared_modes(best)
        self._caching = self._compared_caching(best)

    def _held_by(self, best: Question) -> Held | None:
        """Find the highest load at which a layout meets the limits; None if its load cannot be raised."""
        if not self._source(self._settings.shape).duration_s:
            return None
        held = Held(1.0)
        while (times := next_load(held.holds_to, held.misses_at)) is not None:
            [point] = self._points([self._found.arm(best, round(self._found.load * times, 4))])
            if point.state == "met":
                held = structs.replace(held, holds_to=times)
            else:
                held = structs.replace(held, misses_at=times, outcomes=list(point.outcomes))
        return held

    def _sure(self, best: Question) -> list[Sureness]:
        arm = self._found.arm(best, self._found.load)
        experiment = self._experiment
        call = (sureness_of, (arm, self._source, experiment.seed, experiment.limits, self._config.attainment))
        [(_, found)] = self._parallel([call])
        return list(found)

    def _told_safer(self, best: Question) -> str:
        """Look for the cheapest layout that certainly meets the limits, among a few; say what was found."""
        wanted = self._found.safer(best)[:SAFER]
        for question in wanted:
            [point] = self._points([self._found.arm(question, self._found.load)])
            if point.state == "met" and not any(sure.is_doubtful for sure in self._sure(question)):
                return self._found.told_safer(question, len(wanted))
        return self._found.told_safer(None, len(wanted)) if wanted else ""

    def _compared_modes(self, best: Question) -> list[Alternative]:
        """Try the router modes with these workers and with one fewer, which a better mode may save."""
        modes = self._experiment.router_mode
        if len(modes) == 1 or not self._routes(best):
            return []
        layout = self._found.search.layouts[best.layout]
        counts = [best.workers] + [best.workers - 1] * (best.workers > max(layout.floor, 1))
        wanted = [(mode, Question(best.layout, count)) for count in counts for mode in modes]
        return self._alternatives([(mode, question, {"router_mode": mode}) for mode, question in wanted])

    def _routes(self, best: Question) -> bool:
        """Return whether there is a choice of workers for a prompt, or for an answer."""
        return max(best.workers, self._found.prefill_workers(best.layout) or 0) > 1

    def _compared_caching(self, best: Question) -> list[Alternative]:
        """Try it without prefix caching, if prompts are known to share anything."""
        point = self._found.known(best)
        if not isinstance(point, Point) or not point.cache.hit_share:
            return []
        flags = (("with", True), ("without", False))
        return self._alternatives([(name, best, {"enable_prefix_caching": flag}) for name, flag in flags])

    def _alternatives(self, wanted: list[tuple[str, Question, dict[str, Any]]]) -> list[Alternative]:
        load = self._found.load
        points = self._points([self._found.arm(question, load, **changes) for _, question, changes in wanted])
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

    def _search_at(self, load: float) -> None:
        """Find what a multiple of the rate needs, among the layouts that met the limits at the first."""
        search = self._begin(load)
        if load > self._found.load:
            for layout, known in zip(search.layouts, self._found.search.layouts, strict=True):
                layout.floor = max(layout.floor, known.low)
        self._drive(search, load)
        self._finish(load, search)

    def _at_load(self, load: float) -> AtLoad:
        """Return what a multiple of the rate was found to need."""
        search = self._searches[load]
        found = self._found.best_of(search, load)
        if found is None:
            return AtLoad(load, "-", None, None, [])
        point = self._found.known(found, load)
        assert point is not None
        layout = search.layouts[found.layout]
        prefill = self._found.prefill_workers(found.layout)
        gpus, cost = layout.gpus(found.workers), layout.cost(found.workers)
        return AtLoad(load, layout.name, gpus, found.workers, list(point.outcomes), prefill, cost)

    def answer(self) -> Answer:
        """Return what is known."""
        best, load = self._found.best, self._found.load
        workload = self._source(self._settings.shape)
        chosen = [] if best is None else [self._found.arm(best, load)]
        manifest = manifest_of(
            "virtual", self._files, workload, self._experiment, self._settings, chosen, []
        )  # the best arm describes the deployment
        layouts = self._found.ranked()
        verdict = self._found.verdict(is_complete=self.is_complete)
        verdict += f" {self._held}" * (self._held is not None) + capacity.doubt(self._sureness)
        return Answer(
            schema=SCHEMA,
            title=manifest["title"].partition(":")[0],
            subtitle=f"{len(workload):,} requests in {workload.duration_s:,.0f} s; {manifest['step_times'] or ''}",
            is_complete=self.is_complete,
            verdict=f"{verdict} {capacity.sizes_told(layouts)}".strip(),
            limits=self._limits(),
            layouts=layouts,
            loads=[self._at_load(at) for at in self._config.multiples if at in self._searches] if best else [],
            modes=self._modes,
            caching=self._caching,
            sureness=self._sureness,
            held=self._held,
            commands=self._commands(chosen[0]) if chosen else [],
            simulated=self._num_simulated,
            wall_s=time.perf_counter() - self._started,
            head=manifest["head"],
            command=manifest["command"],
            settings=manifest,
            notes=[
                *filter(None, [beyond_context(workload, self._settings.deployment.pools[0])]),
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
        replace_text(file, yaml.safe_dump(as_plain(deployment), sort_keys=False))
        return deploy_commands(deployment, str(file))
