"""`dynabench plan`: how many GPUs, and in which layout."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from dynabench.api.text import print_plan
from dynabench.arm import Settings
from dynabench.capacity.settings import PlanConfig
from dynabench.cli.flags import EngineFlags, sections
from dynabench.cli.gates import PlanGate, PlanGateConfig, check_of_plan, finish, gates_as_json, print_results
from dynabench.cli.groups import (
    FLAT,
    Disaggregation,
    Experiment,
    KvStore,
    Load,
    MeasuredRouter,
    Output,
    OutputConfig,
    Overheads,
    Shape,
    Transfers,
    plain_errors,
)
from dynabench.deployment.description import Deployment
from dynabench.deployment.flags import MeasuredRouterConfig
from dynabench.experiment.axes import setting_of
from dynabench.experiment.settings import ExperimentConfig
from foundation.errors import UserError
from foundation.exit_codes import INTERRUPTED
from mocker import EngineConfig, SglangConfig, TrtllmConfig
from mocker.timing.config import TimingConfig
from reports.capacity.answer import PlanAnswer
from reports.gate import of_plan
from serving.cli.command_line import flat
from workloads.pacing import LoadConfig
from workloads.shape import ShapeConfig

NOT_CHOSEN = Parameter(
    parse="^(?!(kv_role|disaggregation_mode|server_role|max_num_batched_tokens|chunked_prefill_size|max_num_tokens"
    r"|tensor_parallel_size)$)"
)
"""Leaves out the flags of settings that the plan chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFlags(EngineFlags):
    """Flags of the deployments that are tried; the plan looks for their pools."""

    router: MeasuredRouter | None = None
    engine: Annotated[EngineConfig, NOT_CHOSEN, flat("Simulated engine", 6)] | None = None
    sglang: Annotated[SglangConfig, NOT_CHOSEN, flat("Simulated engine: --engine-type sglang", 6)] | None = None
    trtllm: Annotated[TrtllmConfig, NOT_CHOSEN, flat("Simulated engine: --engine-type trtllm", 6)] | None = None
    timing: Annotated[TimingConfig, NOT_CHOSEN, flat("Simulated engine", 6)] | None = None
    overhead: Overheads | None = None
    disaggregation: Disaggregation | None = None
    transfer: Transfers | None = None
    kv_store: KvStore | None = None

    def described(self, varied: Collection[str]) -> Deployment:
        """Return the deployment that they describe, whose settings in `varied` the plan chooses."""
        return Deployment(pools=(self.worker(varied),), **{"router": MeasuredRouterConfig()} | sections(self))


def plan(
    workload: tuple[Path, ...] = (),
    /,
    *,
    gate_config: PlanGate = PlanGateConfig(),  # noqa: B008 (frozen)
    config: Annotated[PlanConfig, flat("Plan", 0)] = PlanConfig(),  # noqa: B008
    experiment: Experiment = ExperimentConfig(),  # noqa: B008
    shape: Shape = ShapeConfig(),  # noqa: B008
    load: Load = LoadConfig(),  # noqa: B008
    output: Output = OutputConfig(),  # noqa: B008
    flags: Annotated[PlannedFlags, FLAT] = PlannedFlags(),
) -> int:
    """Find the fewest GPUs, or the cheapest, whose layout meets the limits (--slo): workers, tensor parallelism, chunk size.

    Settings given as flags are fixed, and those in --vary are chosen; --vary prefill_workers=1..3 also tries separate prefill and
    decode workers.

    Exit code 1: no layout meets the limits, or --fail-if applies.

    Args:
        workload: Files or a folder that form one workload (see `dynabench workload formats`); default: a small bundled one.
        gate_config: When to exit with 1.
        config: What to search for.
        experiment: The limits (--slo, --slo-preset), and what to choose from (--vary, --router-mode).
        shape: What to change about the workload.
        load: How the workload is sent.
        output: What to print.
        flags: What describes the deployment, apart from its pools.
    """
    from dynabench.capacity.run import run_plan

    console = output.terminal()

    def show(out: Path, answer: PlanAnswer) -> None:
        found = of_plan(answer, gates)
        print_plan(answer, console)
        print_results(found, console)
        plain = msgspec.json.decode(msgspec.json.encode(answer))  # infinite values are null, as in plan.json
        output.document(out, plain | gates_as_json(found))

    with plain_errors():
        gates = gate_config.gates()
        if (cost := next((gate for gate in gates if gate.metric == "cost"), None)) and not config.price:
            raise UserError(f"fail_if '{cost}' needs the price of a GPU; use --price, or limit gpus")
        settings = Settings(flags.described({setting_of(text) for text in experiment.vary}), shape, load)
        out, answer = run_plan(workload, config, experiment, settings, console=console, show=show)
    console.verbatim(f"report: {out / 'report.html'}")
    check = check_of_plan(answer)
    wall_s = {check.arm: answer.wall_s}
    code = finish(gate_config, answer.title, [check], of_plan(answer, gates), wall_s=wall_s, console=console)
    return code if answer.is_complete else INTERRUPTED
