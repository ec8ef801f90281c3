"""What an experiment compares, and what a live one measures."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from reports import fidelity
from reports.conditions import Condition
from reports.slo import parse, preset
from serving.router import ROUTER_MODES, Mode, RouterConfig

MAX_FAILED_SHARE = 0.01
"""Share of failed requests above which a run is not valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentConfig:
    """What to compare."""

    router_mode: tuple[str, ...] = ("round-robin", "kv")
    """Router mode of an arm; give it once per arm. The first is what the others are compared with."""

    workers: int = 4
    """Simulated engines behind the router."""

    repeats: int = 1
    """Times each arm is run, with seeds that follow each other."""

    seed: int = 0
    """Seed of every random choice."""

    vary: tuple[str, ...] = ()
    """Another axis: any setting by name with its values, such as num_gpu_blocks=1024,2048 or rate_scale=1,2; may be repeated."""

    noise_floor: bool = False
    """Run the first arm once more with other seeds (A/A): what differs as little as these two is called noise."""

    slo: tuple[str, ...] = ()
    """Limit for goodput, such as 'ttft <= 2s', 'tpot <= 100ms' (of each request) or 'ttft.p99 <= 2s' (of a run); may be repeated."""

    slo_preset: str | None = None
    """MLPerf's limits for a model, such as llama3.1-8b or llama2-70b-interactive."""

    metrics_like: Literal["aiperf", "vllm", "guidellm"] | None = None
    """Print the figures once more as another tool would define them."""

    jobs: int = 0
    """Virtual time: runs simulated at once (0: one for each core)."""

    format: str | None = None
    """Format of the workload (default: detected; `dynabench workload formats` lists them)."""

    trace_block_size: int | None = None
    """Tokens each hash id of the workload stands for (default: the format's)."""

    out: Path | None = None
    """Results folder (default: results/ and the time)."""

    def __post_init__(self) -> None:
        """Refuse settings without a meaning."""
        for mode in self.router_mode:
            Mode.parse(mode)
        if not self.router_mode:
            raise ValueError(f"router_mode is missing; expected one of {', '.join(ROUTER_MODES)}")
        if len(set(self.router_mode)) != len(self.router_mode):
            raise ValueError(f"router_mode is given twice: {', '.join(self.router_mode)}")
        for name, least in (("workers", 1), ("repeats", 1), ("trace_block_size", 1), ("jobs", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        _ = self.limits

    @property
    def limits(self) -> list[Condition]:
        """The limits that were given."""
        return [parse(text) for text in self.slo] + (preset(self.slo_preset) if self.slo_preset else [])


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentRouterConfig(RouterConfig):
    """Settings of a router that is measured: it takes all that is offered, as it does in virtual time."""

    max_queue_depth: float | None = None
    """Live: queue limit as a multiple of what a worker runs at once; when every worker is over it, new requests get 429 (none: no limit)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadConfig:
    """What a request meets between its client and the engine, in virtual time; a live run has its own."""

    request_overhead_ms: float | None = None
    """From the client to the engine's queue: HTTP, parsing, routing, hops (default: the calibration's or the GPU engine's, else 0)."""

    prompt_overhead_us: float | None = None
    """The same for each prompt token: tokenizing, copying (default: the calibration's, else 0)."""

    request_spacing_ms: float | None = None
    """How long a frontend is busy with a request, so that those that come at once reach the engines one by one (default: the calibration's, else 0)."""

    answer_overhead_ms: float | None = None
    """From the end of a step to the client (default: the calibration's, else 0)."""

    def __post_init__(self) -> None:
        """Refuse settings without a meaning."""
        for name in ("request_overhead_ms", "prompt_overhead_us", "request_spacing_ms", "answer_overhead_ms"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name} must not be negative, not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveConfig:
    """What `dynabench run` measures, and how it talks to it."""

    url: str | None = None
    """Measure this OpenAI endpoint (http://host:port) instead of a stack of our own."""

    engine: Literal["mocker", "mistralrs", "llamacpp", "vllm", "sglang", "trtllm"] = "mocker"
    """Engine of our own stack; all but the mocker run the model that --model names: a folder, GGUF file or Hugging Face id."""

    context_length: int | None = None
    """Tokens a sequence may reach in an --engine other than the mocker (default: the model's)."""

    extra_engine_args: Path | None = None
    """JSON or YAML file with arguments of an --engine other than the mocker."""

    prompts: Literal["tokens", "text", "chat"] = "tokens"
    """Send token ids; text, the workload's own or about as many words; or the same as chat messages (for endpoints without /v1/completions)."""

    http_port: int = 0
    """Port of our own frontend on 127.0.0.1 (0: any that is free)."""

    http_workers: int = 1
    """Processes of our own frontend."""

    clients: int = 1
    """Processes that send requests, sharing one schedule, for rates that one cannot reach."""

    warmup_requests: int | None = None
    """Requests of the workload's lengths, with prompts of their own, that are sent before a run and left out of it (default: 8 for each worker that runs a model, as the first of a size take longer there; else none)."""

    migration_limit: int = 3
    """How often a request may go on at another worker when its own is lost."""

    etcd_endpoints: str = ""
    """Let our own stack find itself over these etcd servers instead of a folder."""

    nats_server: str = ""
    """Let our own stack talk over this NATS server instead of sockets."""

    timeout_s: float = 600.0
    """Time after which a request counts as failed (s)."""

    max_failed_share: float = MAX_FAILED_SHARE
    """Share of the requests that may fail; with more a run is not valid, and the exit code is 1."""

    def __post_init__(self) -> None:
        """Refuse settings without a meaning."""
        if not 0 <= self.http_port <= 65535:
            raise ValueError(f"http_port must be from 0 to 65535, not {self.http_port}")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, not {self.url!r}")
        if not 1 <= self.clients <= 64:
            raise ValueError(f"clients must be from 1 to 64, not {self.clients}")
        if self.warmup_requests is not None and not self.warmup_requests >= 0:
            raise ValueError(f"warmup_requests must not be negative, not {self.warmup_requests}")
        if not 0 <= self.max_failed_share <= 1:
            raise ValueError(f"max_failed_share is a share, from 0 to 1, not {self.max_failed_share}")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be greater than 0, not {self.timeout_s}")
        if self.engine != "mocker" and self.url is not None:
            raise ValueError(f"--engine {self.engine} is for a stack of our own; --url measures another")
        for name in ("context_length", "extra_engine_args"):
            if self.engine == "mocker" and getattr(self, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} is for an --engine other than the mocker")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig:
    """How a sweep goes through its settings."""

    find: Literal["rate_scale", "rate", "concurrency"] | None = None
    """Search for the highest value of this at which the limits (--slo, --slo-preset) are met, for each combination."""

    low: float = 0.1
    """Where the search begins; if the limits are missed there, nothing is found."""

    high: float = 64.0
    """Highest value the search tries."""

    precision: float = 0.03
    """Relative width at which the search ends."""

    attainment: float = 0.99
    """Share of the requests that must be within the limits of each request."""

    backend: Literal["local", "ray", "dask"] = "local"
    """Where to simulate: the cores of this machine, or a Ray or Dask cluster (pip install 'dynabench[ray]' or [dask])."""

    cluster: str | None = None
    """Address of the cluster (default: one is started on this machine)."""

    def __post_init__(self) -> None:
        """Refuse settings without a meaning."""
        if not 0 < self.low < self.high:
            raise ValueError(f"low must be greater than 0 and less than high, not {self.low} and {self.high}")
        if not 0 < self.precision < 1:
            raise ValueError(f"precision must be from above 0 to below 1, not {self.precision}")
        if not 0 < self.attainment <= 1:
            raise ValueError(f"attainment is a share, above 0 and up to 1, not {self.attainment}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SelftestConfig:
    """What the server of the self-test does."""

    requests: int = 500
    """Requests to send."""

    rate: float = 97.0
    """Requests per second, at equal distances."""

    ttft_ms: float = 50.0
    """Time until the first token (ms)."""

    itl_ms: float = 10.0
    """Time between chunks (ms)."""

    tokens: int = 32
    """Tokens of an answer."""

    tokens_per_chunk: int = 1
    """Tokens that come together."""

    clients: int = 1
    """Client processes."""

    def __post_init__(self) -> None:
        """Refuse settings without a meaning."""
        for name in ("requests", "tokens", "tokens_per_chunk", "clients"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("ttft_ms", "itl_ms"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")
        if not self.rate > 0:
            raise ValueError(f"rate must be greater than 0, not {self.rate}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidateExperimentConfig(ExperimentConfig):
    """The same for `dynabench validate`, which most often holds one engine against one."""

    router_mode: tuple[str, ...] = ("round-robin",)
    """Router mode that is compared, real and simulated; give it once per mode."""

    workers: int = 1
    """Engine workers, real and simulated; records of a past run do not tell how many it had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidateConfig:
    """What simulated runs are held against."""

    real: Path | None = None
    """A past run instead of a live engine: a results folder, a recording with times, or records of requests (.jsonl, .csv)."""

    fail_if: tuple[str, ...] = ()
    """Exit with 1 if a figure is off by more than this, such as 'ttft.p90 > 5%' or 'tpot > 3%' (every statistic), and by
    more than real runs differ among themselves; may be repeated."""

    def __post_init__(self) -> None:
        """Refuse thresholds without a meaning."""
        for text in self.fail_if:
            fidelity.parse(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateConfig:
    """How a real engine is measured."""

    out: Path = Path("calibration.json")
    """The file to write; it must not exist."""

    workers: int = 1
    """Engines that run at the same time, as many as the machine is to hold: they share its memory and its cores."""

    steps: Path | None = None
    """Keep the measured steps in this folder, too (JSON lines, a file for each engine); it must not exist."""

    duration_s: float = 120.0
    """Time to spend on all loads together, after loading (s)."""

    extra_engine_args: Path | None = None
    """JSON or YAML file with arguments of vLLM."""

    seed: int = 0
    """Seed of every random choice."""

    def __post_init__(self) -> None:
        """Refuse settings without a meaning."""
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, not {self.workers}")
        if not self.duration_s > 0:
            raise ValueError(f"duration_s must be greater than 0, not {self.duration_s}")
