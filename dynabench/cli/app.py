"""The command line: parse, call, print."""

import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

from cyclopts import App, CycloptsError, Parameter

from dynabench.cli.fidelity import calibrate, hardware, record, validate, verify
from dynabench.cli.groups import (
    EngineSettings,
    Experiment,
    ExperimentRouter,
    Live,
    Load,
    Overheads,
    RouterSettings,
    Shape,
    plain_errors,
)
from dynabench.cli.workload import flat, workload_app
from dynabench.errors import UserError
from dynabench.experiment.arms import Settings
from dynabench.experiment.run import run_experiment
from dynabench.experiment.settings import (
    ExperimentConfig,
    ExperimentRouterConfig,
    LiveConfig,
    OverheadConfig,
    SelftestConfig,
    SweepConfig,
)
from dynabench.interrupt import InterruptError
from dynabench.terminal import Terminal
from foundation.files import new_file
from foundation.text import printable
from mocker import EngineConfig
from serving.cli.command_line import one_line, open_standard_streams
from serving.frontend.config import FrontendConfig
from serving.router import ROUTER_MODES, RouterConfig
from serving.router.modes import ADDITIONS
from serving.runtime.config import RuntimeConfig
from workloads import WorkloadError
from workloads.pacing import LoadConfig
from workloads.shape import ShapeConfig

if TYPE_CHECKING:
    from reports.summary import Summary

app = App(
    name="dynabench",
    help="Which router, which settings, how many GPUs? Benchmark and simulate LLM serving without a GPU.",
    version_flags=["--version"],
)
app.command(workload_app)
for command in (hardware, calibrate, validate, record, verify):
    app.command(command)


@app.command
def simulate(
    workload: tuple[Path, ...] = (),
    /,
    *,
    experiment: Experiment = ExperimentConfig(),  # noqa: B008 (frozen)
    shape: Shape = ShapeConfig(),  # noqa: B008
    load: Load = LoadConfig(),  # noqa: B008
    router: ExperimentRouter = ExperimentRouterConfig(),  # noqa: B008
    engine: EngineSettings = EngineConfig(),  # noqa: B008
    overhead: Overheads = OverheadConfig(),  # noqa: B008
) -> int:
    """Compare router modes, or any other settings, in virtual time.

    Args:
        workload: files or a folder that are one workload (see `dynabench workload formats`); by default a small bundled one.
        experiment: what to compare.
        shape: what to change about the workload.
        load: how the workload is sent.
        router: settings of the router.
        engine: settings of each engine.
        overhead: what lies between a client and the engines.
    """
    mode = experiment.router_mode[0]
    settings = Settings(mode, experiment.workers, shape, load, router, engine, None, overhead)
    return _compare("virtual", workload, experiment, settings)


@app.command
def run(
    workload: tuple[Path, ...] = (),
    /,
    *,
    experiment: Experiment = ExperimentConfig(),  # noqa: B008 (frozen)
    shape: Shape = ShapeConfig(),  # noqa: B008
    load: Load = LoadConfig(),  # noqa: B008
    router: ExperimentRouter = ExperimentRouterConfig(),  # noqa: B008
    live: Live = LiveConfig(),  # noqa: B008
    engine: EngineSettings = EngineConfig(),  # noqa: B008
) -> int:
    """Compare router modes, or any other settings, over real HTTP: a frontend, a router and workers on this host.

    Args:
        workload: files or a folder that are one workload (see `dynabench workload formats`); by default a small bundled one.
        experiment: what to compare.
        shape: what to change about the workload.
        load: how the workload is sent.
        router: settings of the router.
        live: how to reach the stack.
        engine: settings of each engine.
    """
    mode = experiment.router_mode[0]
    return _compare("wall", workload, experiment, Settings(mode, experiment.workers, shape, load, router, engine, live))


