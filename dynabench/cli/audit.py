"""The command that holds two schedulers against each other: audit."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dynabench.arm import Settings
from dynabench.cli.flags import AuditFlags
from dynabench.cli.groups import FLAT, DeploymentFile, Load, Output, OutputConfig, Shape, plain_errors
from dynabench.experiment.settings import ExperimentConfig
from dynabench.fidelity.settings import AuditConfig
from foundation.exit_codes import DONE, NOT_GOOD
from serving.cli.command_line import flat
from workloads.pacing import LoadConfig
from workloads.shape import ShapeConfig

if TYPE_CHECKING:
    from dynabench.fidelity.audit.run import Audit
    from dynabench.fidelity.audit.suspects import Explanation

MOST_RULES = 3
"""Rules that are named."""


def audit(
    workload: tuple[Path, ...] = (),
    /,
    *,
    deployment: DeploymentFile = None,
    config: Annotated[AuditConfig, flat("Audit", 0)] = AuditConfig(),  # noqa: B008 (frozen)
    output: Output = OutputConfig(),  # noqa: B008
    shape: Shape = ShapeConfig(),  # noqa: B008
    load: Load = LoadConfig(),  # noqa: B008
    flags: Annotated[AuditFlags, FLAT] = AuditFlags(),  # noqa: B008
) -> int:
    """Hold our scheduler against that of an installed vLLM, or SGLang: same workload, same settings, step by step.

    Prints "identical", or the first step in which they differ, the rule of ours that explains it, and what the difference
    costs. No GPU is needed.

    Exit code 1: they differ.

    Args:
        workload: Files or a folder that form one workload (see `dynabench workload formats`); default: a small bundled one.
        deployment: YAML file that describes the deployment, instead of flags.
        config: What is compared with what.
        output: What to print.
        shape: What to change about the workload.
        load: How the workload is sent.
        flags: What describes the deployment.
    """
    from dynabench.experiment.source import source_of
    from dynabench.fidelity.audit.run import audit as audited
    from dynabench.fidelity.audit.run import audit_versions
    from dynabench.installed.process import scheduler_process

    with plain_errors():
        deployed = flags.deployment(deployment)
        if config.router_mode is not None:
            deployed = replace(deployed, router_mode=config.router_mode)
        experiment = ExperimentConfig(
            seed=config.seed, format=config.format, columns=config.columns, trace_block_size=config.trace_block_size
        )
        requests = source_of(workload, experiment)(shape)
        settings = Settings(deployed, shape, load)
        kind = deployed.engine_type
        with scheduler_process(config.engine_python, kind) as first:
            if config.against is None:
                found = audited(settings, requests, first, seed=config.seed)
            else:
                with scheduler_process(config.against, kind) as second:
                    found = audit_versions(settings, requests, first, second, seed=config.seed)
    if output.json:
        output.document(None, as_json(found))
    else:
        console = output.terminal()
        for line in lines(found):
            console.item(line, indent="    ")
    return DONE if found.difference is None else NOT_GOOD


def lines(found: "Audit") -> list[str]:
    """Return the result as text."""
    from dynabench.fidelity.audit.run import MOST_SLOWER

    left, right, difference = found.left, found.right, found.difference
    num_requests = len(left.record.requests)
    if difference is None:
        return [
            f"identical: {left.name} and {right.name} take the same {left.num_steps:,} steps for {num_requests:,} requests, "
            f"with {left.num_preemptions:,} preemption{'s' * (left.num_preemptions != 1)} and at least {left.least_free:,} "
            "free KV blocks (compared: tokens by request and preemptions in each, free KV blocks whenever the batch changes)"
        ]
    said = [
        f"different from step {difference.step:,} of engine {difference.engine} on, at {difference.start_s:.3f} s, in "
        f"{difference.what}",
        f"  {left.name}: {difference.left}",
        f"  {right.name}: {difference.right}",
    ]
    if found.explanations:
        said += _explained(found.explanations)
    elif left.name.startswith("our"):
        said.append("no rule of ours explains it: what differs is new, or is several rules at once")
    said.append(f"{num_requests:,} requests, {left.num_steps:,} and {right.num_steps:,} steps")
    for cost in found.costs:
        change = f"{cost.right / cost.left - 1:+.2%}" if cost.left else "-"
        said.append(f"  {cost.name:9} {cost.left * 1e3:12,.2f} ms {cost.right * 1e3:12,.2f} ms {change:>9}")
    slower = found.slower
    said.append(f"{len(slower):,} of {num_requests:,} requests take longer with {right.name}")
    said += [f"  request {one.request}: {one.left:,.3f} s, then {one.right:,.3f} s" for one in slower[:MOST_SLOWER]]
    return said


def _explained(explanations: "list[Explanation]") -> list[str]:
    """Name the rules that explain a difference; if none does alone, those that move it furthest."""
    if whole := [one.rule for one in explanations if one.difference is None]:
        return [f"rule {rule} explains it: turned round, the two are identical" for rule in whole[:MOST_RULES]]
    return ["no rule explains it alone"] + [
        f"  with {one.rule} turned round, the two are the same up to step {one.difference.step:,} (then {one.difference.what})"
        for one in explanations[:MOST_RULES]
        if one.difference is not None
    ]


def as_json(found: "Audit") -> dict[str, Any]:
    """Return the result as JSON takes it; times are in seconds."""
    return {
        "identical": found.difference is None,
        "schedulers": [found.left.name, found.right.name],
        "requests": len(found.left.record.requests),
        "steps": [found.left.num_steps, found.right.num_steps],
        "preemptions": [found.left.num_preemptions, found.right.num_preemptions],
        "least_free_blocks": [found.left.least_free, found.right.least_free],
        "difference": found.difference and found.difference._asdict(),
        "rules": [
            {"rule": one.rule, "then": one.difference and one.difference._asdict()} for one in found.explanations
        ],
        "costs": {cost.name: [cost.left, cost.right] for cost in found.costs},
        "slower": [one._asdict() for one in found.slower],
    }
