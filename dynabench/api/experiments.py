"""The commands as functions: each takes the options of its command by name, and returns a result."""

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from dynabench.api.arguments import checked, listed, mapping_of, path_of, texts_of
from dynabench.api.deployment import Deployment, deployment_of
from dynabench.api.notebook import terminal
from dynabench.api.own import is_own_object, named, placed
from dynabench.api.result import AnyResult, PlanResult, RehearsalResult, Result, SweepResult, read_result
from dynabench.api.wording import plain_errors
from dynabench.arm import ClientConfig, Settings
from dynabench.deployment.file import as_plain
from dynabench.experiment.manifest import CALL
from dynabench.experiment.settings import ExperimentConfig, SweepConfig
from dynabench.interrupt import Interrupt, InterruptError
from foundation.errors import UserError
from foundation.own_code import GIVEN, shown
from foundation.settings import settings_of
from foundation.text import instead_of
from workloads import Workload
from workloads.pacing import LoadConfig
from workloads.shape import ShapeConfig

T = TypeVar("T")
AnyDeployment = Deployment | str | Path | None
AnyWorkload = Workload | str | Path | None
Limits = str | Sequence[str]
OF_FILES = ("metrics_like", "format", "columns", "trace_block_size", "router_mode")
"""Options of commands that belong to `Workload.read` here, or have a parameter of their own."""


@plain_errors()
@checked
def simulate(
    workload: AnyWorkload = None,
    deployment: AnyDeployment = None,
    *,
    vary: Mapping[str, Iterable[Any]] | None = None,
    slo: Limits = (),
    repeats: int = 1,
    seed: int = 0,
    out: str | Path | None = None,
    progress: bool | None = None,
    **options: Any,
) -> Result:
    """Compare deployments in virtual time, as `dynabench simulate` does.

        simulate(trace, fleet, vary={"router_mode": ["round-robin", "kv", my_mode]}, slo=["ttft.p99 <= 2s"])

    Ctrl-C returns what is done so far; `result.is_complete` is False then.

    Args:
        workload: a `Workload`, or the path of one (default: a small bundled one).
        deployment: a `Deployment`, or the path of its YAML file.
        vary: by setting, the values to compare: every combination is an arm, and the first is the baseline. Router modes
            and planners may be classes or functions of your own.
        slo: limits on each request or on a run, such as `ttft <= 2s` or `ttft.p99 <= 2s`.
        repeats: runs of each arm, with consecutive seeds.
        seed: the seed of every random choice.
        out: a results folder to write, which must not exist (default: none; `result.save` writes it later).
        progress: whether to show how far it is (default: on a terminal and in a notebook).
        options: any other option of the command by its name, such as `noise_floor=True`, `jobs=1`, `rate_scale=2.0`,
            `concurrency=16`, `max_requests=1000`.

    Raises:
        UserError: a setting, the workload or the deployment is invalid; the message is one line.
    """
    asked = _Asked.of("simulate", workload, deployment, vary, slo, repeats, seed, out, options)
    experiment, shape, load = asked.settings(ExperimentConfig, ShapeConfig, LoadConfig)
    settings = Settings(asked.deployment, shape, load)
    return asked.compared("virtual", experiment, settings, progress)


@plain_errors()
@checked
def run(
    workload: AnyWorkload = None,
    deployment: AnyDeployment = None,
    *,
    url: str | None = None,
    vary: Mapping[str, Iterable[Any]] | None = None,
    slo: Limits = (),
    repeats: int = 1,
    seed: int = 0,
    out: str | Path | None = None,
    progress: bool | None = None,
    **options: Any,
) -> Result:
    """Measure over real HTTP, as `dynabench run` does: a stack on this host, or the server at a URL.

    Args:
        workload: a `Workload`, or the path of one (default: a small bundled one).
        deployment: what is started on this host; not with a URL.
        url: the server to measure instead, such as `http://localhost:8000`.
        vary: by setting, the values to compare; with a URL only settings of the load and the client.
        slo: limits, as for `simulate`.
        repeats: runs of each arm.
        seed: the seed of every random choice.
        out: a results folder to write, which must not exist (default: none).
        progress: whether to show how far it is (default: on a terminal and in a notebook).
        options: any other option of the command by its name, such as `concurrency=16`, `warmup_requests=0`, `api="chat"`.

    Raises:
        UserError: a setting is invalid, the server cannot be reached, or the stack does not start.
    """
    if url is not None and deployment is not None:
        raise UserError("url measures another server, but deployment describes dynabench's own stack; leave one out")
    asked = _Asked.of("run", workload, deployment, vary, slo, repeats, seed, out, {"url": url, **options})
    experiment, shape, load, client = asked.settings(ExperimentConfig, ShapeConfig, LoadConfig, ClientConfig)
    settings = Settings(asked.deployment, shape, load, client)
    return asked.compared("wall", experiment, settings, progress)


