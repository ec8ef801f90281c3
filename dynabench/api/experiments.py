"""The commands as functions: each takes the options of its command by name, and returns a result."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from dynabench.api.arguments import checked, listed, path_of, texts_of
from dynabench.api.beside_a_loop import beside_a_loop
from dynabench.api.command_call import AnyDeployment, AnyWorkload, CommandCall, Limits, workload_of
from dynabench.api.deployment import deployment_of
from dynabench.api.notebook import terminal
from dynabench.api.rehearsal_result import RehearsalResult
from dynabench.api.result import AnyResult, PlanResult, Result, SweepResult, read_result
from dynabench.api.wording import plain_errors
from dynabench.arm import ClientConfig, Settings
from dynabench.experiment.settings import ExperimentConfig, SweepConfig
from foundation.errors import UserError
from foundation.settings import settings_of
from workloads.pacing import LoadConfig
from workloads.shape import ShapeConfig


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
    call = CommandCall("simulate", workload, deployment, vary, slo, repeats, seed, out, options)
    return call.compared("virtual", progress, ShapeConfig, LoadConfig)


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
    call = CommandCall("run", workload, deployment, vary, slo, repeats, seed, out, {"url": url, **options})
    return call.compared("wall", progress, ShapeConfig, LoadConfig, ClientConfig)


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

    call = CommandCall("sweep", workload, deployment, vary, slo, repeats, seed, out, {"find": find, **options})
    config, experiment, *others = call.settings(SweepConfig, ExperimentConfig, ShapeConfig, LoadConfig)
    call.refuse_to_travel(config.backend)
    with call.shown(progress) as console:
        settings = Settings(call.deployment, *others)
        return SweepResult(*run_sweep(call.workload, config, experiment, settings, console=console))


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
    call = CommandCall("plan", workload, deployment, vary, slo, repeats, seed, out, options)
    if not (vary and "router_mode" in vary):
        call.options["router_mode"] = ()
    fixed = call.deployment
    if len(fixed.pools) > 1:
        raise UserError(
            f"the deployment has {len(fixed.pools)} pools, but a plan chooses them; describe one pool, and vary prefill_workers for "
            "separate prefill and decode workers"
        )
    (pool,) = fixed.pools
    call.fix("tensor_parallel_size", "tensor_parallel_size", pool.timing.tensor_parallel_size)
    call.fix("max_num_batched_tokens", chunk := CHUNK[pool.engine_type], getattr(pool.engine_config, chunk))
    config, experiment, shape, load = call.settings(PlanConfig, ExperimentConfig, ShapeConfig, LoadConfig)
    call.refuse_to_travel(config.backend)
    single = replace(pool, replicas=1, timing=replace(pool.timing, tensor_parallel_size=1))
    settings = Settings(replace(fixed, pools=(single,)), shape, load)
    with call.shown(progress) as console:
        return PlanResult(*run_plan(call.workload, config, experiment, settings, console=console))


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
    call = CommandCall("bench", workload, None, None, slo, repeats, seed, out, options)
    call.options["router_mode"] = ()
    config, sent, experiment, client, shape = call.settings(
        BenchConfig, SentConfig, ExperimentConfig, BenchClientConfig, ShapeConfig
    )
    asked = Asked(
        urls=urls, given=call.workload, config=config, sent=sent, shape=shape, client=client, experiment=experiment
    )
    with call.shown(progress) as console:
        return SweepResult(*beside_a_loop(lambda lent: run_bench(asked, console=console, interrupt=lent)))


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
    config = settings_of(RehearseConfig, given | {"out": path_of("out", out)})
    described, sent = deployment_of(deployment), workload_of(workload)
    with terminal(progress) as console:
        return RehearsalResult(
            beside_a_loop(lambda lent: run_rehearsal(described, sent, config, console=console, interrupt=lent))
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
