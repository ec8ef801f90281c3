"""The fewest workers that keep the limits in each window of a trace: the choice of a planner that knows everything.

Each window is simulated separately. It follows the previous window with enough workers, so that caches and batches are
full and no backlog remains from a time with too few. Workers start instantly. Requests that are late with any number of
workers, because their prompt alone takes longer, do not count. A window keeps the limits if enough of the others are
good. With prefill and decode workers, a pair is minimal if one worker fewer of either kind does not suffice.

    workers of the window before --kept?--yes--> one fewer of each kind in turn, while they are kept
                                       --no---> one more of the late kind, until they are kept or it does not help
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynabench.arm import Arm, Run, Settings
from dynabench.deployment.description import Deployment
from dynabench.deployment.fleet import FleetConfig
from dynabench.experiment.parallel import Call, in_parallel
from dynabench.experiment.source import Source
from dynabench.interrupt import Flag, Interrupt, InterruptError
from dynabench.virtual.run import simulate
from reports.figures.conditions import Condition
from reports.figures.fleet import ENOUGH
from reports.figures.slo import good_requests
from reports.record.fleet import Oracle
from serving.planner import PlannerConfig
from workloads import Workload

WINDOW_S = 60.0
MAX_WINDOWS = 96
MAX_WORKERS = 64
"""Maximum for a pool, unless the GPUs allow fewer."""
PART = 8
"""Consecutive windows in one process, regardless of their number, because each search starts where the last one
ended."""

Sizes = tuple[int, ...]
"""The number of workers in each pool."""
Flags = npt.NDArray[np.bool_]


class Tried(NamedTuple):
    """Whether each request of a window kept the limits of TTFT with some workers, and whether it kept the others."""

    begins: Flags
    goes_on: Flags


class Window(NamedTuple):
    """The requests of a window, and those of the previous one."""

    requests: Workload
    first: int
    """The index of the first request that counts."""
    start_s: float
    """The start of the window."""


def oracles_of(
    arms: Sequence[Arm], source: Source, limits: Sequence[Condition], jobs: int, interrupt: Interrupt
) -> dict[str, Oracle]:
    """Return the fewest workers for each arm whose workers change, and for arms that differ only in their fixed fleet.

    Arms whose requests wait for others, or for clients, are left out, because their windows are not independent.

    Raises:
        UserError: a process was killed.
    """
    changing = [_fixed(arm.settings) for arm in arms if has_changing_fleet(arm.settings.deployment)]
    wanted = {arm.name: fixed for arm in arms if (fixed := _fixed(arm.settings)) in changing}
    settings = [each for place, each in enumerate(wanted.values()) if each not in list(wanted.values())[:place]]
    calls: list[tuple[Settings, Call]] = []
    for each in settings:
        windows = list(_windows(source(each.shape)))
        if not limits or not windows or each.load.is_closed or each.load.max_concurrency is not None:
            continue
        parts = [windows[start : start + PART] for start in range(0, len(windows), PART)]
        calls += [(each, (_part, (each, part, tuple(limits), interrupt.flag))) for part in parts]
    parts_of = in_parallel([call for _, call in calls], jobs, interrupt=interrupt)
    found = dict(parts_of)
    oracles = {}
    for name, each in wanted.items():
        its = [found[place] for place, (whose, _) in enumerate(calls) if whose == each and place in found]
        if its and len(its) == sum(whose == each for whose, _ in calls):  # it was not interrupted
            oracles[name] = _joined(each, source(each.shape), its)
    return oracles


def has_changing_fleet(deployment: Deployment) -> bool:
    """Return whether the number of workers may change."""
    return deployment.planner.planner != "static" or bool(deployment.fleet.events)


def _fixed(settings: Settings) -> Settings:
    """Return the same settings with a fleet of fixed size."""
    deployment = replace(settings.deployment, fleet=FleetConfig(), planner=PlannerConfig())
    return replace(settings, deployment=deployment, load=replace(settings.load, warmup_s=0.0, measure_s=None))


def _joined(settings: Settings, workload: Workload, parts: Sequence[list[tuple[Sizes, float]]]) -> Oracle:
    rows = [row for part in parts for row in part]
    names = [pool.name for pool in settings.deployment.pools]
    replicas = {name: tuple(sizes[place] for sizes, _ in rows) for place, name in enumerate(names)}
    return Oracle(_window_s(workload), replicas, tuple(share for _, share in rows))


def _window_s(workload: Workload) -> float:
    return max(WINDOW_S, workload.duration_s / MAX_WINDOWS)


def _windows(workload: Workload) -> Iterator[Window]:
    """Yield the windows of a workload; none if its requests wait for others."""
    if workload.has_dependencies or not workload.requests:
        return
    width, arrivals = _window_s(workload), workload.columns.arrival_s
    count = int(arrivals[-1] / width) + 1
    edges = [int(edge) for edge in np.searchsorted(arrivals, np.arange(count) * width)] + [len(arrivals)]
    for place, (first, stop) in enumerate(itertools.pairwise(edges)):
        start = edges[max(place - 1, 0)]
        yield Window(replace(workload, requests=workload.requests[start:stop]), first - start, place * width)


def _part(
    settings: Settings, windows: Sequence[Window], limits: tuple[Condition, ...], flag: Flag
) -> list[tuple[Sizes, float]]:
    """Return the fewest workers for each of some consecutive windows, and the share of its requests that can be good.

    Raises:
        InterruptError: the user interrupted it.
    """
    pools = settings.deployment.pools
    sizes: Sizes = tuple(max(pool.replicas, 1) for pool in pools)
    most = _most(settings.deployment)
    found = []
    for place, window in enumerate(windows):
        if flag.is_raised():
            raise InterruptError
        flag.progress.note(place / len(windows))
        if len(window.requests) == window.first:
            found.append(((1,) * len(pools), 1.0))
            continue
        search = _Search(settings, window, limits, most, before=sizes)
        sizes = search.fewest(sizes)
        found.append((sizes, float(search.possible.mean())))
    return found


def _most(deployment: Deployment) -> Sizes:
    """Return the maximum number of workers of each pool."""
    gpus = deployment.gpus
    return tuple(
        MAX_WORKERS if gpus is None else max(min(gpus // pool.gpus_per_worker, MAX_WORKERS), 1)
        for pool in deployment.pools
    )


class _Search:
    """The search for the fewest workers of one window."""

    def __init__(
        self, settings: Settings, window: Window, limits: tuple[Condition, ...], most: Sizes, *, before: Sizes
    ) -> None:
        self._before = before
        self._settings = settings
        self._window = window
        self._limits = limits
        self._most = most
        self._tried: dict[Sizes, Tried] = {}
        best = self._try(most)
        self.possible: Flags = best.begins & best.goes_on
        """Whether each request can meet the limits."""

    def fewest(self, sizes: Sizes) -> Sizes:
        """Return the fewest workers that keep the limits, or beyond which more do not help; start at `sizes`."""
        if not self.possible.any():
            return (1,) * len(sizes)
        while self._share(sizes) < ENOUGH:
            steps = list(self._more(sizes))
            if self._share(sizes) >= max(map(self._share, steps), default=0.0):
                break
            sizes = steps[0]
        goal = min(self._share(sizes), ENOUGH)
        while (fewer := next((each for each in self._fewer(sizes) if self._share(each) >= goal), None)) is not None:
            sizes = fewer
        return sizes

    def _more(self, sizes: Sizes) -> Iterator[Sizes]:
        """Yield the sizes with one worker more, then two: of the first kind if answers start late, else of the last.

        Two, because one may not help if there are too few of both kinds.
        """
        for _ in range(2):
            places = [place for place, size in enumerate(sizes) if size < self._most[place]]
            if not places:
                return
            begins, goes_on = self._try(sizes)
            is_slow_to_begin = begins[self.possible].sum() <= goes_on[self.possible].sum()
            place = places[0] if is_slow_to_begin else places[-1]
            sizes = (*sizes[:place], sizes[place] + 1, *sizes[place + 1 :])
            yield sizes

    def _fewer(self, sizes: Sizes) -> Iterator[Sizes]:
        for place, size in enumerate(sizes):
            if size > 1:
                yield (*sizes[:place], size - 1, *sizes[place + 1 :])

    def _share(self, sizes: Sizes) -> float:
        """Return the share of good requests among those that can be good."""
        begins, goes_on = self._try(sizes)
        return float((begins & goes_on)[self.possible].mean())

    def _try(self, sizes: Sizes) -> Tried:
        """Simulate the window with these numbers of workers."""
        if sizes not in self._tried:
            deployment, at = self._settings.deployment, f"at {self._window.start_s:.6f}s"
            pools = tuple(
                replace(pool, replicas=max(pair))
                for pool, *pair in zip(deployment.pools, sizes, self._before, strict=True)
            )
            events = "; ".join(f"{at}: ={size} {pool.name}" for pool, size in zip(pools, sizes, strict=True))
            changed = replace(deployment, pools=pools, gpus=None, fleet=FleetConfig(events=events))
            settings = replace(self._settings, deployment=changed)
            record = simulate(Run(Arm("oracle", settings, {})), self._window.requests)
            counted = replace(record, requests=record.requests[self._window.first :])
            begins = [limit for limit in self._limits if limit.metric == "ttft"]
            others = [limit for limit in self._limits if limit.metric != "ttft"]
            self._tried[sizes] = Tried(good_requests(counted, begins), good_requests(counted, others))
        return self._tried[sizes]