@plain_errors()
@checked
def sweep(
    workload: AnyWorkload = None,
    deployment: AnyDeployment = None,
    *,
    vary: Mapping[str, Iterable[Any]] | None = None,
    find: str | None = None,
    slo: Limits = (),
    repeats: int = 1,
    seed: int = 0,
    out: str | Path | None = None,
    progress: bool | None = None,
    **options: Any,
) -> SweepResult:
    """Try every combination of settings in virtual time, or find where the limits stop being met, as `dynabench sweep` does.

        sweep(trace, fleet, vary={"router_mode": ["round-robin", "kv"]}, find="rate_scale", slo=["ttft.p99 <= 2s"])

    Each point is kept in the folder as soon as it is known, so that the same call resumes after Ctrl-C.

    Args:
        workload: a `Workload`, or the path of one.
        deployment: a `Deployment`, or the path of its YAML file.
        vary: by setting, the values to try.
        find: the setting whose highest or lowest value within the limits is searched for, such as `rate_scale` or `workers`.
        slo: limits, as for `simulate`.
        repeats: runs of each point; several give the value that is found an interval.
        seed: the seed of every random choice.
        out: the folder (default: one in `results/` named after the question).
        progress: whether to show how far it is.
        options: any other option of the command by its name, such as `low=0.5, high=8, precision=0.02`.

    Raises:
        UserError: a setting is invalid, or the folder has something else.
    """
    from dynabench.experiment.sweep import run_sweep

    asked = _Asked.of("sweep", workload, deployment, vary, slo, repeats, seed, out, {"find": find, **options})
    config, experiment, shape, load = asked.settings(SweepConfig, ExperimentConfig, ShapeConfig, LoadConfig)
    asked.refuse_to_travel(config.backend)
    settings = Settings(asked.deployment, shape, load)
    with terminal(progress) as console, asked.named():
        return SweepResult(*run_sweep(asked.workload, config, experiment, settings, console=console))


@plain_errors()
@checked
def plan(
    workload: AnyWorkload = None,
    deployment: AnyDeployment = None,
    *,
    slo: Limits,
    vary: Mapping[str, Iterable[Any]] | None = None,
    repeats: int = 1,
    seed: int = 0,
    out: str | Path | None = None,
    progress: bool | None = None,
    **options: Any,
) -> PlanResult:
    """Find the fewest GPUs, or the cheapest, whose layout meets the limits, as `dynabench plan` does.

        plan(trace, db.Deployment(model="meta-llama/Llama-3.1-8B", gpu="h100"), slo=["ttft.p99 <= 2s"], max_gpus=16)

    Args:
        workload: a `Workload`, or the path of one.
        deployment: the model, the GPU and all that is fixed. The number of workers is always chosen. So are GPUs per worker
            and the chunk size, unless the deployment names them (`tensor_parallel_size=2`, `max_num_batched_tokens=2048`).
        slo: limits, as for `simulate`.
        vary: more settings to choose from, by name.
        repeats: runs of each point.
        seed: the seed of every random choice.
        out: the folder (default: one in `results/` named after the question); the same call resumes it.
        progress: whether to show how far it is.
        options: any other option of the command by its name, such as `max_gpus=16`, `tensor_parallel_size=[1, 2]`, `loads=[1, 1.5]`,
            `price=["h100=2.5", "a100=1.4"]`.

    Raises:
        UserError: a setting is invalid, a limit cannot be judged, or the folder has something else.
    """
    from dynabench.capacity.candidates import CHUNK
    from dynabench.capacity.run import run_plan
    from dynabench.capacity.settings import PlanConfig

    options = {name: listed(value) if name == "loads" else value for name, value in options.items()}
    asked = _Asked.of("plan", workload, deployment, vary, slo, repeats, seed, out, options)
    if not (vary and "router_mode" in vary):
        asked.options["router_mode"] = ()
    fixed = asked.deployment
    if len(fixed.pools) > 1:
        raise UserError(
            f"the deployment has {len(fixed.pools)} pools, but a plan chooses them; describe one pool, and vary prefill_workers for "
            "separate prefill and decode workers"
        )
    (pool,) = fixed.pools
    asked.fix("tensor_parallel_size", "tensor_parallel_size", pool.timing.tensor_parallel_size)
    asked.fix("max_num_batched_tokens", chunk := CHUNK[pool.engine_type], getattr(pool.engine_config, chunk))
    config, experiment, shape, load = asked.settings(PlanConfig, ExperimentConfig, ShapeConfig, LoadConfig)
    asked.refuse_to_travel(config.backend)
    single = replace(pool, replicas=1, timing=replace(pool.timing, tensor_parallel_size=1))
    settings = Settings(replace(fixed, pools=(single,)), shape, load)
    with terminal(progress) as console, asked.named():
        return PlanResult(*run_plan(asked.workload, config, experiment, settings, console=console))


