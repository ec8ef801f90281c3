"""An experiment: a workload, arms that differ in router mode, repeats, a results folder."""

import datetime
import platform
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dynabench.virtual import simulate
from mocker import EngineConfig, scheduler
from reports.records import ArmResult
from serving.engine import ENGINES
from serving.engine_config import read_arguments
from serving.model_card import model_name
from serving.router import ROUTER_MODES, RouterConfig
from workloads import Workload, WorkloadError, mooncake
from workloads.shape import ShapeConfig, shape

BUNDLED = Path(mooncake.__file__).parent / "bundled" / "chat.jsonl"


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

    trace_block_size: int = mooncake.BLOCK_SIZE
    """Tokens each hash id of the workload stands for."""

    out: Path | None = None
    """Results folder (default: results/ and the time)."""

    def __post_init__(self) -> None:
        """Refuse settings without a meaning."""
        for mode in self.router_mode:
            if mode not in ROUTER_MODES:
                raise ValueError(f"router_mode {mode!r} is unknown; expected one of {', '.join(ROUTER_MODES)}")
        if not self.router_mode:
            raise ValueError(f"router_mode is missing; expected one of {', '.join(ROUTER_MODES)}")
        if len(set(self.router_mode)) != len(self.router_mode):
            raise ValueError(f"router_mode is given twice: {', '.join(self.router_mode)}")
        for name in ("workers", "repeats", "trace_block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveConfig:
    """What `dynabench run` measures, and how it talks to it."""

    url: str | None = None
    """Measure this OpenAI endpoint (http://host:port) instead of a stack of our own."""

    engine: Literal["mocker", "mistralrs", "llamacpp", "vllm", "sglang", "trtllm"] = "mocker"
    """Engine of our own stack; all but the mocker run the model that --model names."""

    model: str = "mock"
    """Name under which the model is served; for an --engine other than the mocker: a folder, GGUF file or Hugging Face id."""

    context_length: int | None = None
    """Tokens a sequence may reach in an --engine other than the mocker (default: the model's)."""

    extra_engine_args: Path | None = None
    """JSON or YAML file with arguments of an --engine other than the mocker."""

    prompts: Literal["tokens", "text"] = "tokens"
    """Send token ids, or about as many words (for endpoints that take only text)."""

    http_port: int = 0
    """Port of our own frontend on 127.0.0.1 (0: any that is free)."""

    http_workers: int = 1
    """Processes of our own frontend."""

    migration_limit: int = 3
    """How often a request may go on at another worker when its own is lost."""

    etcd_endpoints: str = ""
    """Let our own stack find itself over these etcd servers instead of a folder."""

    nats_server: str = ""
    """Let our own stack talk over this NATS server instead of sockets."""

    timeout_s: float = 600.0
    """Time after which a request counts as failed (s)."""

    def __post_init__(self) -> None:
        """Refuse settings without a meaning."""
        if not 0 <= self.http_port <= 65535:
            raise ValueError(f"http_port must be from 0 to 65535, not {self.http_port}")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, not {self.url!r}")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be greater than 0, not {self.timeout_s}")
        if self.engine != "mocker" and self.url is not None:
            raise ValueError(f"--engine {self.engine} is for a stack of our own; --url measures another")
        if self.engine != "mocker" and self.model == "mock":
            raise ValueError(f"--engine {self.engine} needs --model: a folder, a GGUF file or a Hugging Face id")
        for name in ("context_length", "extra_engine_args"):
            if self.engine == "mocker" and getattr(self, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} is for an --engine other than the mocker")


def load_workload(path: Path | None, trace_block_size: int, config: ShapeConfig, seed: int) -> Workload:
    """Read a workload (none: the bundled one) and reshape it.

    Raises:
        WorkloadError: it cannot be read, or nothing is left of it.
    """
    source = path or BUNDLED
    requests = list(mooncake.read(source, block_size=trace_block_size))
    if not requests:
        raise WorkloadError(f"{source}: holds no request")
    return shape(Workload(source.name, trace_block_size, requests), config, seed=seed)


