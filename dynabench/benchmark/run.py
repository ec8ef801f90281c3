"""A benchmark of endpoints: loads are tried one after the other, each saved when it is done, and reported as a sweep."""

import contextlib
import math
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from dynabench.arm import Arm, Settings, runs_of
from dynabench.benchmark.climb import Climb, Tried
from dynabench.benchmark.endpoint import PROBES, Endpoint, find
from dynabench.benchmark.sample import is_enough, lifetimes_s, samples_lacking, unsteady, with_intervals
from dynabench.benchmark.settings import BenchClientConfig, BenchConfig, SentConfig
from dynabench.benchmark.view import BenchView
from dynabench.benchmark.workload import LoadRequests, Requests
from dynabench.deployment.description import Deployment
from dynabench.experiment.arms import arm_name
from dynabench.experiment.limits import check_has_tokens
from dynabench.experiment.manifest import manifest_of, now, unsent
from dynabench.experiment.points import point_of
from dynabench.experiment.settings import ATTAINMENT, ExperimentConfig
from dynabench.experiment.source import Given
from dynabench.experiment.store import PointStore, identity_of, key_of
from dynabench.interrupt import Interrupt, InterruptError, noted
from dynabench.live.enough import LIFETIMES, Enough
from dynabench.live.http_client import clock
from dynabench.live.run import check_history, measure
from dynabench.live.validity import is_client_limited
from dynabench.terminal import Terminal
from foundation.errors import UserError
from reports import folder, gate
from reports.figures.conditions import Condition
from reports.figures.insight import of_conversations, of_usage
from reports.figures.outcomes import Outcome
from reports.record.records import Record
from reports.sweep import report as sweep_report
from reports.sweep.curve import FAILED, has_failed, requests_per_s, throughput
from reports.sweep.points import AnyPoint, Point, Sweep
from serving.runtime.config import masked
from workloads import Workload
from workloads.pacing import LoadConfig
from workloads.shape import ShapeConfig

KIND = "bench"
LONGEST = 8
"""How many times as long as set a load may last at most."""
LONGER = 1.1
"""A load whose limits are not known counts for so many times as long as the missing requests should take."""
SETTLED = 2.5
"""Requests do not count at first, for so many times as long as one takes (of conversations: as one lasts): streams begin evenly
within one such time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Everything that was asked for."""

    urls: tuple[str, ...]
    given: Given
    config: BenchConfig
    sent: SentConfig
    shape: ShapeConfig
    client: BenchClientConfig
    experiment: ExperimentConfig


def run_bench(
    asked: Asked, *, console: Terminal, gates: Sequence[Condition] = (), interrupt: Interrupt | None = None
) -> tuple[Path, dict[str, Any], Sweep]:
    """Measure endpoints at each load and write the folder; return it, the manifest and the table.

    A folder that contains the same benchmark, interrupted, is continued. Another thread that has entered an interrupt may
    lend it.

    Raises:
        UserError: an endpoint does not answer, there was no time for any load, or the folder contains something else.
        KeyboardInterrupt: the user interrupted before the first load had enough answers.
    """
    experiment, limits = asked.experiment, asked.experiment.limits
    if asked.config.find is not None and not limits:
        raise UserError(
            "--find searches for the highest load that holds the limits; set them with --slo or --slo-preset"
        )
    clients = {url: asked.client.at(url) for url in asked.urls}
    if len(clients) < len(asked.urls):
        raise UserError(f"an endpoint is given twice: {', '.join(map(masked, asked.urls))}")
    for client in clients.values():
        check_has_tokens(limits, client)
    gate.refuse_idle(gates, gate.Basis(num_arms=2, has_limits=bool(limits), finds=bool(limits)))
    requests = Requests(asked.given, asked.sent, experiment, asked.shape)
    few = requests.of(LoadConfig(concurrency=1, measure_s=float(PROBES)), None, 1.0).workload
    for url, client in clients.items():
        check_history(client, few)
        console.say(f"asking {masked(url)}")
    endpoints = [one for url, client in clients.items() for one in find(url, asked.config.model, client, few)]
    out = experiment.out or Path("results") / f"{now():%Y%m%d-%H%M%S}-{KIND}"
    if sweep_report.is_complete(out):
        raise UserError(
            f"{out} has a benchmark that is complete; choose another results folder with --out, or remove it"
        )
    settings = [_settings(one, asked.shape) for one in endpoints]
    identity = identity_of(asked.given, experiment, settings[0], _identifying(asked))
    store = PointStore(out, identity, KIND)
    lines = [_Line(asked, one, _changes(one, endpoints), requests) for one in endpoints]
    for one in endpoints:
        console.say(f"{one.said}: a request takes {one.e2e_s:.3g} s alone")
    left_out = unsent(requests.given, {one.client.way for one in endpoints}) if requests.given else []
    for note in left_out:
        console.say(note)
    with contextlib.nullcontext(interrupt) if interrupt else Interrupt() as interrupt, noted():
        work = _Work(asked, store, interrupt, BenchView(console, asked.config), console)
        is_complete = work.carry_out(lines)
        points = _by_load(lines)
        if not points and is_complete:
            raise UserError(
                f"there was no time for {', '.join(work.untried)}: it had not enough answers after --within-s "
                f"{asked.config.within_s:g}; allow more time, or send less (--osl, --duration-s, a lower load)"
            )
        if not points:
            raise KeyboardInterrupt("interrupted before the first load had enough answers; nothing was written")
        with interrupt.obeyed():
            arms = [line.arm(load) for line in lines for load in line.points]
            manifest = _manifest(asked, endpoints, few, settings[0], arms)
            manifest["experiment"]["out"] = str(out)
            manifest["sweep"]["untried"] = work.untried
            manifest["subtitle"] += "".join(f"; {note}" for note in left_out)
            return out, manifest, sweep_report.write(out, manifest, points, points, is_complete=is_complete)


