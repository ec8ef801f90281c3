"""Commands that run experiments: simulate, run and sweep."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from dynabench.arm import ClientConfig, Settings
from dynabench.cli.flags import LiveFlags, VirtualFlags
from dynabench.cli.gates import Gate, GateConfig, SweepGate, SweepGateConfig
from dynabench.cli.groups import (
    FLAT,
    Client,
    DeploymentFile,
    Experiment,
    Load,
    Output,
    OutputConfig,
    RunsOutput,
    RunsOutputConfig,
    Shape,
    plain_errors,
)
from dynabench.deployment.description import Deployment
from dynabench.experiment.axes import setting_of
from dynabench.experiment.settings import ExperimentConfig, SweepConfig
from foundation.errors import UserError
from foundation.exit_codes import INTERRUPTED
from serving.cli.command_line import flat
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
    flags: Annotated[VirtualFlags, FLAT] = VirtualFlags(),  # noqa: B008
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
        flags: What describes the deployment.
    """
    with plain_errors():
        deployed = flags.deployment(deployment, _varied(experiment))
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
    flags: Annotated[LiveFlags, FLAT] = LiveFlags(),  # noqa: B008
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
        flags: What describes the deployment.
    """
    with plain_errors():
        if client.url is not None:
            if deployment is not None:
                raise UserError(
                    f"--deployment {deployment} describes dynabench's own stack, but --url measures another server"
                )
            flags.refuse_with_url(experiment.router_mode)
        deployed = flags.deployment(deployment, _varied(experiment))
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
    flags: Annotated[VirtualFlags, FLAT] = VirtualFlags(),  # noqa: B008
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
        flags: What describes the deployment.
    """
    from dynabench.api.result import SweepResult
    from dynabench.cli.results import finish_sweep
    from dynabench.experiment.sweep import run_sweep

    console = output.terminal()
    with plain_errors():
        deployed = flags.deployment(deployment, _varied(experiment))
        experiment, settings = _with_modes(experiment, deployment, deployed), Settings(deployed, shape, load)
        gates = gate_config.gates()
        result = SweepResult(*run_sweep(workload, config, experiment, settings, console=console, gates=gates))
    code = finish_sweep(result, gate_config, output)
    return code if result.is_complete else INTERRUPTED


def _varied(experiment: ExperimentConfig) -> list[str]:
    return [setting_of(text) for text in experiment.vary]


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
    from dynabench.api.result import Result
    from dynabench.cli.results import finish_runs
    from dynabench.experiment.run import run_experiment

    with plain_errors():
        gates, console = gate_config.gates(), output.terminal()
        result = Result(*run_experiment(clock, files, experiment, settings, console=console, gates=gates))
    code = finish_runs(result, gate_config, output, metrics_like=experiment.metrics_like)
    return code if result.is_complete else INTERRUPTED
