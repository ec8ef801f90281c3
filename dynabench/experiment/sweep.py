"""Sweeps: every combination of settings, or the highest rate that meets the limits, in virtual time on all cores.

Each simulated point is kept in a file of its own as soon as it is known, so that an interrupted sweep goes on where it was.
"""

import hashlib
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from dynabench.deployment.file import as_plain
from dynabench.experiment.arms import comparison_of
from dynabench.experiment.axes import change
from dynabench.experiment.manifest import manifest_of
from dynabench.experiment.parallel import in_parallel
from dynabench.experiment.run import Source, progress_bar, source_of
from dynabench.experiment.settings import ExperimentConfig, SweepConfig
from dynabench.interrupt import Flag, Interrupt
from dynabench.plan import Arm, Settings, plans
from dynabench.terminal import Terminal
from dynabench.virtual.run import run as simulate
from foundation.errors import UserError
from foundation.files import replace_text
from reports.conditions import Condition
from reports.points import Highest, Point, Quantiles, Sweep
from reports.summary import summarize
from serving.router import ROUTER_MODES
from workloads.source import files_of


def run_sweep(
    files: tuple[Path, ...], config: SweepConfig, experiment: ExperimentConfig, settings: Settings, *, console: Terminal
) -> tuple[Path, Sweep]:
    """Carry out a sweep and write its folder; a folder that holds the same sweep is resumed.

    Raises:
        UserError: the folder holds something else, or a search has no limits.
        ValueError: an axis is not understood.
    """
    from reports import sweep_report

    limits = experiment.limits
    if config.find is not None and not limits:
        raise UserError("--find searches for the highest value that meets limits; give --slo or --slo-preset")
    modes = replace(experiment, noise_floor=False)
    arms, left_out = comparison_of(modes, settings)
    identity = _identity(files, config, experiment, settings)
    out = experiment.out or Path("results") / f"sweep-{identity}"
    points = _open(out, identity)
    for reason in left_out:
        console.print(f"left out: {reason}", soft_wrap=True)
    with Interrupt() as interrupt:
        work = _Work(files, experiment, config, points, limits, interrupt)
        if config.find is None:
            is_complete = _grid(work, arms, console)
            found: list[Highest] = []
        else:
            is_complete, found = _search(work, arms, console)
        rows = [row for row in (work.known(arm) for arm in arms) if row is not None] if config.find is None else found
        workload = work.source(arms[0].settings.shape)
        manifest = manifest_of("virtual", files, workload, experiment, settings, arms, [])
        manifest |= {"sweep": asdict(config), "identity": identity}
        return out, sweep_report.write(out, manifest, rows, work.all_points(), is_complete=is_complete)


class _Work:
    """What every point of a sweep needs, and what is known of them."""

    def __init__(
        self,
        files: tuple[Path, ...],
        experiment: ExperimentConfig,
        config: SweepConfig,
        points: Path,
        limits: list[Condition],
        interrupt: Interrupt,
    ) -> None:
        self.interrupt = interrupt
        self.source = source_of(files, experiment)
        self.experiment = experiment
        self.config = config
        self.points = points
        self.limits = limits

    def known(self, arm: Arm) -> Point | None:
        """Return a point that was simulated before."""
        file = self._file(arm)
        return _read(file) if file.exists() else None

    def keep(self, arm: Arm, point: Point) -> None:
        """Write a point down, whole.

        Raises:
            UserError: there is no room for it.
        """
        try:
            replace_text(self._file(arm), msgspec.json.encode(point).decode())
        except OSError as error:
            raise UserError(
                f"{self.points}: cannot be written ({error.strerror}); the points so far are kept: make room and run the "
                "same command again"
            ) from error

    def all_points(self) -> list[Point]:
        """Return every point in the folder."""
        return [_read(file) for file in sorted(self.points.glob("*.json"))]

    def call(self, arm: Arm) -> tuple[Any, tuple[Any, ...]]:
        """Return what simulates a point."""
        experiment = self.experiment
        return simulate_point, (
            arm, self.source, experiment.seed, experiment.repeats, self.limits, self.config.attainment, self.interrupt.flag,
        )  # fmt: skip

    def _file(self, arm: Arm) -> Path:
        key = json.dumps({name: str(value) for name, value in arm.changes.items()}, sort_keys=True)
        return self.points / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _read(file: Path) -> Point:
    """Read a point that was kept.

    Raises:
        UserError: it is not one.
    """
    try:
        point = msgspec.json.decode(file.read_bytes(), type=Point)
        if "router_mode" not in point.changes:
            raise ValueError("its changes name no router_mode")
    except (msgspec.DecodeError, ValueError) as error:
        raise UserError(f"{file}: not a point of a sweep ({error}); remove the file to simulate it again") from error
    return point