def run_experiment(
    clock: Literal["virtual", "wall"],
    workload: Workload,
    experiment: ExperimentConfig,
    engine: EngineConfig,
    router: RouterConfig,
    live: LiveConfig | None,
    *,
    path: Path | None,
    shape_config: ShapeConfig,
    console: Console,
) -> tuple[Path, dict[str, Any]]:
    """Run all arms and write the results folder; return it and the summary.

    Arms alternate in direction from repeat to repeat (ABBA), so that drift favours none.
    """
    from reports import folder

    out = experiment.out or Path("results") / f"{_now():%Y%m%d-%H%M%S}-{'simulate' if clock == 'virtual' else 'run'}"
    folder.check_new(out)
    runs: list[ArmResult] = []
    arms = ("endpoint",) if live is not None and live.url else experiment.router_mode
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,}/{task.total:,} requests"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        for repeat in range(experiment.repeats):
            modes = arms if repeat % 2 == 0 else arms[::-1]
            for mode in modes:
                name = mode if experiment.repeats == 1 else f"{mode} ({repeat + 1}/{experiment.repeats})"
                bar = progress.add_task(name, total=len(workload))
                on_progress = _throttled(progress, bar, len(workload)) if console.is_terminal else None
                arm = {
                    "mode": mode,
                    "engine": engine,
                    "router": router,
                    "num_workers": experiment.workers,
                    "seed": experiment.seed + repeat,
                    "on_progress": on_progress,
                }
                run = simulate(workload, **arm) if clock == "virtual" else _live(workload, live or LiveConfig(), arm)  # type: ignore[arg-type]
                run.repeat = repeat
                runs.append(run)
                if not run.is_complete:
                    break
            else:
                continue
            break
    if not any(len(run.columns["request"]) for run in runs):
        raise WorkloadError("interrupted before any request was answered; nothing was written")
    runs = [run for run in runs if len(run.columns["request"])]
    order = {mode: place for place, mode in enumerate(arms)}
    runs.sort(key=lambda run: (order[run.arm], run.repeat))
    manifest = {
        "title": f"{workload.name}: {' vs '.join(dict.fromkeys(run.arm for run in runs))}",
        "subtitle": _subtitle(clock, workload, experiment, live),
        "command": shlex.join(["dynabench", *sys.argv[1:]]),
        "clock": clock,
        "created": _now().isoformat(timespec="seconds"),
        "workload": {
            "file": str(path) if path else "bundled",
            "name": workload.name,
            "requests": len(workload),
            "notes": list(workload.notes),
        },
        "experiment": asdict(experiment) | {"out": str(out)},
        "shape": asdict(shape_config),
        "engine": asdict(engine) if live is None or live.engine == "mocker" else real_engine(live),
        "router": asdict(router),
        "live": asdict(live) | {"extra_engine_args": str(live.extra_engine_args or "") or None} if live else None,
        "versions": {name: metadata.version(name) for name in ("dynabench", "numpy", "simpy", "aiohttp", "fastapi")}
        | {"python": platform.python_version(), "cores": "compiled" if is_compiled() else "interpreted"},
        "runs": [folder.run_facts(run) for run in runs],
    }
    return out, folder.write(out, manifest, runs)


def is_compiled() -> bool:
    """Tell whether the engine core was compiled (DYNABENCH_COMPILE=1 when it was installed)."""
    return not str(scheduler.__file__).endswith(".py")


def _live(workload: Workload, live: LiveConfig, arm: dict[str, Any]) -> ArmResult:
    from dynabench.live import run_live

    return run_live(workload, live=live, **arm)


def real_engine(live: LiveConfig) -> dict[str, Any]:
    """Return what tells of an engine that is not simulated: its name, its version here, its model, its arguments."""
    package = ENGINES[live.engine].package
    distributions = metadata.packages_distributions().get(package, [])
    version = metadata.version(distributions[0]) if distributions else "of unknown version"
    arguments = {} if live.extra_engine_args is None else read_arguments(live.extra_engine_args)
    return {"name": live.engine, "version": version, "model": model_name(live.model), "arguments": arguments}


def _throttled(progress: Progress, bar: Any, total: int) -> Callable[[int], None]:
    stride = max(total // 200, 1)

    def on_progress(done: int) -> None:
        if done % stride == 0 or done >= total:
            progress.update(bar, completed=done)

    return on_progress


def _subtitle(clock: str, workload: Workload, experiment: ExperimentConfig, live: LiveConfig | None) -> str:
    how = "in virtual time" if clock == "virtual" else "over HTTP on the wall clock"
    notes = f"; {'; '.join(workload.notes)}" if workload.notes else ""
    if live is not None and live.url:
        what = live.url
    elif live is not None and live.engine != "mocker":
        facts = real_engine(live)
        what = f"{experiment.workers} {facts['name']} {facts['version']} workers with {facts['model']}"
    else:
        what = f"{experiment.workers} simulated engines"
    return (
        f"{len(workload):,} requests on {what}, {how}; "
        f"{experiment.repeats} run(s) per router mode, seed {experiment.seed}{notes}"
    )


def _now() -> datetime.datetime:
    return datetime.datetime.now().astimezone()
