"""Settings of an experiment: what it compares, and how a sweep goes through its settings."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from foundation.settings import Count, Positive, Share, Whole, check_settings
from reports.figures.conditions import Condition
from reports.figures.slo import parse_slo, preset
from reports.summary import SMALLEST
from serving.router import Mode

Backend = Literal["local", "ray", "dask"]
Attainment = Annotated[float, Meta(gt=0, le=1)]
ATTAINMENT = 0.99
"""The share of the requests that must be within the limits of each request, unless another is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentConfig:
    """What to compare."""

    router_mode: tuple[str, ...] = ()
    """Router mode of an arm; give it once per arm. The first is the baseline (default: round-robin and kv; with
    --deployment, the file's)."""

    repeats: Count = 1
    """Runs of each arm, with consecutive seeds."""

    seed: int = 0
    """Seed of every random choice."""

    vary: tuple[str, ...] = ()
    """Another axis: any setting by name with its values, such as num_gpu_blocks=1024,2048, rate_scale=1,2 or
    kv_offloading_size=0,64,256 (GiB of host memory for KV); may be repeated."""

    noise_floor: bool = False
    """Run the first arm once more with other seeds (A/A); differences as small as between these two count as noise."""

    smallest_difference: Share = SMALLEST
    """Smallest relative difference that matters; arms that differ by less are reported as equal in practice."""

    slo: tuple[str, ...] = ()
    """Limit on ttft, ttst, tpot or e2e of each request, such as 'ttft <= 2s' or 'tpot <= 100ms' (goodput counts the
    requests within these), or on a statistic of a run, such as 'ttft.p99 <= 2s' or 'itl.p99 <= 60ms'; may be repeated."""

    slo_preset: str | None = None
    """MLPerf's limits for a model, such as llama3.1-8b or llama2-70b-interactive."""

    oracle: bool = True
    """Virtual time: if the number of workers changes and there are limits, find the fewest workers that would have met
    them in each part of the trace (takes about ten times as long as a run)."""

    metrics_like: Literal["aiperf", "vllm", "guidellm"] | None = None
    """Print the figures a second time, as another tool defines them."""

    jobs: Whole = 0
    """Virtual time: runs simulated at once (0: one for each core, or fewer if that takes longer)."""

    format: str | None = None
    """Format of the workload (default: detected; `dynabench workload formats` lists them)."""

    columns: str | None = None
    """Columns of a CSV, JSONL or Parquet log: arrival=ts,input=prompt_tokens,output=completion_tokens, and optionally
    session=, hash_ids= and priority=; arrival=ts:ms sets the unit of times (s, ms, us, ns)."""

    trace_block_size: Count | None = None
    """Tokens each hash id of the workload stands for (default: the format's)."""

    out: Path | None = None
    """Results folder (default: a new one in results/, named after the time)."""

    def __post_init__(self) -> None:
        """Refuse invalid settings."""
        check_settings(self)
        for mode in self.router_mode:
            Mode.parse(mode)
        if len(set(self.router_mode)) != len(self.router_mode):
            raise ValueError(f"router_mode is given twice: {', '.join(self.router_mode)}")
        _ = self.limits

    @property
    def limits(self) -> list[Condition]:
        """The limits that were given."""
        return [parse_slo(text) for text in self.slo] + (preset(self.slo_preset) if self.slo_preset else [])


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig:
    """How a sweep goes through its settings."""

    find: str | None = None
    """Search for the value of this at which the limits (--slo, --slo-preset) are just met, for each combination: the highest
    rate_scale, rate or concurrency, the lowest number of workers, or any other setting that is a number."""

    low: Positive = 0.1
    """Lowest value the search tries (whole numbers: 1)."""

    high: float = 64.0
    """Highest value the search tries."""

    precision: Annotated[float, Meta(gt=0, lt=1)] = 0.03
    """Relative width at which the search ends."""

    attainment: Attainment = ATTAINMENT
    """Share of the requests that must be within the limits of each request."""

    backend: Backend = "local"
    """Where to simulate: the cores of this machine, or a Ray or Dask cluster (pip install ray, or distributed)."""

    cluster: str | None = None
    """Address of the cluster (default: one is started on this machine)."""

    def __post_init__(self) -> None:
        """Refuse invalid settings."""
        check_settings(self)
        if not self.low < self.high:
            raise ValueError(f"low must be less than high ({self.high:g}), not {self.low:g}")