def simulate_point(
    arm: Arm,
    source: Source,
    seed: int,
    repeats: int,
    limits: list[Condition],
    attainment: float,
    flag: Flag,
) -> Point:
    """Simulate a combination of settings and return its figures; all repeats together."""
    workload = source(arm.settings.shape)
    runs = [simulate(plan, workload, is_interrupted=flag.is_raised) for plan in plans([arm], repeats, seed)]
    summary = summarize(runs, limits, with_intervals=False)
    figures = summary.arms[arm.name]
    missed = list(figures.missed or [])
    attained = figures.goodput.attainment or 0.0 if figures.goodput else 1.0
    if attained < attainment and any(limit.statistic is None for limit in limits):
        missed.append(f"attainment >= {attainment:g} ({attained:.4g})")
    if not figures.stability.is_stable:
        missed.append("a queue that does not grow")
    intended = runs[0].requests.intended_s
    start, stop = float(intended.min()), float(intended.max())
    return Point(
        name=arm.name,
        changes=arm.plain_changes,
        workers=arm.settings.deployment.num_workers,
        offered_per_s=len(workload) / (stop - start) if stop > start else None,
        is_stable=figures.stability.is_stable,
        stability=figures.stability,
        missed=missed,
        is_complete=figures.is_complete,
        ttft_sched=Quantiles.of(figures.ttft_sched),
        ttft=Quantiles.of(figures.ttft),
        split=figures.split or None,
        is_apart=figures.is_apart,
        ttst=Quantiles.of(figures.metric("ttst")),
        itl=Quantiles.of(figures.itl),
        tpot=Quantiles.of(figures.tpot),
        e2e_sched=Quantiles.of(figures.e2e_sched),
        throughput=figures.throughput,
        goodput=figures.goodput or None,
        cache=figures.cache,
        imbalance=figures.imbalance,
        preemptions=figures.preemptions,
        wall_s=sum(run.wall_s for run in runs),
    )


def _grid(work: _Work, arms: list[Arm], console: Terminal) -> bool:
    """Simulate what is not known yet; tell whether everything is known then."""
    todo = [arm for arm in arms if work.known(arm) is None]
    if len(todo) < len(arms):
        console.print(f"{len(arms) - len(todo)} of {len(arms)} points are known already")
    done = 0
    with progress_bar(console, "points") as progress:
        bar = progress.add_task("sweeping", total=len(todo))
        for place, row in _results(work, todo):
            if row.is_complete:
                work.keep(todo[place], row)
                done += 1
            progress.update(bar, advance=1)
    return done == len(todo)


