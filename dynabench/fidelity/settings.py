"""Settings of comparisons of simulated runs with real ones, and of measurements of a real engine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from dynabench.deployment.flags import LivePoolConfig
from dynabench.experiment.settings import ExperimentConfig
from foundation.settings import CheckedSettings, Count, Positive
from mocker.config import SCHEDULERS, EngineTypeConfig
from reports import fidelity


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidateExperimentConfig(ExperimentConfig):
    """Settings of an experiment for `dynabench validate`, which usually compares one engine with one."""

    router_mode: tuple[str, ...] = ("round-robin",)
    """Router mode that is compared, real and simulated; give it once per mode."""

    def __post_init__(self) -> None:
        """Refuse invalid settings, and axes other than router modes."""
        ExperimentConfig.__post_init__(self)
        if self.vary:
            raise ValueError(
                f"--vary {self.vary[0]} cannot be validated: validate compares one simulated deployment with a real one; run it "
                "once for each value"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatePoolConfig(LivePoolConfig):
    """The engines of both sides."""

    workers: Annotated[int, Meta(ge=1, le=10_000)] = 1
    """Engine workers, real and simulated; records of a past run do not say how many it had."""

    def __post_init__(self) -> None:
        """Refuse invalid settings, and workers that do one part of each request."""
        LivePoolConfig.__post_init__(self)
        if self.names_roles:
            raise ValueError(
                "--prefill-workers, --decode-workers and related options cannot be validated: validate compares "
                "aggregated "
                "workers only; benchmarks/agreement.py --apart compares both clocks"
            )

    def simulated(self, given: EngineTypeConfig | None) -> EngineTypeConfig:
        """Return whose scheduler is simulated: that of the real engine, unless another is given.

        Raises:
            ValueError: the real engine has another one, and is measured now.
        """
        own = next((kind for kind in SCHEDULERS if kind == self.engine), None)
        if given is None:
            return EngineTypeConfig(engine_type=own or "vllm")
        if own not in (None, given.engine_type):
            raise ValueError(f"engine_type is {given.engine_type!r}; expected {own!r}, as engine")
        return given


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidateConfig:
    """What simulated runs are compared with."""

    real: Path | None = None
    """A past run instead of a live engine: a results folder, a recording with times, records of requests (.jsonl, .csv),
    or what a load generator wrote (AIPerf's profile_export.jsonl; vllm bench serve --save-result --save-detailed)."""

    fail_if: tuple[str, ...] = ()
    """Exit with 1 if a figure is off by more than this, such as 'ttft.p90 > 5%' or 'tpot > 3%' (every statistic), and by
    more than real runs differ among themselves; may be repeated."""

    contribute: Path | None = None
    """Add a row with the measured and simulated means of each router mode to this CSV file, for others and for
    DYNABENCH_POINTS: numbers and names of bundled engines, models and GPUs, and nothing else. Needs --model and --gpu."""

    def __post_init__(self) -> None:
        """Refuse invalid thresholds."""
        for text in self.fail_if:
            fidelity.parse(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig(CheckedSettings):
    """Which schedulers are held against each other, and on what."""

    engine_python: str | None = None
    """Python of the environment that has the engine, which --engine-type names (default: the one that runs dynabench)."""

    against: str | None = None
    """Python of an environment with another version of the engine, which is compared with the first instead of ours."""

    router_mode: str | None = None
    """How requests are spread over several workers (default: round-robin; with --deployment, the file's)."""

    seed: int = 0
    """Seed of every random choice."""

    format: str | None = None
    """Format of the workload (default: detected; `dynabench workload formats` lists them)."""

    columns: str | None = None
    """Columns of a CSV, JSONL or Parquet log, as for `dynabench simulate`."""

    trace_block_size: Count | None = None
    """Tokens each hash id of the workload stands for (default: the format's)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateConfig(CheckedSettings):
    """How a real engine is measured."""

    out: Path = Path("calibration.json")
    """The file to write; it must not exist."""

    workers: Count = 1
    """Engines that run at the same time, as many as the machine is to hold: they share its memory and its cores."""

    steps: Path | None = None
    """Keep the measured steps in this folder, too (JSON lines, a file for each engine); it must not exist."""

    duration_s: Positive = 120.0
    """Time to spend on all loads together, after loading (s)."""

    extra_engine_args: Path | None = None
    """JSON or YAML file with arguments of vLLM."""

    seed: int = 0
    """Seed of every random choice."""