def _by_load(lines: "Sequence[_Line]") -> list[AnyPoint]:
    """Return all points, those of the lowest load first."""
    loads = sorted({load for line in lines for load in line.points})
    return [line.points[load] for load in loads for line in lines if load in line.points]


def _identifying(asked: Asked) -> dict[str, Any]:
    config = replace(asked.config, within_s=None)  # which changes no load, only how many there are
    return {"urls": asked.urls, "--model": config.model, "sent": asked.sent, "bench": config}


def _changes(one: Endpoint, among: Sequence[Endpoint]) -> dict[str, str]:
    """Return what sets an endpoint apart from the others."""
    has_urls, has_models = (len({getattr(each, name) for each in among}) > 1 for name in ("url", "model"))
    return ({"endpoint": one.name} if has_urls else {}) | ({"model": one.model} if has_models else {})


def _settings(one: Endpoint, shape: ShapeConfig) -> Settings:
    """Return the settings of a run at an endpoint."""
    (pool,) = Deployment().pools
    pool = replace(pool, replicas=1, worker=replace(pool.worker, model_name=one.model))
    return Settings(Deployment(pools=(pool,)), shape, client=one.client)


def _manifest(
    asked: Asked, endpoints: Sequence[Endpoint], few: Workload, settings: Settings, arms: list[Arm]
) -> dict[str, Any]:
    manifest = manifest_of("wall", asked.given, few, asked.experiment, settings, arms, [])
    config, loads = asked.config, asked.config.loads
    sooner = f", or until its means are known to {config.precision:.0%}" * bool(config.precision)
    counted = f"each load counts for {config.duration_s:g} s{sooner}"
    manifest["workload"]["requests"] = "as many as each load needs"
    manifest["head"] = {"Server": "; ".join(one.said for one in endpoints), "Requests": few.name, "Loads": counted}
    return manifest | {
        "kind": KIND,
        "title": ", ".join(dict.fromkeys(one.name for one in endpoints)),
        "subtitle": f"{few.name}, over HTTP on the wall clock; {counted}; seed {asked.experiment.seed}",
        "sweep": asdict(asked.config) | {"find": None, "sought": asked.config.find, "axis": loads.axis},
        "left_out": [],
    }


def _as_sent(arm: Arm) -> dict[str, Any]:
    """Return what sets a load apart by the setting that made it: streams of conversations are sessions in progress."""
    streams = "session_concurrency" if arm.settings.load.session_concurrency else "concurrency"
    return {streams if name == "concurrency" else name: value for name, value in arm.changes.items()}


def _file_name(arm: Arm) -> str:
    """Return a name for a load's folder: no two loads have the same."""
    name = re.sub(r"[^\w.]+", "-", arm.name)[:80]
    return name if name == arm.name.replace(" ", "-") else f"{name}-{key_of(arm)[:8]}"