def _search(work: _Work, arms: list[Arm], console: Terminal) -> tuple[bool, list[Highest]]:
    """Bisect each combination for the highest value at which nothing is missed, all combinations at once."""
    name = work.config.find
    assert name is not None
    if any(name in arm.changes for arm in arms):
        raise UserError(f"{name} is searched for; it cannot be varied as well")
    kind = int if name == "concurrency" else float
    bounds = {arm.name: (None, None) for arm in arms}  # highest value that is met, lowest that is missed
    best: dict[str, Point | None] = dict.fromkeys(bounds)
    is_complete = True
    with progress_bar(console, "combinations") as progress:
        bar = progress.add_task(f"searching {name}", total=len(arms))
        open_ = {arm.name: arm for arm in arms}
        while open_ and is_complete:
            tried = {label: _at(arm, name, _next(bounds[label], work.config, kind)) for label, arm in open_.items()}
            fresh = [arm for arm in tried.values() if work.known(arm) is None]
            count = 0
            for place, row in _results(work, fresh):
                if row.is_complete:
                    work.keep(fresh[place], row)
                    count += 1
            if count < len(fresh):
                is_complete = False
                break
            for label, arm in tried.items():
                row, value = work.known(arm), arm.changes[name]
                assert row is not None
                met, missed = bounds[label]
                bounds[label] = (met, value) if row.missed else (value, missed)
                if not row.missed:
                    best[label] = row
                if _is_found(bounds[label], work.config, kind):
                    del open_[label]
                    progress.update(bar, advance=1)
    rows = []
    for arm in arms:
        met, missed = bounds[arm.name]
        row = best[arm.name]
        rows.append(Highest(arm=arm.name, changes=arm.plain_changes, find=name, met=met, missed_at=missed, point=row))
    return is_complete, rows


def _results(work: _Work, arms: list[Arm]) -> Any:
    config = work.config
    calls = [work.call(arm) for arm in arms]
    if not calls:
        return iter(())
    return in_parallel(
        calls, work.experiment.jobs, interrupt=work.interrupt, backend=config.backend, address=config.cluster
    )


def _next(bounds: tuple[Any, Any], config: SweepConfig, kind: Any) -> Any:
    """Return the value to try next: double until something is missed, then halve the ratio."""
    met, missed = bounds
    if met is None and missed is None:
        return kind(max(config.low, 1) if kind is int else config.low)
    if missed is None:
        return kind(min(met * 2, config.high))
    if met is None:
        raise AssertionError("a search ends where its first value is missed")
    value = math.sqrt(met * missed) if kind is float else (met + missed) // 2
    return round(value, 6) if kind is float else value


def _is_found(bounds: tuple[Any, Any], config: SweepConfig, kind: Any) -> bool:
    met, missed = bounds
    if met is None:
        return True
    if missed is None:
        return bool(met >= (int(config.high) if kind is int else config.high))
    return bool(missed - met <= 1) if kind is int else bool(missed / met - 1 <= config.precision)


def _at(arm: Arm, name: str, value: Any) -> Arm:
    """Give an arm a value of what is searched for."""
    settings = arm.settings
    if name == "rate" and settings.shape.arrival is None:
        settings = replace(settings, shape=replace(settings.shape, arrival="poisson", rate=value))
    else:
        settings = change(settings, {name: value})
    return Arm(arm.name, settings, {**arm.changes, name: value})


def _identity(files: tuple[Path, ...], config: SweepConfig, experiment: ExperimentConfig, settings: Settings) -> str:
    """Name a sweep by everything its points depend on."""
    parts = {
        "files": [(str(file), file.stat().st_size if file.is_file() else None) for file in files_of(files)],
        "seed": experiment.seed,
        "repeats": experiment.repeats,
        "block": experiment.trace_block_size,
        "format": experiment.format,
        "slo": [str(limit) for limit in experiment.limits],
        "attainment": config.attainment,
        "settings": [asdict(settings.shape), asdict(settings.load), as_plain(settings.deployment)],
        "times": [_digest(pool.timing.timing_file) for pool in settings.deployment.pools],
        "modes": list(ROUTER_MODES),
        "point": Point.__struct_fields__,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _open(out: Path, identity: str) -> Path:
    """Make the folder of a sweep, or take up one that was begun.

    Raises:
        UserError: it holds something else.
    """
    points, mark = out / "points", out / "sweep.id"
    try:
        if out.exists() and not mark.exists():
            raise UserError(f"{out} exists and is no sweep; name another results folder with --out, or remove it")
        if mark.exists() and mark.read_text().strip() != identity:
            raise UserError(
                f"{out} holds a sweep with other settings; name another results folder with --out, or remove it"
            )
        points.mkdir(parents=True, exist_ok=True)
        mark.write_text(identity + "\n")
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror})") from error
    return points


def _digest(file: str | None) -> str | None:
    path = Path(file) if file else None
    return hashlib.sha256(path.read_bytes()).hexdigest() if path is not None and path.is_file() else None