@app.command
def sweep(
    workload: tuple[Path, ...] = (),
    /,
    *,
    config: Annotated[SweepConfig, flat("Sweep", 0)] = SweepConfig(),  # noqa: B008 (frozen)
    experiment: Experiment = ExperimentConfig(),  # noqa: B008
    shape: Shape = ShapeConfig(),  # noqa: B008
    load: Load = LoadConfig(),  # noqa: B008
    router: ExperimentRouter = ExperimentRouterConfig(),  # noqa: B008
    engine: EngineSettings = EngineConfig(),  # noqa: B008
    overhead: Overheads = OverheadConfig(),  # noqa: B008
) -> int:
    """Try every combination of settings in virtual time, or find the highest rate that meets the limits.

    Args:
        workload: files or a folder that are one workload (see `dynabench workload formats`); by default a small bundled one.
        config: how to go through the settings.
        experiment: what to vary (--router-mode, --vary) and the limits (--slo, --slo-preset).
        shape: what to change about the workload.
        load: how the workload is sent.
        router: settings of the router.
        engine: settings of each engine.
        overhead: what lies between a client and the engines.
    """
    from dynabench.experiment.sweep import run_sweep
    from reports.tables import sweep_table

    console = Terminal()
    settings = Settings(experiment.router_mode[0], experiment.workers, shape, load, router, engine, None, overhead)
    with plain_errors():
        out, summary = run_sweep(workload, config, experiment, settings, console=console)
    console.print(sweep_table(summary, console.width))
    console.print(summary.verdict)
    console.print(f"report: {out / 'report.html'}", soft_wrap=True)
    return 0 if summary.is_complete else 130


@app.command
def selftest(*, config: Annotated[SelftestConfig, flat("Self-test", 1)] = SelftestConfig()) -> int:  # noqa: B008
    """Run the load generator against a server of known delays and print the error of every metric.

    Args:
        config: what the server does.
    """
    from dynabench.live.selftest import run_selftest

    return run_selftest(config, Terminal())


@app.command
def serve(
    *,
    file: Annotated[Path | None, Parameter(name=["--file", "-f"])] = None,
    frontend: Annotated[FrontendConfig, flat("Frontend", 2)] = FrontendConfig(),  # noqa: B008
    router: RouterSettings = RouterConfig(),  # noqa: B008
    runtime: Annotated[RuntimeConfig, flat("Runtime", 6)] | None = None,
    engine: EngineSettings = EngineConfig(),  # noqa: B008
    workers: int = 2,
    model_path: str = "",
    model_name: str = "",
    standalone_router: bool = False,
) -> None:
    """Serve: a frontend, the router and mocker workers as one supervised group, until Ctrl-C.

    Args:
        file: a graph (YAML) to start instead of what the flags say; see docs/guide.md.
        frontend: settings of the frontend.
        router: settings of the router.
        runtime: how the processes find and reach each other.
        engine: settings of each engine.
        workers: worker processes.
        model_path: folder or Hugging Face id with the tokenizer (none: tokens are bytes of UTF-8).
        model_name: name that clients ask for (default: the folder's or repository's, or mock).
        standalone_router: put the router into a process of its own.
    """
    from dynabench.deployment import serve as serving_

    if file is not None:
        graph = serving_.read(file)
    else:
        limits = {"migration_limit": 3, "model_path": model_path, "model_name": model_name}
        group = serving_.WorkerGroup(count=workers, worker=limits, engine_args=dataclasses.asdict(engine))
        graph = serving_.Graph(
            frontend=dataclasses.asdict(frontend),
            router=dataclasses.asdict(router),
            runtime=dataclasses.asdict(runtime or RuntimeConfig()),
            workers=[group],
            standalone_router=standalone_router,
        )
    serving_.serve(graph)


def _compare(clock: Any, files: tuple[Path, ...], experiment: ExperimentConfig, settings: Settings) -> int:
    console = Terminal()
    with plain_errors():
        out, summary = run_experiment(clock, files, experiment, settings, console=console)
    _print_summary(summary, console)
    if experiment.metrics_like is not None:
        _print_like(out, experiment.metrics_like, console)
    console.print(f"report: {out / 'report.html'}", soft_wrap=True)
    if not summary.is_complete:
        return 130
    return 0 if summary.is_valid else 1


