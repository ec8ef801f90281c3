"""The error of simulated times: what the published measurements that are most like a case say about it.

    (timing, load)  ->  ModelError  ->  how many times as long as simulated mean TTFT and TPOT may really be

Each point of published_points.csv is a real server whose mean TTFT and TPOT were published, beside what `simulate` says
of it (benchmarks/fidelity_points.py writes the file). The nearer a point is to the case, the more it counts: its weight
falls by e with each `REACH` of distance. What is left between points as near as these is a spread that grows with the
distance of the nearest. docs/fidelity.md has the share of points that lie within the intervals of the others.
"""

import csv
import math
import os
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynabench.experiment.own_points import PRECISIONS, SPLIT, read_points
from mocker.models.catalog import find_model, original_id
from mocker.models.shape import ModelShape
from mocker.timing.catalog import find_gpu
from mocker.timing.config import TimingConfig
from mocker.timing.parts import OWN_CHOICE
from reports.figures.metrics import per_request
from reports.record.records import Record
from serving.role import Role

Floats = npt.NDArray[np.float64]

REACH = 0.5
"""Farther by this, a point counts less by a factor of e."""
REACH_AWAY = 0.25
"""The reach is at least this share of the distance of the nearest point: where none is near, none is singled out."""
LEAST = 1e-3
"""Points whose weight is a smaller share of the nearest one's do not count."""
SPREAD, SPREAD_AWAY = 0.03, 0.06
"""What two equal cases differ by, and what is added for each unit of distance of the nearest point (shares)."""
COVERED = 0.9
"""The share of measurements that an interval is to cover."""
TYPES = {precision: weights for weights, precision in PRECISIONS.items()}
OWN_POINTS = "DYNABENCH_POINTS"
"""Environment variable with files of further points, as PATH has folders."""
FAR = 1.5
"""Points that are farther are only a hint."""


class Load(NamedTuple):
    """What an engine does when its times are looked at."""

    concurrency: float
    """Requests at a time."""
    isl: float
    """Mean length of prompts (tokens)."""
    osl: float
    """Mean length of answers (tokens)."""


def load_of(record: Record, num_workers: int, role: Role = "aggregated") -> Load | None:
    """Return what each worker of a role did on average; None if nothing was answered."""
    requests = record.requests
    latencies = per_request(requests)
    e2e, ttft = latencies["e2e_sched"], latencies["ttft_sched"]
    is_known = ~np.isnan(e2e)
    if not is_known.any():
        return None
    came = requests.intended_s[is_known]
    duration_s = float((came + e2e[is_known]).max() - came.min())
    theirs = {"aggregated": e2e, "prefill": ttft, "decode": e2e - ttft}[role]
    in_flight = float(theirs[is_known].sum()) / duration_s / num_workers
    return Load(in_flight, float(requests.isl[is_known].mean()), float(requests.osl[is_known].mean()))


class Case(NamedTuple):
    """What decides how like a measured point is: the engine, the model, its GPUs and the load."""

    engine: str
    model: str
    gpu: str
    weights: str
    num_gpus: int
    load: Load | None = None
    moe_backend: str = "auto"

    @property
    def key(self) -> tuple[str, ...]:
        """What points of one case have in common."""
        return (*self[:4], self.moe_backend)

    def __str__(self) -> str:
        words = (self.model, self.weights, "on", self.engine, "and", self.gpu)
        return " ".join(filter(None, words)) + f" with moe_backend {self.moe_backend}" * (self.moe_backend != "auto")


class Ratios(NamedTuple):
    """How many times as long as simulated a mean time may really be.

    A mixture of logistic distributions of the logarithm, which are nearly normal: one around each measured point.
    """

    logs: Floats
    """Of each point: the logarithm of measured / simulated."""
    weights: Floats
    """Of each point; their sum is 1."""
    spread: float
    """Standard deviation around each."""

    def blurred(self, spread: float) -> "Ratios":
        """Return the same for a simulated time that is itself only known with a spread.

        Args:
            spread: standard deviation of its logarithm.
        """
        return self._replace(spread=math.hypot(self.spread, spread))

    def below(self, ratio: float) -> float:
        """Return the chance that a real time is at most so many times the simulated one."""
        return float(self._below(np.array([math.log(ratio)]))[0])

    @property
    def interval(self) -> tuple[float, float]:
        """The ratios between which 90% lie."""
        margin = 4 * self.spread
        logs = np.linspace(self.logs.min() - margin, self.logs.max() + margin, 500)
        low, high = np.interp([(1 - COVERED) / 2, (1 + COVERED) / 2], self._below(logs), logs)
        return math.exp(low), math.exp(high)

    @property
    def mean_error(self) -> float:
        """Mean absolute error of the simulated times, as a share of the real ones."""
        return float((self.weights * np.abs(np.exp(-self.logs) - 1)).sum())

    def _below(self, logs: Floats) -> Floats:
        deviations = (logs[:, None] - self.logs) / self.spread
        found: Floats = (1 + np.tanh(math.pi / math.sqrt(12) * deviations)) / 2 @ self.weights
        return found