class _Line:
    """What was found out about one endpoint: its points, and which load is next."""

    def __init__(self, asked: Asked, endpoint: Endpoint, changes: dict[str, str], requests: Requests) -> None:
        self.endpoint, self._changes, self._requests, self._asked = endpoint, changes, requests, asked
        self.loads = asked.config.loads
        self.points: dict[float, Point] = {}
        values = self.loads.values
        if self.loads.is_range and not values[0]:  # a rate: from what one stream would send, upwards
            values = (float(f"{0.5 / endpoint.e2e_s:.2g}"), values[1])
        self._climb = Climb(
            values,
            is_range=self.loads.is_range,
            is_whole=self.loads.axis == "concurrency",
            seeks="limits" if asked.config.find else "knee",
            closeness=asked.config.closeness,
        )

    def next(self) -> float | None:
        """Return the next load, None if there is nothing left to learn."""
        return self._climb.next()

    def arm(self, load: float) -> Arm:
        """Return what is measured at a load."""
        value = int(load) if self.loads.axis == "concurrency" else load
        changes = {**self._changes, self.loads.axis: value}
        return Arm(
            arm_name(changes), replace(_settings(self.endpoint, self._asked.shape), load=self._sent_as(load)), changes
        )

    def requests(self, arm: Arm, load: float) -> LoadRequests:
        """Return what is sent at a load: no closed loop answers more a stream than with fewer streams."""
        rate = load if self.loads.axis == "rate" else None
        below = self._below(load)
        alone = 1 / max(self.endpoint.e2e_s, 1e-4)
        each = alone if below is None else (requests_per_s(self.points[below]) or alone * below) / below
        return self._requests.of(arm.settings.load, rate, each * load)

    def _below(self, load: float) -> float | None:
        return max((each for each in self.points if each < load), default=None)

    def _e2e_below_s(self, load: float) -> float:
        """Return how long a request takes at the load below."""
        below = self._below(load)
        return self.endpoint.e2e_s if below is None else self.points[below].e2e_sched.p90 or self.endpoint.e2e_s

    def _sent_as(self, load: float) -> LoadConfig:
        """Return how requests are sent: those that only fill the server do not count."""
        longest_s, e2e_s = LONGEST * self._asked.config.duration_s, self._e2e_below_s(load)
        streams = int(load) if self.loads.axis == "concurrency" else None
        is_alone, talks = streams == 1, self._requests.talks
        lasts_s = talks.lasts_s(e2e_s)
        return talks.load(
            streams,
            ramp_s=0.0 if streams is None or is_alone else round(min(lasts_s, longest_s), 3),
            warmup_s=0.0 if is_alone else round(min(SETTLED * lasts_s, longest_s), 3),
            measure_s=longest_s,
        )

    def expected_s(self, load: float) -> float:
        """Return about how long a load takes: until it is steady, counts, and its last requests are answered."""
        below, sent = self._below(load) or load, self._sent_as(load)
        e2e_s = self._e2e_below_s(load) * math.sqrt(load / below)
        counted_s = min(max(self._asked.config.duration_s, LIFETIMES * e2e_s), sent.measure_s or math.inf)
        return (sent.warmup_s + counted_s + e2e_s) * self._asked.experiment.repeats

    def learn(self, load: float, point: Point) -> None:
        """Note what came of a load."""
        self.points[load] = point
        is_known = bool(point.outcomes) and point.state != "unknown" and (not point.notes or has_failed(point))
        is_met = point.state == "met" if is_known else None
        self._climb.learn(Tried(load, 0.0 if point.notes else throughput(point), is_met))


