"""`dynabench plan`: how many GPUs, and in which layout."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec

from dynabench.capacity.settings import PlanConfig, PlannedEngineConfig, PlannedTimingConfig
from dynabench.cli.gates import PlanGate, PlanGateConfig, as_json, check_of_plan, finish, print_results
from dynabench.cli.groups import (
    WITHOUT_ROLE,
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
from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.flags import MeasuredRouterConfig
from dynabench.deployment.kv_store import KvStoreConfig
from dynabench.deployment.overhead import OverheadConfig
from dynabench.experiment.settings import ExperimentConfig
from dynabench.plan import Settings
from dynabench.terminal import Terminal
from foundation.errors import UserError
from foundation.exit_codes import INTERRUPTED
from mocker.network.config import TransferConfig
from reports.capacity import answer as capacity
from reports.capacity.answer import Answer
from reports.gate import of_plan
from reports.verdicts.headline import qualified, understood
from serving.cli.command_line import flat
from serving.life import DisaggregationConfig
from workloads.pacing import LoadConfig
from workloads.shape import ShapeConfig

REASONS = 4
"""The most reasons for impossible layouts that are printed."""


def plan(
    workload: tuple[Path, ...] = (),
    /,
    *,
    gate_config: PlanGate = PlanGateConfig(),  # noqa: B008 (frozen)
    config: Annotated[PlanConfig, flat("Plan", 0)] = PlanConfig(),  # noqa: B008
    experiment: Experiment = ExperimentConfig(),  # noqa: B008
    shape: Shape = ShapeConfig(),  # noqa: B008
    load: Load = LoadConfig(),  # noqa: B008
    router: MeasuredRouter | None = None,
    engine: Annotated[PlannedEngineConfig, WITHOUT_ROLE, flat("Simulated engine", 6)] | None = None,
    timing: Annotated[PlannedTimingConfig, flat("Simulated engine", 6)] | None = None,
    overhead: Overheads | None = None,
    output: Output = OutputConfig(),  # noqa: B008
    disaggregation: Disaggregation | None = None,
    transfer: Transfers | None = None,
    kv_store: KvStore | None = None,
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
        router: Settings of the router.
        engine: Settings of each engine's scheduler.
        timing: The model and its GPU.
        overhead: Delays between a client and the engines.
        output: What to print.
        disaggregation: How a request is handed from prefill to decode workers.
        transfer: Links that carry KV between workers, and between them and a store.
        kv_store: A store of KV that all workers share.
    """
    from dynabench.capacity.run import run_plan

    console = output.terminal()

    def show(out: Path, answer: Answer) -> None:
        found = of_plan(answer, gates)
        _print(answer, console)
        print_results(found, console)
        output.document(out, msgspec.to_builtins(answer) | as_json(found))

    with plain_errors():
        gates = gate_config.gates()
        if (cost := next((gate for gate in gates if gate.metric == "cost"), None)) and not config.price:
            raise UserError(f"fail_if '{cost}' needs the price of a GPU; use --price, or limit gpus")
        deployed = Deployment(
            pools=(Pool(mocker=engine or PlannedEngineConfig(), timing=timing or PlannedTimingConfig()),),
            router=router or MeasuredRouterConfig(),
            overhead=overhead or OverheadConfig(),
            disaggregation=disaggregation or DisaggregationConfig(),
            transfer=transfer or TransferConfig(),
            kv_store=kv_store or KvStoreConfig(),
        )
        settings = Settings(deployed, shape, load)
        out, answer = run_plan(workload, config, experiment, settings, console=console, show=show)
    console.print(f"report: {out / 'report.html'}", soft_wrap=True)
    check = check_of_plan(answer)
    wall_s = {check.arm: answer.wall_s}
    code = finish(gate_config, answer.title, [check], of_plan(answer, gates), wall_s=wall_s, console=console)
    return code if answer.is_complete else INTERRUPTED


def _print(answer: Answer, console: Terminal) -> None:
    for line in (f"{answer.title}: {answer.subtitle}", *understood(answer.head), *qualified(answer.head)):
        console.say(line)
    # Row labels are folded, so there is room for full names.
    key = {name: replace(entry, name=name) for name, entry in capacity.key(answer).items()}
    for grid in capacity.grids(answer):
        for table in grid.tables(console.width, key):
            console.print(table)
        if grid.note:
            console.say(grid.note)
    reasons = list(capacity.impossible(answer))
    for reason in reasons[:REASONS]:
        console.say(f"impossible: {reason}")
    if len(reasons) > REASONS:
        console.print(f"impossible for {len(reasons) - REASONS} more reasons, in plan.json")
    console.say(answer.verdict)
    for note in answer.notes:
        console.say(note)
    for sure in answer.sureness:
        console.say(sure.text)
    if any(sure.has_interval for sure in answer.sureness):
        console.say(capacity.COVERED)
    for line in answer.commands:
        console.print(line, soft_wrap=True)
    console.print(f"{answer.simulated} simulations, {answer.wall_s:.0f} s")