def has_errors_of_ttft(metric: str) -> bool:
    """Return whether a metric is as far off as TTFT is; the others are as far off as TPOT."""
    return metric.startswith(("ttft", "ttst"))


class ModelError(NamedTuple):
    """How far simulated mean times are known to be off."""

    tpot: Ratios
    ttft: Ratios
    nearest: Case
    """The measured case that is nearest."""
    points: int
    """How many points it has."""
    own: int
    """How many of these are one's own."""
    distance: float
    """How far away it is."""
    differs: str
    """In what it differs from the case."""

    def of(self, metric: str) -> tuple[Ratios, str]:
        """Return what is known of a metric, and whose error that is: TTFT's or TPOT's."""
        return (self.ttft, "TTFT") if has_errors_of_ttft(metric) else (self.tpot, "TPOT")

    @property
    def measured(self) -> str:
        """The points of the nearest case, in words."""
        published = self.points - self.own
        if not self.own:
            return f"{published:,} published point{'s' * (published != 1)} of {self.nearest}"
        found = f"your own {self.own:,} point{'s' * (self.own != 1)} of {self.nearest}"
        return f"{found} and {published:,} published" if published else found

    def __str__(self) -> str:
        found = self.measured
        if self.differs:
            found = f"the nearest measured case, {found} ({self.differs})"
        return f"{found}; only a hint, because that is far away" if self.distance > FAR else found

    @property
    def text(self) -> str:
        """How far off the means are, and what says so."""
        tpot, ttft = (f"{low:.2f} to {high:.2f}" for low, high in (self.tpot.interval, self.ttft.interval))
        return f"in 9 of 10 cases, the real mean TPOT is {tpot} times the simulated, the real mean TTFT {ttft} times, by {self}"


def model_error(timing: TimingConfig, load: Load | None = None) -> ModelError | None:
    """Return what measured points say about the times of a model on a GPU.

    None if step times have another source, or are divided.

    Args:
        timing: the step times.
        load: what the engine does (None: any load).
    """
    if timing.timing_name != "roofline" or timing.gpu is None or timing.model is None:
        return None
    if timing.speedup_ratio != 1 or timing.decode_speedup_ratio != 1:
        return None
    return known_points().error_of(case_of(timing, load), timing.shape)


def case_of(timing: TimingConfig, load: Load | None = None) -> Case:
    """Return the case that a model on a GPU is."""
    assert timing.model is not None
    assert timing.gpu is not None
    engine, weights, kernels = timing.host_times, timing.shape.weights, timing.moe_backend
    return Case(
        engine,
        _name(timing.model),
        find_gpu(timing.gpu).name,
        weights,
        timing.tensor_parallel_size * timing.pipeline_parallel_size,
        load,
        "auto" if OWN_CHOICE.get((engine, weights)) == kernels else kernels,
    )


class Points:
    """Measured points, as columns."""

    def __init__(self, rows: Sequence[dict[str, str]]) -> None:
        """Take rows of published_points.csv; those without a prediction do not count."""
        known = [row for row in rows if not row["problem"]]
        self._shapes = {_name(name): find_model(name) for name in dict.fromkeys(row["model_path"] for row in known)}
        self._kinds = {model: kind_of(shape) for model, shape in self._shapes.items()}
        self.cases = [self._case(row) for row in known]
        self.logs = {
            metric: np.log([float(row[f"silicon_{metric}_ms"]) / float(row[metric]) for row in known])
            for metric in ("ttft", "tpot")
        }
        """Of each point, by metric: the logarithm of measured / simulated."""
        self._is_own = np.array([row["split"] == SPLIT for row in known])
        self._models = np.array([case.model for case in self.cases])
        self._engines = np.array([case.engine for case in self.cases])
        self._gpus = np.array([case.gpu for case in self.cases])
        self._weights = np.array([case.weights for case in self.cases])
        self._kernels = np.array([case.moe_backend for case in self.cases])
        self._num_gpus = np.log2([case.num_gpus for case in self.cases])
        self._loads = np.log2([case.load or (1, 1, 1) for case in self.cases])

    def _case(self, row: dict[str, str]) -> Case:
        model, weights = _name(row["model_path"]), row["precision"]
        return Case(
            row["backend"],
            model,
            row["gpu"],
            TYPES.get(weights, weights) or self._shapes[model].weights,
            int(row["tp_size"]) * (int(row["attention_dp_size"]) if row["backend"] == "trtllm" else 1),
            Load(float(row["concurrency"]), float(row["isl"]), float(row["osl"])),
            row.get("moe_backend", "auto"),
        )

    def error_of(self, case: Case, shape: ModelShape, among: npt.NDArray[np.bool_] | None = None) -> ModelError:
        """Return what points say about a case.

        Args:
            case: the case.
            shape: its model's.
            among: which points may be used (None: all).
        """
        places = np.arange(len(self.cases)) if among is None else np.flatnonzero(among)
        distances = self._distances(case, shape)[places]
        nearest = float(distances.min())
        weights = np.exp((nearest - distances) / max(REACH, REACH_AWAY * nearest))
        counted = weights > LEAST
        weights = weights[counted] / weights[counted].sum()
        spread = SPREAD + SPREAD_AWAY * nearest
        tpot, ttft = (Ratios(self.logs[metric][places][counted], weights, spread) for metric in ("tpot", "ttft"))
        best = self.cases[places[distances.argmin()]]
        alike = np.array([one.key == best.key for one in self.cases])
        return ModelError(
            tpot,
            ttft,
            best._replace(load=None),
            int(alike.sum()),
            int((alike & self._is_own).sum()),
            nearest,
            _differences(best, self._shapes[best.model], case, shape),
        )

    def _distances(self, case: Case, shape: ModelShape) -> Floats:
        """Return how unlike a case each point is."""
        kind = kind_of(shape)
        names, places = np.unique(self._models, return_inverse=True)
        found: Floats = np.array([self._between_models(name, kind, case, shape) for name in names])[places]
        found += 2.0 * (self._engines != case.engine) + 0.7 * (self._gpus != case.gpu)
        found += 0.5 * (self._weights != case.weights) + 0.5 * (self._kernels != case.moe_backend)
        found += 0.25 * np.abs(self._num_gpus - math.log2(case.num_gpus))
        if case.load is not None:
            found += np.abs(self._loads - np.log2(np.maximum(case.load, 1.0))) @ [0.2, 0.15, 0.1]
        return found

    def _between_models(self, model: str, kind: str, case: Case, shape: ModelShape) -> float:
        other, its_kind = self._shapes[model], self._kinds[model]
        return (
            2.0 * (("mixture" in its_kind) != ("mixture" in kind))
            + 0.7 * (its_kind != kind)
            + 0.5 * (model != case.model)
            + 0.3 * _octaves(other.num_active_parameters, shape.num_active_parameters)
            + 0.15 * _octaves(other.num_parameters, shape.num_parameters)
        )