class _Work:
    """Carries loads out."""

    def __init__(
        self, asked: Asked, store: PointStore, interrupt: Interrupt, view: BenchView, console: Terminal
    ) -> None:
        self._asked, self._store, self._interrupt, self._view = asked, store, interrupt, view
        self._console = console
        self._end_s = clock() + (asked.config.within_s or math.inf)
        self._has_said_usage = False
        self.untried: list[str] = []
        """Loads for which there was no time."""

    def carry_out(self, lines: list[_Line]) -> bool:
        """Try loads until nothing is left to learn; return whether that was reached.

        Endpoints take turns, in alternating order, so that a drift of what they share favours none.
        """
        turn = 0
        with self._view, contextlib.suppress(InterruptError):
            while steps := [(line, load) for line in lines if (load := line.next()) is not None]:
                expected_s = sum(line.expected_s(load) for line, load in steps)
                if turn and expected_s > self._end_s - clock():
                    self.untried = [line.arm(load).name for line, load in steps]
                    break
                for line, load in steps if turn % 2 == 0 else steps[::-1]:
                    if not turn or clock() < self._end_s:
                        self._try(line, load)
                    if self._interrupt.is_asked:
                        return False
                turn += 1
            return True
        return False

    def _try(self, line: _Line, load: float) -> None:
        """Learn what comes of a load, by measuring it unless that was done before."""
        arm = line.arm(load)
        known = self._store.known(arm)
        if not isinstance(known, Point):
            sent = line.requests(arm, load)
            arm = replace(arm, settings=replace(arm.settings, shape=sent.shape))
            clients = self._asked.client.clients
            runs = self._measured(sent.workload, arm, clients)
            while self._can_be_faster(runs, clients):
                clients *= 2
                self._console.say(f"{arm.name}: the client could not keep up; again with {clients} processes")
                runs = self._measured(sent.workload, arm, clients, least_s=lifetimes_s(runs[0]))
            if longer_s := self._longer_s(arm, runs):
                self._console.say(f"{arm.name}: too few requests to know the limits; again for {longer_s:.0f} s")
                runs = self._measured(sent.workload, arm, clients, least_s=longer_s, precision=0.0)
            is_cut = self._interrupt.is_asked or clock() >= self._end_s
            runs = [run for run in runs if is_enough(run)] if is_cut else runs
            if not runs:
                self._console.say(f"{arm.name}: left out, because it had not enough answers yet")
                return
            usage = [] if self._has_said_usage else of_usage(runs)  # the same at every load
            self._has_said_usage |= bool(usage)
            for remark in [*of_conversations(runs), *usage]:
                self._console.say(f"{arm.name}: {remark}")
            known = self._point(arm, runs)
            self._keep(sent, arm, runs)
            if not is_cut:  # a benchmark that is continued measures it whole
                self._store.keep(arm, known)
        line.learn(load, known)
        self._view.keep(known)

    def _can_be_faster(self, runs: list[Record], clients: int) -> bool:
        """Return whether the client distorted runs, and more processes may not."""
        is_limited = any(is_client_limited(run.notes) for run in runs)
        has_time = sum(run.wall_s for run in runs) < self._end_s - clock() and not self._interrupt.is_asked
        return is_limited and has_time and 2 * clients <= (os.cpu_count() or 1)

    def _longer_s(self, arm: Arm, runs: list[Record]) -> float:
        """Return how long a load has to count (s) to know all limits; 0 if that is known, or would take too long."""
        limits, duration_s = self._asked.experiment.limits, self._asked.config.duration_s
        if not (limits and runs and all(run.is_complete for run in runs)) or self._interrupt.is_asked:
            return 0.0
        measured = [run.measured for run in runs]
        counted_s = max(float(np.ptp(run.requests.intended_s)) for run in measured) or duration_s
        longer_s = LONGER * counted_s * samples_lacking(self._point(arm, runs), limits, measured)
        has_time = longer_s * len(runs) < self._end_s - clock()
        return max(longer_s, duration_s) if 0 < longer_s <= LONGEST * duration_s and has_time else 0.0

    def _measured(
        self, workload: Workload, arm: Arm, clients: int, *, least_s: float = 0.0, precision: float | None = None
    ) -> list[Record]:
        """Measure a load once per repeat, for at least this time (s), or until its means are precise."""
        runs: list[Record] = []
        experiment = self._asked.experiment
        assert arm.settings.client is not None
        client = replace(arm.settings.client, clients=clients)
        config = self._asked.config
        least_s = min(max(config.duration_s, least_s), LONGEST * config.duration_s)
        arm = replace(arm, settings=replace(arm.settings, client=client))
        for run in runs_of([arm], experiment.repeats, experiment.seed):
            self._view.begin(arm)
            with self._interrupt.obeyed():
                enough = Enough(least_s, config.precision if precision is None else precision, self._end_s)
                runs.append(measure(run, workload, view=self._view, interrupt=self._interrupt, enough=enough))
            if self._interrupt.is_asked:
                break
        return runs

    def _point(self, arm: Arm, runs: list[Record]) -> Point:
        """Return the figures of a load; more failures than are allowed miss the limits."""
        limits = self._asked.experiment.limits
        point = point_of(arm, runs, limits, ATTAINMENT)
        if len(runs) == 1:  # otherwise repeats give intervals
            point = structs.replace(point, outcomes=with_intervals(point.outcomes, limits, runs[0].measured))
        too_little = [said for run in runs if (said := unsteady(run))][:1]
        point = structs.replace(
            point, workers=0, gpus=0, too_little=too_little
        )  # nobody says how many workers there are
        attempted, most = point.requests or 0, self._asked.client.max_failed_share
        if point.outcomes and point.failed and point.failed > most * attempted:
            missed = Outcome(FAILED, "missed", reason=f"{point.failed:,} of {attempted:,}")
            point = structs.replace(point, outcomes=[*point.outcomes, missed])
        return point

    def _keep(self, sent: LoadRequests, arm: Arm, runs: list[Record]) -> None:
        """Keep the requests of a load, as a results folder of their own."""
        asked = self._asked
        place = self._store.out / folder.RUNS / _file_name(arm)
        arm = replace(arm, changes=_as_sent(arm))
        manifest = manifest_of("wall", asked.given, sent.workload, asked.experiment, arm.settings, [arm], runs)
        manifest["workload"] |= sent.described(max(int(run.requests.request.max(initial=-1)) for run in runs) + 1)
        manifest |= {"bound_s": None, "best_hit_shares": {}, "left_out": []}
        shutil.rmtree(place, ignore_errors=True)  # of an attempt that was killed before its point was kept
        folder.write(place, manifest, runs, with_charts=False)
