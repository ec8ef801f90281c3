"""The command line: parse, call, print."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

from cyclopts import App, CycloptsError, Group, Parameter
from rich.console import Console

from dynabench.errors import UserError
from dynabench.experiment import ExperimentConfig, LiveConfig, load_workload, run_experiment
from mocker import EngineConfig
from serving.frontend.config import FrontendConfig
from serving.router import ROUTER_MODES, RouterConfig
from serving.runtime.config import RuntimeConfig
from workloads import WorkloadError
from workloads.shape import ShapeConfig
from workloads.synthesize import SynthConfig

app = App(
    name="dynabench",
    help="Which router, which settings, how many GPUs? Benchmark and simulate LLM serving without a GPU.",
    version_flags=["--version"],
)
workload_app = App(name="workload", help="Look at workloads, make them.")
app.command(workload_app)


def _flat(title: str, order: int) -> Parameter:
    return Parameter(name="*", group=Group(title, sort_key=order), negative_iterable=(), consume_multiple=False)


Experiment = Annotated[ExperimentConfig, _flat("Experiment", 1)]
Shape = Annotated[ShapeConfig, _flat("Workload", 2)]
RouterSettings = Annotated[RouterConfig, _flat("Router", 3)]
Live = Annotated[LiveConfig, _flat("Live stack", 4)]
EngineSettings = Annotated[EngineConfig, _flat("Simulated engine", 5)]


@app.command
def simulate(
    workload: Path | None = None,
    /,
    *,
    experiment: Experiment = ExperimentConfig(),  # noqa: B008 (frozen)
    shape: Shape = ShapeConfig(),  # noqa: B008
    router: RouterSettings = RouterConfig(),  # noqa: B008
    engine: EngineSettings = EngineConfig(),  # noqa: B008
) -> int:
    """Compare router modes in virtual time.

    Args:
        workload: a Mooncake trace (.jsonl or .jsonl.gz); by default a small bundled one.
        experiment: what to compare.
        shape: what to change about the workload.
        router: settings of the router.
        engine: settings of each engine.
    """
    return _compare("virtual", workload, experiment, shape, router, engine, None)


@app.command
def run(
    workload: Path | None = None,
    /,
    *,
    experiment: Experiment = ExperimentConfig(),  # noqa: B008 (frozen)
    shape: Shape = ShapeConfig(),  # noqa: B008
    router: RouterSettings = RouterConfig(),  # noqa: B008
    live: Live = LiveConfig(),  # noqa: B008
    engine: EngineSettings = EngineConfig(),  # noqa: B008
) -> int:
    """Compare router modes over real HTTP: a frontend, a router and mocker workers on this host.

    Args:
        workload: a Mooncake trace (.jsonl or .jsonl.gz); by default a small bundled one.
        experiment: what to compare.
        shape: what to change about the workload.
        router: settings of the router.
        live: how to reach the stack.
        engine: settings of each engine.
    """
    return _compare("wall", workload, experiment, shape, router, engine, live)


@app.command
def serve(
    *,
    file: Annotated[Path | None, Parameter(name=["--file", "-f"])] = None,
    frontend: Annotated[FrontendConfig, _flat("Frontend", 2)] = FrontendConfig(),  # noqa: B008
    router: RouterSettings = RouterConfig(),  # noqa: B008
    runtime: Annotated[RuntimeConfig, _flat("Runtime", 6)] | None = None,
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
    from dynabench import serve as serving_

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


def _compare(
    clock: Any,
    path: Path | None,
    experiment: ExperimentConfig,
    shape: ShapeConfig,
    router: RouterConfig,
    engine: EngineConfig,
    live: LiveConfig | None,
) -> int:
    from reports.tables import comparison

    console = Console()
    workload = load_workload(path, experiment.trace_block_size, shape, experiment.seed)
    out, summary = run_experiment(
        clock, workload, experiment, engine, router, live, path=path, shape_config=shape, console=console
    )
    console.print(comparison(summary))
    console.print(summary["verdict"], highlight=False)
    for arm, figures in summary["arms"].items():
        for note in figures["notes"]:
            console.print(f"{arm}: {note}", highlight=False, soft_wrap=True)
    console.print(f"report: {out / 'report.html'}", highlight=False, soft_wrap=True)
    if not summary["is_complete"]:
        return 130
    return 0 if summary["is_valid"] else 1


@app.command
def report(results: Path, /) -> None:
    """Rebuild summary, charts and report of a results folder.

    Args:
        results: the folder.
    """
    from reports import folder, tables

    summary = folder.rebuild(results)
    Console().print(tables.comparison(summary))
    Console().print(f"report: {results / 'report.html'}", highlight=False, soft_wrap=True)


@app.command
def compare(results: list[Path], /, *, out: Path | None = None) -> None:
    """Put earlier runs side by side, the first as the baseline.

    Args:
        results: results folders.
        out: write a results folder of the comparison, with charts and report.
    """
    from reports import folder, tables

    if out is not None:
        folder.check_new(out)
    console = Console()
    manifest, runs = folder.combine(results)
    if out is None:
        from reports.summary import summarize

        summary = summarize(runs)
    else:
        summary = folder.write(out, manifest, runs)
        console.print(f"report: {out / 'report.html'}", highlight=False, soft_wrap=True)
    console.print(tables.comparison(summary))
    console.print(summary["verdict"], highlight=False)


@app.command
def verify(
    recordings: list[Path], /, *, json_output: Annotated[bool, Parameter(name="--json", negative=())] = False
) -> int:
    """Replay recordings of a real vLLM scheduler through the mocker and compare step by step.

    Args:
        recordings: recording files, as `dynabench record` writes them.
        json_output: print one JSON object per file.
    """
    from dynabench import recordings as recorded

    failed = 0
    for path in recordings:
        try:
            verdict = recorded.verify(recorded.read(path))
        except recorded.RecordingError as error:
            failed += 1
            _print_verdict({"file": str(path), "matched": None, "error": str(error)}, json_output)
            continue
        failed += verdict.difference is not None
        facts = {
            "file": str(path),
            "matched": verdict.difference is None,
            "vllm": verdict.vllm_version,
            "steps": verdict.num_steps,
            "events": verdict.num_events,
            "difference": verdict.difference,
        }
        _print_verdict(facts, json_output)
    return 1 if failed else 0


@app.command
def record(*, scenario: Path, out: Path) -> None:
    """Record what an installed vLLM does with a scenario, for `dynabench verify`.

    Args:
        scenario: a scenario as JSON, or a recording whose scenario is to be repeated.
        out: the file to write (.jsonl or .jsonl.gz); it must not exist.
    """
    from dynabench import record as recorder

    steps = recorder.record(scenario, out)
    print(f"{out}: {steps} steps")


def _print_verdict(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(facts, default=str))
    elif facts["matched"] is None:
        print(f"not compared: {facts['error']}")
    elif facts["matched"]:
        print(f"{facts['file']}: matches vLLM {facts['vllm']} ({facts['steps']} steps, {facts['events']} events)")
    else:
        difference = facts["difference"]
        print(f"{facts['file']}: differs at step {difference['step']} in {difference['what']}")
        print(f"  vLLM:   {difference['vllm']}\n  mocker: {difference['mocker']}")


@app.command
def modes() -> None:
    """List the router modes."""
    for name, kind in ROUTER_MODES.items():
        print(f"{name:14} {kind.description}")


@workload_app.command
def inspect(
    file: Path,
    /,
    *,
    trace_block_size: int = 512,
    json_output: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Print what a workload is like.

    Args:
        file: a Mooncake trace (.jsonl or .jsonl.gz).
        trace_block_size: tokens each hash id stands for.
        json_output: print JSON.
    """
    from workloads.describe import describe

    facts = dataclasses.asdict(describe(load_workload(file, trace_block_size, ShapeConfig(), 0)))
    if json_output:
        print(json.dumps(facts))
        return
    console = Console(highlight=False)
    for name, value in facts.items():
        label = name.replace("_", " ")
        if isinstance(value, dict):
            text = "  ".join(f"{key} {number:,.0f}" for key, number in value.items())
        elif "share" in name:
            text = f"{value:.1%}"
        else:
            text = f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
        console.print(f"{label:26} {text}", soft_wrap=True)


@workload_app.command
def synth(out: Path, /, *, config: Annotated[SynthConfig, _flat("Synthesizer", 1)] = SynthConfig()) -> None:  # noqa: B008
    """Write a synthetic workload.

    Args:
        out: the file to write (.jsonl or .jsonl.gz); it must not exist.
        config: its dials.
    """
    from dynabench.workload_file import write_workload
    from workloads.synthesize import synthesize

    count = write_workload(synthesize(config), out)
    print(f"{out}: {count:,} requests")


def main() -> None:
    """Run the command line; bad input is one line and exit code 2."""
    from reports.folder import ReportError

    try:
        command, bound, _ = app.parse_args(exit_on_error=False, print_error=False)
    except (CycloptsError, ValueError) as error:
        _fail(_one_line(error))
    try:
        code = command(*bound.args, **bound.kwargs)
    except (WorkloadError, ReportError, UserError) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)
    sys.exit(code if isinstance(code, int) else 0)


def _one_line(error: Exception) -> str:
    cause = error.__cause__
    return " ".join(str(cause if isinstance(cause, ValueError) else error).split())


def _fail(message: str) -> NoReturn:
    print(f"dynabench: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