def _name(model: str) -> str:
    """Return the id of the original that all checkpoints of a model share; other names, such as a path, as they are."""
    return original_id(model) or model


def _octaves(one: float, other: float) -> float:
    return abs(math.log2(max(one, 1.0) / max(other, 1.0)))


def known_points() -> Points:
    """Return the points that come with dynabench, and those of the files that DYNABENCH_POINTS names.

    Raises:
        UserError: a file cannot be read, or has something else than points.
    """
    paths = [Path(name).resolve() for name in os.environ.get(OWN_POINTS, "").split(os.pathsep) if name]
    return _points(tuple((path, _written_ns(path)) for path in paths))


def _written_ns(path: Path) -> int:
    """Return when a file was written last; 0, if it cannot be read."""
    try:
        return path.stat().st_mtime_ns
    except OSError:  # reported when it is read
        return 0


def published_points() -> Points:
    """Return the points that come with dynabench."""
    return _points(())


@cache
def _points(own: tuple[tuple[Path, int], ...]) -> Points:
    """Return points that come with dynabench, and those of files, each with the time when it was written last."""
    text = files(__package__).joinpath("published_points.csv").read_text(encoding="utf-8")
    rows = [row for path, _ in own for row in read_points(path)]
    return Points([*csv.DictReader(text.splitlines()), *rows])


def kind_of(shape: ModelShape) -> str:
    """Say what its layers are made of, where that decides which kernels it spends its time in."""
    mixers = [mixer for mixer, _ in shape.mixers]
    attention = {
        "hybrid": any(mixer.state_bytes for mixer in mixers),
        "sparse": any(mixer.index is not None or mixer.compression > 1 for mixer in mixers),
        "latent": any(mixer.latent_flops for mixer in mixers),
        "windowed": any(mixer.window for mixer in mixers),
    }
    words = [word for word, has in attention.items() if has]
    return " ".join([*words, "mixture" if shape.num_experts else "dense"])


def _differences(one: Case, its: ModelShape, case: Case, shape: ModelShape) -> str:
    """Say in what a case differs from a point; nothing if in nothing but the load."""
    found = []
    if case.engine != one.engine:
        found.append(f"the engine is {case.engine}")
    if case.gpu != one.gpu:
        found.append(f"the GPU is {case.gpu}")
    if kind_of(its) != kind_of(shape):
        found.append(f"the model is {kind_of(shape)}, not {kind_of(its)}")
    elif its.quantised("bfloat16").layers != shape.quantised("bfloat16").layers:
        own, other = (f"{model.num_parameters / 1e9:,.1f} B" for model in (shape, its))
        found.append(f"the model has {own} parameters" + f", not {other}" * (own != other))
    if one.weights and one.weights != shape.weights:
        found.append(f"weights are {shape.weights}")
    if case.moe_backend != one.moe_backend:
        found.append(f"moe_backend is {case.moe_backend}")
    return "here, " + " and ".join(found) if found else ""