@plain_errors()
@checked
def bench(
    url: str | Sequence[str],
    workload: AnyWorkload = None,
    *,
    slo: Limits = (),
    repeats: int = 1,
    seed: int = 0,
    out: str | Path | None = None,
    progress: bool | None = None,
    **options: Any,
) -> SweepResult:
    """Benchmark OpenAI endpoints, as `dynabench bench` does: throughput against latency, the knee, and what holds the limits.

    Args:
        url: an endpoint such as `http://localhost:8000`, or several.
        workload: what is sent (default: generated requests, of `isl` and `osl` tokens).
        slo: limits, as for `simulate`.
        repeats: measurements of each load.
        seed: the seed of every random choice.
        out: the folder (default: a new one in `results/`); the same call continues an interrupted one.
        progress: whether to show how far it is.
        options: any other option of the command by its name, such as `concurrency=[1, 4, 16]`, `rate="1..50"`,
            `duration_s=10`, `isl=512`.

    Raises:
        UserError: an endpoint does not answer, or a setting is invalid.
    """
    from dynabench.benchmark.run import Asked, run_bench
    from dynabench.benchmark.settings import BenchClientConfig, BenchConfig, SentConfig

    options = {name: listed(value) if name in ("concurrency", "rate") else value for name, value in options.items()}
    urls = texts_of("url", url, "http://localhost:8000")
    asked = _Asked.of("bench", workload, None, None, slo, repeats, seed, out, options)
    asked.options["router_mode"] = ()
    config, sent, experiment, client, shape = asked.settings(
        BenchConfig, SentConfig, ExperimentConfig, BenchClientConfig, ShapeConfig
    )
    whole = Asked(
        urls=urls, given=asked.workload, config=config, sent=sent, shape=shape, client=client, experiment=experiment
    )
    with terminal(progress) as console, asked.named():
        return SweepResult(*_beside_a_loop(lambda lent: run_bench(whole, console=console, interrupt=lent)))