def _print_summary(summary: "Summary", console: Terminal) -> None:
    """Print what a comparison found, and before all else whether it counts."""
    from reports.tables import comparison, notes

    for note in notes(summary):
        console.print(f"not valid: {note}", style="red", soft_wrap=True)
    console.print(comparison(summary))
    console.print(summary.verdict)
    for arm, figures in summary.arms.items():
        for remark in figures.remarks:
            console.print(f"{arm}: {remark}", soft_wrap=True)


def _print_like(out: Path, tool: str, console: Terminal) -> None:
    from reports import folder, tables

    console.print(tables.like_table(folder.read(out)[1], tool))


@app.command
def report(results: Path, /, *, metrics_like: Literal["aiperf", "vllm", "guidellm"] | None = None) -> None:
    """Write summary, charts and report of a results folder again.

    Args:
        results: the folder.
        metrics_like: print the figures once more as another tool would define them.
    """
    from reports import folder

    summary = folder.rebuild(results)
    console = Terminal()
    _print_summary(summary, console)
    if metrics_like is not None:
        _print_like(results, metrics_like, console)
    console.print(f"report: {results / 'report.html'}", soft_wrap=True)


@app.command
def compare(
    results: list[Path],
    /,
    *,
    out: Path | None = None,
    fail_if: tuple[str, ...] = (),
    markdown: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Put earlier runs side by side, the first as the baseline; exit with 1 if one of them is not valid.

    Args:
        results: results folders.
        out: write a results folder of the comparison, with charts and report.
        fail_if: exit with 1 if an arm is worse than the baseline by more than this, such as 'ttft.p90 > +5%' or
            'throughput < -3%', beyond noise; may be repeated.
        markdown: print a Markdown summary, for a pull request.
    """
    from reports import folder, gate, tables
    from reports.summary import summarize

    with plain_errors():
        gates = [gate.parse(text) for text in fail_if]
    if out is not None:
        folder.check_new(out)
    console = Terminal()
    manifest, runs = folder.combine(results)
    summary = summarize(runs) if out is None else folder.write(out, manifest, runs)
    failures = gate.failures(summary, gates)
    if markdown:
        print(tables.markdown(summary, manifest, failures))
    else:
        _print_summary(summary, console)
        for failure in failures:
            console.print(f"failed: {failure}", soft_wrap=True)
    if out is not None:
        print(printable(f"report: {out / 'report.html'}"), file=sys.stderr if markdown else sys.stdout)
    return 1 if failures or not summary.is_valid else 0


@app.command
def export(results: Path, out: Path, /, *, to: Literal["csv", "parquet", "json", "llm-d"] = "csv") -> None:
    """Write a results folder's figures in another form.

    Args:
        results: the folder.
        out: the file to write; it must not exist.
        to: csv or parquet (a row per request), json (the summary, with its schema), llm-d (a Benchmark Report per arm).
    """
    from reports import exports, folder

    manifest, runs = folder.read(results)
    data = exports.export(manifest, runs, to)
    with new_file(out) as file:
        file.write(data)
    print(printable(str(out)))


@app.command
def modes() -> None:
    """List the router modes, and what can be added to one."""
    for name, kind in ROUTER_MODES.items():
        print(f"{name:20} {kind.description}")
    print("\nAdded with +, such as lmetric+eps(5):")
    for text in ADDITIONS.values():
        print(f"  {text}")


def main() -> None:
    """Run the command line; bad input is one line and exit code 2."""
    from reports.folder import ReportError

    open_standard_streams()
    try:
        command, bound, _ = app.parse_args(exit_on_error=False, print_error=False)
    except (CycloptsError, ValueError) as error:
        _fail(one_line(error))
    try:
        code = command(*bound.args, **bound.kwargs)
        sys.stdout.flush()
    except (WorkloadError, ReportError, UserError) as error:
        _fail(str(error))
    except (KeyboardInterrupt, InterruptError) as error:
        print(str(error) or "interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        _drop_output()
        sys.exit(141)
    except OSError as error:  # a full disk, a folder that is gone
        _drop_output()
        _fail(f"{error.filename or 'the output'}: {error.strerror or error}")
    sys.exit(code if isinstance(code, int) else 0)


def _drop_output() -> None:
    """Keep Python from writing once more, at its end, what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str) -> NoReturn:
    print(f"dynabench: {printable(' '.join(message.split()))}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
