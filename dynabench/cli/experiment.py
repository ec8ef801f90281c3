"""Commands that run experiments: simulate, run and sweep."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from dynabench.cli.gates import Gate, GateConfig, SweepGate, SweepGateConfig
from dynabench.cli.groups import (
    VARY,
    Answers,
    Client,
    DeploymentFile,
    Disaggregation,
    Engine,
    Experiment,
    Fleet,
    Formats,
    KvStore,
    KvTransfer,
    LivePool,
    Load,
    MeasuredFrontend,
    MeasuredRouter,
    Output,
    OutputConfig,
    Overheads,
    Planner,
    Pool,
    RunsOutput,
    RunsOutputConfig,
    Runtime,
    Shape,
    Timing,
    Transfers,
    plain_errors,
    refuse_beside,
    refuse_with_url,
    refuse_without_roles,
)
from dynabench.deployment.description import Deployment
from dynabench.deployment.file import read
from dynabench.deployment.flags import (
    LivePoolConfig,
    MeasuredFrontendConfig,
    MeasuredRouterConfig,
    PoolConfig,
    live_pools,
    simulated_pools,
)
from dynabench.deployment.fleet import FleetConfig
from dynabench.deployment.kv_store import KvStoreConfig
from dynabench.deployment.overhead import OverheadConfig
from dynabench.experiment.axes import setting_of
from dynabench.experiment.settings import ExperimentConfig, SweepConfig
from dynabench.plan import ClientConfig, Settings
from foundation.errors import UserError
from foundation.exit_codes import INTERRUPTED
from mocker import EngineConfig
from mocker.network.config import TransferConfig
from mocker.timing.config import TimingConfig
from serving.cli.command_line import flat
from serving.engines.mock.config import AnswerConfig
from serving.life import DisaggregationConfig
from serving.planner import PlannerConfig
from serving.transfer.config import TransferRunConfig
from serving.worker.config import ModelConfig
from workloads.pacing import LoadConfig
from workloads.shape import ShapeConfig

DEFAULT_MODES = ("round-robin", "kv")


def simulate(
    workload: tuple[Path, ...] = (),
    /,
    *,
    deployment: DeploymentFile = None,
    gate_config: Gate = GateConfig(),  # noqa: B008 (frozen)
    experiment: Experiment = ExperimentConfig(),  # noqa: B008
    output: RunsOutput = RunsOutputConfig(),  # noqa: B008
    shape: Shape = ShapeConfig(),  # noqa: B008
    load: Load = LoadConfig(),  # noqa: B008
    pool: Pool | None = None,
    router: MeasuredRouter | None = None,
    engine: Engine | None = None,
    timing: Timing | None = None,
    overhead: Overheads | None = None,
    disaggregation: Disaggregation | None = None,
    transfer: Transfers | None = None,
    kv_store: KvStore | None = None,
    fleet: Fleet | None = None,
    planner: Planner | None = None,
) -> int:
    """Compare router modes, or any other settings, in virtual time.

    Exit code 1: --fail-if applies, or a run is not valid; the report says why.

    Args:
        workload: Files or a folder that form one workload (see `dynabench workload formats`); default: a small bundled one.
        deployment: YAML file that describes the deployment, instead of flags: pools, and their settings by name.
        gate_config: When to exit with 1.
        experiment: What to compare.
        output: What to print.
        shape: What to change about the workload.
        load: How the workload is sent.
        pool: How many workers there are, and whether some only prefill and some only decode.
        router: Settings of the router.
        engine: Settings of each engine's scheduler.
        timing: How long the engines' steps take.
        overhead: Delays between a client and the engines.
        disaggregation: How a request is handed from prefill to decode workers.
        transfer: Links that carry KV between workers, and between them and a store.
        kv_store: A store of KV that all workers share.
        fleet: How the number of workers changes.
        planner: What decides how many workers each pool has.
    """
    with plain_errors():
        deployed = _simulated(
            deployment,
            experiment,
            pool,
            router,
            engine,
            timing,
            overhead,
            disaggregation,
            transfer,
            kv_store,
            fleet,
            planner,
        )
    settings = Settings(deployed, shape, load)
    return _compare("virtual", workload, _with_modes(experiment, deployment, deployed), settings, gate_config, output)


def run(
    workload: tuple[Path, ...] = (),
    /,
    *,
    deployment: DeploymentFile = None,
    gate_config: Gate = GateConfig(),  # noqa: B008 (frozen)
    experiment: Experiment = ExperimentConfig(),  # noqa: B008
    output: RunsOutput = RunsOutputConfig(),  # noqa: B008
    shape: Shape = ShapeConfig(),  # noqa: B008
    load: Load = LoadConfig(),  # noqa: B008
    client: Client = ClientConfig(),  # noqa: B008
    pool: LivePool | None = None,
    router: MeasuredRouter | None = None,
    frontend: MeasuredFrontend | None = None,
    runtime: Runtime | None = None,
    engine: Engine | None = None,
    timing: Timing | None = None,
    answers: Answers | None = None,
    formats: Formats | None = None,
    disaggregation: Disaggregation | None = None,
    kv_transfer: KvTransfer | None = None,
    kv_store: KvStore | None = None,
    planner: Planner | None = None,
) -> int:
    """Compare router modes, or any other settings, over real HTTP: a frontend, a router and workers on this host.

    Exit code 1: --fail-if applies, or a run is not valid, for example because too many requests failed; the report says why.

    Args:
        workload: Files or a folder that form one workload (see `dynabench workload formats`); default: a small bundled one.
        deployment: YAML file that describes the deployment, instead of flags: pools, and their settings by name.
        gate_config: When to exit with 1.
        experiment: What to compare.
        output: What to print.
        shape: What to change about the workload.
        load: How the workload is sent.
        client: How requests are sent and measured.
        pool: The workers.
        router: Settings of the router.
        frontend: Settings of the frontend.
        runtime: How the processes find and reach each other (default: in their own folder).
        engine: Settings of each simulated engine's scheduler.
        timing: How long the steps of simulated engines take.
        answers: What simulated engines answer.
        formats: How engines write calls of tools and reasoning.
        disaggregation: How a request is handed from prefill to decode workers.
        kv_transfer: How KV gets from simulated prefill to decode workers, and where it is stored.
        kv_store: A store of KV that all workers share.
        planner: What decides how many workers each pool has.
    """
    with plain_errors():
        if deployment is not None:
            refuse_beside(
                deployment,
                pool,
                router,
                frontend,
                runtime,
                engine,
                timing,
                answers,
                formats,
                disaggregation,
                kv_transfer,
                kv_store,
                planner,
                hint=VARY,
            )
            if client.url is not None:
                raise UserError(
                    f"--deployment {deployment} describes dynabench's own stack, but --url measures another server"
                )
            deployed = read(deployment, is_measured=True)
        else:
            pool = pool or LivePoolConfig()
            if client.url is not None:
                refuse_with_url(
                    pool, experiment, router, answers, formats, disaggregation, kv_transfer, kv_store, planner
                )
            varied = [setting_of(text) for text in experiment.vary]
            deployed = Deployment(
                pools=live_pools(
                    pool,
                    engine or EngineConfig(),
                    timing or TimingConfig(),
                    varied,
                    answers=answers or AnswerConfig(),
                    formats=formats or ModelConfig(),
                ),
                gpus=pool.gpus,
                router=router or MeasuredRouterConfig(),
                frontend=frontend or MeasuredFrontendConfig(),
                runtime=runtime,
                disaggregation=disaggregation or DisaggregationConfig(),
                kv_transfer=kv_transfer or TransferRunConfig(),
                kv_store=kv_store or KvStoreConfig(),
                planner=planner or PlannerConfig(),
            )
            refuse_without_roles(deployed)
    settings = Settings(deployed, shape, load, client)
    return _compare("wall", workload, _with_modes(experiment, deployment, deployed), settings, gate_config, output)


def sweep(
    workload: tuple[Path, ...] = (),
    /,
    *,
    deployment: DeploymentFile = None,
    gate_config: SweepGate = SweepGateConfig(),  # noqa: B008 (frozen)
    config: Annotated[SweepConfig, flat("Sweep", 0)] = SweepConfig(),  # noqa: B008
    experiment: Experiment = ExperimentConfig(),  # noqa: B008
    output: Output = OutputConfig(),  # noqa: B008
    shape: Shape = ShapeConfig(),  # noqa: B008
    load: Load = LoadConfig(),  # noqa: B008
    pool: Pool | None = None,
    router: MeasuredRouter | None = None,
    engine: Engine | None = None,
    timing: Timing | None = None,
    overhead: Overheads | None = None,
    disaggregation: Disaggregation | None = None,
    transfer: Transfers | None = None,
    kv_store: KvStore | None = None,
    fleet: Fleet | None = None,
    planner: Planner | None = None,
) -> int:
    """Try every combination of settings in virtual time, or find the highest rate that meets the limits.

    Exit code 1: --fail-if applies to a point.

    Args:
        workload: Files or a folder that form one workload (see `dynabench workload formats`); default: a small bundled one.
        deployment: YAML file that describes the deployment, instead of flags: pools, and their settings by name.
        gate_config: When to exit with 1.
        config: How to run the sweep or search.
        experiment: What to vary (--router-mode, --vary) and the limits (--slo, --slo-preset).
        output: What to print.
        shape: What to change about the workload.
        load: How the workload is sent.
        pool: How many workers there are, and whether some only prefill and some only decode.
        router: Settings of the router.
        engine: Settings of each engine's scheduler.
        timing: How long the engines' steps take.
        overhead: Delays between a client and the engines.
        disaggregation: How a request is handed from prefill to decode workers.
        transfer: Links that carry KV between workers, and between them and a store.
        kv_store: A store of KV that all workers share.
        fleet: How the number of workers changes.
        planner: What decides how many workers each pool has.
    """
    from dynabench.cli.results import finish_sweep
    from dynabench.experiment.sweep import run_sweep

    console = output.terminal()
    with plain_errors():
        deployed = _simulated(
            deployment,
            experiment,
            pool,
            router,
            engine,
            timing,
            overhead,
            disaggregation,
            transfer,
            kv_store,
            fleet,
            planner,
        )
        experiment, settings = _with_modes(experiment, deployment, deployed), Settings(deployed, shape, load)
        gates = gate_config.gates()
        out, manifest, summary = run_sweep(workload, config, experiment, settings, console=console, gates=gates)
    content = json.loads((out / "sweep.json").read_text())
    code = finish_sweep(manifest, summary, gate_config, output, out, content)
    return code if summary.is_complete else INTERRUPTED


def _simulated(
    file: Path | None,
    experiment: ExperimentConfig,
    pool: PoolConfig | None,
    router: MeasuredRouterConfig | None,
    engine: EngineConfig | None,
    timing: TimingConfig | None,
    overhead: OverheadConfig | None,
    disaggregation: DisaggregationConfig | None,
    transfer: TransferConfig | None,
    kv_store: KvStoreConfig | None,
    fleet: FleetConfig | None,
    planner: PlannerConfig | None,
) -> Deployment:
    """Return the deployment to simulate, from a file or from flags."""
    if file is not None:
        refuse_beside(
            file,
            pool,
            router,
            engine,
            timing,
            overhead,
            disaggregation,
            transfer,
            kv_store,
            fleet,
            planner,
            hint=VARY,
        )
        return read(file, is_measured=True)
    pool = pool or PoolConfig()
    varied = [setting_of(text) for text in experiment.vary]
    deployed = Deployment(
        pools=simulated_pools(pool, engine or EngineConfig(), timing or TimingConfig(), varied),
        gpus=pool.gpus,
        router=router or MeasuredRouterConfig(),
        overhead=overhead or OverheadConfig(),
        disaggregation=disaggregation or DisaggregationConfig(),
        transfer=transfer or TransferConfig(),
        kv_store=kv_store or KvStoreConfig(),
        fleet=fleet or FleetConfig(),
        planner=planner or PlannerConfig(),
    )
    refuse_without_roles(deployed)
    return deployed


def _with_modes(experiment: ExperimentConfig, file: Path | None, deployment: Deployment) -> ExperimentConfig:
    """Fill in the router modes to compare; a deployment file names its own."""
    if experiment.router_mode:
        return experiment
    return replace(experiment, router_mode=DEFAULT_MODES if file is None else (deployment.router_mode,))


def _compare(
    clock: Literal["virtual", "wall"],
    files: tuple[Path, ...],
    experiment: ExperimentConfig,
    settings: Settings,
    gate_config: GateConfig,
    output: RunsOutputConfig,
) -> int:
    from dynabench.cli.results import finish_runs
    from dynabench.experiment.run import run_experiment

    with plain_errors():
        out, manifest, summary = run_experiment(
            clock, files, experiment, settings, console=output.terminal(), gates=gate_config.gates()
        )
    code = finish_runs(manifest, summary, gate_config, output, out, metrics_like=experiment.metrics_like)
    return code if summary.is_complete else INTERRUPTED