@plain_errors()
@checked
def rehearse(
    deployment: AnyDeployment = None,
    workload: AnyWorkload = None,
    *,
    seeds: int | range = 100,
    faults: Literal["none", "light", "medium", "harsh"] = "medium",
    requests: int = 60,
    rate: float = 12.0,
    jobs: int = 0,
    out: str | Path = "rehearsal",
    progress: bool | None = None,
) -> RehearsalResult:
    """Run the live code of a deployment on virtual time, with faults, and check what must always hold, as `dynabench rehearse` does.

        rehearse(db.Deployment(workers=4, router_mode=my_mode), seeds=200)
        rehearse(db.Deployment(workers=4, engine=my_engine))

    The same seed gives the same run.

    Args:
        deployment: a `Deployment`, or the path of its YAML file.
        workload: whose requests are sent (default: generated ones, other ones for each seed).
        seeds: how many seeds, from 0 on; or a range with step 1, such as `range(500, 600)`. Each is a rehearsal of its own.
        faults: how much goes wrong.
        requests: requests of each rehearsal.
        rate: requests per second, of generated requests.
        jobs: rehearsals at once (0: one for each core).
        out: folder for the files that replay what failed; nothing is written if nothing fails.
        progress: whether to show how far it is (default: on a terminal and in a notebook).

    Raises:
        UserError: a setting is invalid, or the deployment has something that cannot run on virtual time.
    """
    from dynabench.rehearsal.all_seeds import run_rehearsal
    from dynabench.rehearsal.settings import RehearseConfig

    if isinstance(seeds, range) and seeds.step != 1:
        raise UserError(f"seeds is {seeds!r}; expected consecutive seeds, such as range(500, 600)")
    numbers = f"{seeds.start}..{seeds.stop}" if isinstance(seeds, range) else str(seeds)
    given = {"seeds": numbers, "faults": faults, "requests": requests, "rate": rate, "jobs": jobs}
    given["out"] = path_of("out", out)
    config = settings_of(RehearseConfig, given)
    described, sent = deployment_of(deployment), _workload(workload)
    with terminal(progress) as console:
        return RehearsalResult(
            _beside_a_loop(lambda lent: run_rehearsal(described, sent, config, console=console, interrupt=lent))
        )


@plain_errors()
def load(*folders: str | Path) -> AnyResult:
    """Read a results folder: of runs, of a sweep, benchmark or plan. Several of one kind are put side by side.

    Raises:
        UserError: one is not a results folder, or they cannot be compared.
    """
    if not folders:
        raise UserError("name a results folder, such as results/x")
    return read_result([path_of("folders", folder) for folder in folders])


class _Asked:
    """What a call asks for."""

    def __init__(
        self,
        call: str,
        workload: Workload | tuple[Path, ...],
        deployment: Deployment,
        options: dict[str, Any],
        varied: frozenset[str],
    ) -> None:
        self.call, self.workload, self.deployment, self.options = call, workload, deployment, options
        self.varied = varied

    @classmethod
    def of(
        cls,
        command: str,
        workload: AnyWorkload,
        deployment: AnyDeployment,
        vary: Mapping[str, Iterable[Any]] | None,
        slo: Limits,
        repeats: int,
        seed: int,
        out: str | Path | None,
        options: Mapping[str, Any],
    ) -> "_Asked":
        if wrong := next((name for name in OF_FILES if name in options), None):
            hint = "vary={'router_mode': [...]}, or the deployment" if wrong == "router_mode" else "Workload.read"
            raise UserError(f"{wrong} is no option of {command}; give it to {hint}")
        fleet = deployment_of(deployment)
        axes = dict(_axis(name, values) for name, values in mapping_of("vary", vary, "{'workers': [2, 4]}").items())
        _check_names(axes)
        modes = axes.pop("router_mode", [fleet.router_mode])
        given: dict[str, Any] = {
            "router_mode": tuple(modes),
            "vary": tuple(f"{name}={','.join(map(_text, values))}" for name, values in axes.items()),
            "slo": texts_of("slo", slo, "ttft.p99 <= 2s"),
            "repeats": repeats,
            "seed": seed,
            "out": None if out is None else path_of("out", out),
        }
        said = {"vary": vary, "slo": slo, "repeats": repeats, "seed": seed, **options}
        shown_options = ", ".join(
            f"{name}={_said(value)}" for name, value in said.items() if value not in (None, (), {})
        )
        call = f"dynabench.{command}(..., {shown_options})"
        return cls(call, _workload(workload), fleet, given | dict(options), frozenset(axes))

    def fix(self, option: str, setting: str, value: Any) -> None:
        """Give a plan the one value of an option that the deployment names, as its `setting`, unless that is varied.

        Raises:
            UserError: the option has another value.
        """
        if not self.deployment.chooses(setting) or self.varied & {option, setting}:
            return
        given = self.options.get(option, value)
        if given not in (value, [value], (value,)):
            raise UserError(f"{option} is {given!r}, but the deployment has {setting} {value!r}; leave one out")
        self.options[option] = (value,)

    def settings(self, *kinds: type) -> list[Any]:
        """Return settings of these kinds; an option belongs to the first that has it.

        Raises:
            UserError: none has it.
        """
        names = {kind: {field.name for field in fields(kind)} for kind in kinds}
        given: dict[type, dict[str, Any]] = {kind: {} for kind in kinds}
        for name, value in self.options.items():
            kind = next((kind for kind in kinds if name in names[kind]), None)
            if kind is None:
                raise UserError(f"{name} is unknown; {instead_of(name, sorted(set().union(*names.values())))}")
            given[kind][name] = value
        for kind in kinds:  # one seed for all
            if "seed" in names[kind]:
                given[kind].setdefault("seed", self.options["seed"])
        return [settings_of(kind, given[kind]) for kind in kinds]

    def compared(
        self, clock: Literal["virtual", "wall"], experiment: ExperimentConfig, settings: Settings, progress: bool | None
    ) -> Result:
        """Run an experiment."""
        from dynabench.experiment.run import run_experiment

        def carry_out(lent: Interrupt | None) -> Result:
            is_kept = experiment.out is not None
            given = clock, self.workload, experiment, settings
            return Result(*run_experiment(*given, console=console, is_kept=is_kept, interrupt=lent))

        with terminal(progress) as console, self.named():
            return _beside_a_loop(carry_out) if clock == "wall" else carry_out(None)

    def named(self) -> "_Call":
        """Let results say what was called."""
        return _Call(self.call)

    def refuse_to_travel(self, backend: str) -> None:
        """Refuse to send objects of the user's own to other hosts.

        Raises:
            UserError: there is one.
        """
        if backend == "local":
            return
        said = repr((self.options["router_mode"], self.options["vary"], as_plain(self.deployment)))
        if mine := [name for path, name in GIVEN.items() if path in said]:
            raise UserError(
                f"{mine[0]} is a Python object, which stays on this host, but backend is {backend}; put it into a file that every "
                "host has, and name that: FILE.py"
            )


