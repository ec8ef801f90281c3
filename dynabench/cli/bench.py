"""The command that benchmarks endpoints: bench."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from dynabench.benchmark.settings import BenchClientConfig, BenchConfig, SentConfig
from dynabench.cli.gates import SweepGate, SweepGateConfig
from dynabench.cli.groups import Output, OutputConfig, plain_errors
from dynabench.experiment.settings import ExperimentConfig
from foundation.errors import UserError
from foundation.exit_codes import INTERRUPTED, NOT_GOOD
from reports.sweep.points import Point
from serving.cli.command_line import flat
from workloads.shape import ShapeConfig

OF_BENCH = Parameter(parse="^(experiment|repeats|seed|slo|slo_preset|format|columns|trace_block_size|out)$")
"""The settings of an experiment that apply to a benchmark of endpoints."""
LEFT = Parameter(parse="^(?!(requests|seed|rate|arrival|burstiness|images|image_tokens|image_pool|wait_for_answers)$)")
"""Leaves out what follows from the load, and what is not sent over HTTP."""
WITHOUT_URL = Parameter(parse="^(?!(url)$)")
"""Leaves out the flag whose value is an argument here."""
RESHAPED = Parameter(parse="^(shape|cap_isl|isl_scale|osl_scale|ends|start_s)$")
"""The changes of a workload that are not the load."""


def bench(
    urls: tuple[str, ...],
    /,
    *,
    workload: Annotated[tuple[Path, ...], Parameter(negative_iterable=(), consume_multiple=False)] = (),
    config: Annotated[BenchConfig, flat("Benchmark", 0)] = BenchConfig(),  # noqa: B008 (frozen)
    sent: Annotated[SentConfig, LEFT, flat("Requests", 1)] = SentConfig(),  # noqa: B008
    experiment: Annotated[ExperimentConfig, OF_BENCH, flat("Experiment", 2)] = ExperimentConfig(),  # noqa: B008
    client: Annotated[BenchClientConfig, WITHOUT_URL, flat("Client", 3)] = BenchClientConfig(),  # noqa: B008
    shape: Annotated[ShapeConfig, RESHAPED, flat("Workload", 4)] = ShapeConfig(),  # noqa: B008
    gate_config: SweepGate = SweepGateConfig(),  # noqa: B008
    output: Output = OutputConfig(),  # noqa: B008
) -> int:
    """Benchmark OpenAI endpoints: throughput against latency, where it stops growing, and which load holds the limits.

    Loads are tried one after the other: 1 stream, then more in large steps until throughput stops growing, then closer to the
    knee, and to the highest load within the limits (--slo). Several endpoints take turns.

    Exit code 1: --fail-if applies to a load or, as 'found < 32', to the highest load within the limits; or no load is valid.

    Args:
        urls: OpenAI endpoints, such as http://localhost:8000.
        workload: Send the requests of these files instead of generated ones; may be repeated.
        config: Which loads are tried, and how long each.
        sent: What is generated.
        experiment: The limits, and where the results go.
        client: How requests are sent and measured.
        shape: What to change about the workload.
        gate_config: When to exit with 1.
        output: What to print.
    """
    from dynabench.api.result import SweepResult
    from dynabench.benchmark.run import Asked, run_bench
    from dynabench.cli.results import finish_sweep

    if not urls:
        raise UserError("name an endpoint, such as http://localhost:8000")
    with plain_errors():
        asked = Asked(
            urls=urls, given=workload, config=config, sent=sent, shape=shape, client=client, experiment=experiment
        )
        result = SweepResult(*run_bench(asked, console=output.terminal(), gates=gate_config.gates()))
    code = finish_sweep(result, gate_config, output)
    if not result.is_complete:
        return INTERRUPTED
    return (
        code
        if any(
            isinstance(row, Point) and row.throughput.requests_per_s and not row.notes for row in result.sweep.points
        )
        else NOT_GOOD
    )