class _Call:
    def __init__(self, call: str) -> None:
        self._call = call

    def __enter__(self) -> None:
        self._token = CALL.set(self._call)

    def __exit__(self, *_: object) -> None:
        CALL.reset(self._token)


def _beside_a_loop(call: Callable[[Interrupt | None], T]) -> T:
    """Call what runs an event loop; if this thread has one, as in a notebook, in another thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call(None)
    found: list[T] = []
    failed: list[BaseException] = []

    def carry_out() -> None:
        try:
            found.append(call(interrupt))
        except BaseException as error:  # raised again below
            failed.append(error)
        finally:
            is_over.set()

    is_over = threading.Event()  # a `join` that a signal ends takes the thread for ended
    with Interrupt() as interrupt:
        context = contextvars.copy_context()  # has what was called, for the manifest
        threading.Thread(target=context.run, args=(carry_out,)).start()
        while not is_over.is_set():
            with suppress(InterruptError):
                is_over.wait()
    if failed:
        raise failed[0]
    return found[0]


def _workload(given: AnyWorkload) -> Workload | tuple[Path, ...]:
    match given:
        case None:
            return ()
        case Workload():
            return given
        case str() | Path():
            return (Path(given),)
    raise UserError(
        f"expected a Workload or the path of one, not {type(given).__name__}; a frame becomes one by Workload.from_frame"
    )


def _axis(name: str, values: Any) -> tuple[str, list[Any]]:
    """Return a setting and its values, with names for objects of the user's own."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise UserError(f"vary {name!r} is {values!r}; expected a list of values")
    values = list(values)
    place = placed(name, values)
    return place, [named(value, place) for value in values]


def _check_names(axes: Mapping[str, Sequence[Any]]) -> None:
    """Refuse two objects with one name: results could not tell them apart."""
    for values in axes.values():
        names = [shown(value) for value in values if isinstance(value, str)]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UserError(f"{twice} is given twice; give one of them another name (its __name__)")


def _text(value: Any) -> str:
    """Return a value as `--vary` takes it."""
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case str() if "," in value:
            return f"[{value}]"
    return str(value)


def _said(value: Any) -> str:
    """Return how a call shows a value."""
    match value:
        case Mapping():
            return "{" + ", ".join(f"{name!r}: {_said(its)}" for name, its in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(_said, value)) + "]"
    return getattr(value, "__name__", "...") if is_own_object(value) else repr(value)
