"""Commands that compare the simulator with real engines, and the load generator with known delays."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number
from msgspec import structs

from dynabench.arm import ClientConfig, Settings
from dynabench.cli.flags import EngineFlags
from dynabench.cli.groups import (
    Client,
    Engine,
    Load,
    MeasuredEngine,
    MeasuredFrontend,
    MeasuredRouter,
    Overheads,
    Scheduler,
    Sglang,
    Shape,
    Timing,
    Trtllm,
    plain_errors,
)
from dynabench.cli.groups import Runtime as RuntimeFlags
from dynabench.deployment.description import Deployment
from dynabench.deployment.flags import MeasuredFrontendConfig, MeasuredRouterConfig, running_pools, simulated_pools
from dynabench.deployment.overhead import OverheadConfig
from dynabench.fidelity.settings import CalibrateConfig, ValidateConfig, ValidateExperimentConfig, ValidatePoolConfig
from dynabench.installed.compared import ENOUGH
from dynabench.live.settings import SelftestConfig
from dynabench.terminal import Terminal
from foundation.errors import UserError
from foundation.exit_codes import DONE, NOT_GOOD, USAGE_ERROR
from foundation.text import printable
from mocker import EngineConfig
from mocker.config import EngineVersion
from mocker.timing.config import TimingConfig
from serving.cli.command_line import flat
from workloads.pacing import LoadConfig
from workloads.shape import ShapeConfig

if TYPE_CHECKING:
    from dynabench.fidelity.validate import Validation


def hardware() -> None:
    """List the GPUs and models whose step times are bundled, for --gpu and --model."""
    from mocker.models.catalog import find_model, model_configs
    from mocker.timing.catalog import find_gpu, gpu_names

    console = Terminal()
    for name in gpu_names():
        gpu = find_gpu(name)
        peaks = ", ".join(f"{dtype} {peak / 1e12:,.0f}" for dtype, peak in gpu.flops.items())
        facts = f"{gpu.memory / 2**30:5.0f} GiB  {gpu.bandwidth / 1e9:5,.0f} GB/s  dense TFLOP/s: {peaks}"
        console.entry(name, facts, width=14)
    console.print()
    for name in model_configs():
        shape = find_model(name)
        kind = f", {shape.num_experts} experts" if shape.num_experts else ""
        facts = f"{shape.num_parameters / 1e9:7.1f} B parameters, {shape.weights}{kind}"
        console.entry(name, facts, width=34)
    console.say("\nFor any other model, use --model with its config.json, or a folder that has it.")


def calibrate(
    model: str | None = None,
    /,
    *,
    runs: Annotated[tuple[Path, ...], Parameter(name="--from", negative=())] = (),
    config: Annotated[CalibrateConfig, flat("Calibration", 1)] = CalibrateConfig(),  # noqa: B008 (frozen)
    engine: MeasuredEngine | None = None,
) -> None:
    """Measure the step times of a real vLLM on this machine, or fit them to live runs of any server, for `--timing-file`.

    Args:
        model: Folder or Hugging Face id of the model to run here; none with --from.
        runs: Results folder of `dynabench run --url` to fit step times to, instead of running an engine; give it once for
            each load, two at least.
        config: How to measure.
        engine: With --from: the settings of the server's scheduler, as far as they differ from the defaults.
    """
    if runs:
        if model is not None:
            raise UserError(f"--from fits step times to past runs; leave out {model}, which would be run")
        from dynabench.fidelity.from_runs import described as fitted
        from dynabench.fidelity.from_runs import fit_runs

        with plain_errors():
            found = fit_runs(runs, engine or EngineConfig(), config.workers, config.out, Terminal())
        for line in fitted(found, config.out):
            print(printable(line))
        return
    if model is None:
        raise UserError("calibrate needs a model to run here, or live runs of a server: --from FOLDER --from FOLDER")
    if engine is not None:
        raise UserError(
            "settings of a simulated engine apply to --from; give those of a real one with --extra-engine-args"
        )
    from dynabench.fidelity.calibrate import described, run_calibration

    for line in described(run_calibration(model, config, Terminal()), config.out):
        print(line)


def validate(
    workload: tuple[Path, ...] = (),
    /,
    *,
    config: Annotated[ValidateConfig, flat("Validation", 0)] = ValidateConfig(),  # noqa: B008 (frozen)
    experiment: Annotated[ValidateExperimentConfig, flat("Experiment", 1)] = ValidateExperimentConfig(),  # noqa: B008
    shape: Shape = ShapeConfig(),  # noqa: B008
    load: Load = LoadConfig(),  # noqa: B008
    client: Client = ClientConfig(),  # noqa: B008
    pool: Annotated[ValidatePoolConfig, flat("Workers", 5)] = ValidatePoolConfig(),  # noqa: B008
    router: MeasuredRouter = MeasuredRouterConfig(),  # noqa: B008
    frontend: MeasuredFrontend = MeasuredFrontendConfig(),  # noqa: B008
    runtime: RuntimeFlags | None = None,
    scheduler: Scheduler | None = None,
    engine: Engine | None = None,
    sglang: Sglang | None = None,
    trtllm: Trtllm | None = None,
    timing: Timing = TimingConfig(),  # noqa: B008
    overhead: Overheads = OverheadConfig(),  # noqa: B008
) -> int:
    """Compare real runs with simulated ones of the same workload, figure by figure.

    Exit code 1: --fail-if applies, or a run is not valid.

    Args:
        workload: Files or a folder that form one workload; none if --real names records of requests.
        config: What to compare with, and when to fail.
        experiment: Router modes and repeats.
        shape: What to change about the workload.
        load: How the workload is sent.
        client: How requests are sent and measured.
        pool: The real engine, and how many workers there are on both sides.
        router: Settings of the router.
        frontend: Settings of the real frontend.
        runtime: How the real processes find and reach each other (default: in their own folder).
        scheduler: Whose scheduler the simulated engine has (default: the real engine's, or else vLLM's).
        engine: Settings of vLLM's scheduler.
        sglang: Settings of SGLang's.
        trtllm: Settings of TensorRT-LLM's.
        timing: Its step times, with --timing-file or --gpu.
        overhead: Delays between a client and the simulated engines.
    """
    from dynabench.experiment.own_points import add_points
    from dynabench.fidelity.recordings import is_recording
    from dynabench.fidelity.validate import run_validation as hold

    console = Terminal()
    if config.real is not None and is_recording(config.real):
        if config.fail_if or config.contribute is not None:
            raise UserError("--fail-if and --contribute apply to runs; a recording has only step times")
        with plain_errors():
            return _validate_steps(config.real, timing, None if engine is None else engine.engine_version)
    with plain_errors():
        real = None
        if pool.engine != "mocker":
            real = Deployment(
                pools=running_pools(pool, timing.model),
                gpus=pool.gpus,
                router=router,
                frontend=frontend,
                runtime=runtime,
            )
        worker = EngineFlags(
            scheduler=pool.simulated(scheduler), engine=engine, sglang=sglang, trtllm=trtllm, timing=timing
        ).worker()
        simulated = Deployment(
            pools=simulated_pools(pool, worker),
            gpus=pool.gpus,
            router=router,
            overhead=overhead,
        )
        settings = Settings(simulated, shape, load, client)
        found = hold(workload, config, experiment, settings, console, real=real)
        if config.contribute is not None:
            add_points(config.contribute, found.points)
    _show(found, console)
    if config.contribute is not None:
        count = len(found.points)
        rows = f"{count} row{'s' * (count > 1)}" if count else "nothing, because the runs are not valid"
        console.verbatim(f"added to {config.contribute}: {rows}")
    return 1 if found.failures or found.notes else 0


def _show(found: "Validation", console: Terminal) -> None:
    """Print how close the simulation came, and where the report is."""
    from reports.tables.fidelity import distances, fidelity_grid

    for note in found.notes:
        console.item(f"not valid: {note}", style="red")
    for arm, part in found.fidelity.arms.items():
        for table in fidelity_grid(arm, part).tables(console.width):
            console.print(table)
        console.say(distances(part))
    for name, best in found.fidelity.best.items():
        agree = "as in" if best.real == best.simulated else "but"
        doubt = "" if best.is_clear else " (by less than real runs differ from each other)"
        console.item(f"lowest {name}: {best.simulated} simulated, {agree} {best.real} real{doubt}")
    for failure in found.failures:
        console.item(f"failed: {failure}")
    console.verbatim(f"report: {found.folder / 'report.html'}")


def _validate_steps(path: Path, timing: TimingConfig, version: EngineVersion | None) -> int:
    """Print how a recording's step times compare with simulated ones."""
    from dynabench.fidelity.families import step_times

    times = step_times(path, timing, version)
    print(printable(str(path)) + ": steps, mean real, mean simulated (ms), error of their sum, median error of a step")
    for label, wanted in (("with prefill", True), ("decode only", False)):
        rows = [(real, simulated) for has_prefill, real, simulated in times if has_prefill == wanted]
        if rows:
            real, simulated = (sum(column) for column in zip(*rows, strict=True))
            errors = sorted(abs(b / a - 1) for a, b in rows)
            print(
                f"{label:13}{len(rows):6}{real / len(rows) * 1e3:10.3f}{simulated / len(rows) * 1e3:10.3f}"
                f"{simulated / real - 1:+10.1%}{errors[len(errors) // 2]:10.1%}"
            )
    return 0


def selftest(*, config: Annotated[SelftestConfig, flat("Self-test", 1)] = SelftestConfig()) -> int:  # noqa: B008
    """Run the load generator against a server with known delays and print the error of every metric.

    Exit code 1: a metric is off, or a token was lost.

    Args:
        config: What the server does.
    """
    from dynabench.live.selftest import run_selftest

    return run_selftest(config, Terminal())


def record(*, scenario: Path, out: Path, engine: Literal["vllm", "sglang"] = "vllm") -> None:
    """Record how an installed vLLM or SGLang schedules a scenario, for `dynabench verify`.

    Args:
        scenario: A scenario as JSON, or a recording whose scenario to repeat.
        out: The file to write (.jsonl or .jsonl.gz); it must not exist.
        engine: Whose scheduler. SGLang's runs with a model that is faked.
    """
    from dynabench.fidelity import families

    recorded = families.record(engine, scenario, out)
    print(printable(f"{out}: {recorded.num_steps} steps{_waiting(recorded.num_waiting)}"))


def _waiting(num_requests: int) -> str:
    """Say that requests wait forever, if some do."""
    match num_requests:
        case 0:
            return ""
        case 1:
            return "; 1 request still waits, which never runs"
        case _:
            return f"; {num_requests} requests still wait, which never run"


def verify(
    recordings: tuple[Path, ...] = (),
    /,
    *,
    engine_version: EngineVersion | None = None,
    engine_core: Literal["vllm", "sglang"] | None = None,
    engine_python: str | None = None,
    scenarios: Annotated[int, Parameter(validator=Number(gte=1))] = ENOUGH,
    json_output: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> int:
    """Replay recordings of a real scheduler (vLLM, SGLang, TensorRT-LLM) through the mocker and compare step by step.

    With --engine-core, compare an installed scheduler with ours in random scenarios instead, and write down the result:
    `dynabench simulate --engine-core` uses a vLLM of an unknown version only after that.

    Exit code 1: a recording or a scenario differs. One that cannot be read is bad input (2); the others are still compared.

    Args:
        recordings: Recording files, as `dynabench record` writes them.
        engine_version: Version of vLLM whose rules apply (default: of the one that a recording names).
        engine_core: Whose installed scheduler to compare.
        engine_python: With --engine-core: Python of the environment that has it (default: the one that runs dynabench).
        scenarios: With --engine-core: the number of random scenarios; fewer than the default do not suffice for `simulate`.
        json_output: Print one JSON object per file.
    """
    from dynabench.fidelity import families
    from dynabench.fidelity.recordings import RecordingError

    if engine_core is not None:
        if recordings or engine_version is not None:
            raise UserError(
                "--engine-core compares an installed scheduler; give neither recordings nor --engine-version"
            )
        return _verify_installed(engine_core, engine_python, scenarios, as_json=json_output)
    if engine_python is not None:
        raise UserError("--engine-python applies to --engine-core; give that, too")
    if not recordings:
        raise UserError("verify needs recordings, or --engine-core to compare an installed scheduler")
    failed, unread, unseen = 0, 0, dict[str, None]()
    for path in recordings:
        try:
            verdict = families.verify(path, engine_version)
        except RecordingError as error:
            unread += 1
            _print_verdict({"file": str(path), "matched": None, "error": str(error)}, json_output)
            continue
        failed += verdict.difference is not None
        unseen |= dict.fromkeys(verdict.not_compared)
        facts = {
            "file": str(path),
            "matched": verdict.difference is None,
            verdict.engine: verdict.version,
            "steps": verdict.num_steps,
            "events": verdict.num_events,
            "difference": verdict.difference,
            "not_compared": verdict.not_compared,
        }
        _print_verdict(facts, json_output, verdict.engine)
    if len(recordings) > 1 and not json_output:
        print(f"{len(recordings) - failed - unread} of {len(recordings)} match")
    if unseen and not json_output:
        print(printable(f"recorded, and not compared: {', '.join(sorted(unseen))}"))
    if unread:
        return USAGE_ERROR
    return NOT_GOOD if failed else DONE


def _verify_installed(
    engine: Literal["vllm", "sglang"], python: str | None, num_scenarios: int, *, as_json: bool
) -> int:
    """Compare an installed scheduler with ours in random scenarios, print what came of it and write it down."""
    from dynabench.fidelity.audit.verify import verify_installed
    from dynabench.installed.compared import comparisons, note
    from dynabench.installed.process import TITLES, scheduler_process

    comparisons()  # a damaged file is said now, not when all scenarios have run
    with scheduler_process(python, engine) as process:
        found = verify_installed(process, num_scenarios)
        place = note(process.release, found.comparison)
    comparison = found.comparison
    if as_json:
        print(json.dumps({**structs.asdict(comparison), "reasons": found.reasons, "file": str(place)}))
        return NOT_GOOD if found.differing else DONE
    print(
        printable(
            f"{TITLES[engine]} {comparison.version} and our rules of {comparison.rules}: {comparison.num_identical} of {num_scenarios} "
            f"scenarios are identical ({found.num_steps:,} steps)"
        )
    )
    for rule, seeds in found.reasons.items():
        difference = found.differing[seeds[0]]
        where = f"the first in scenario {seeds[0]}, step {difference.step}, {difference.what}"
        print(printable(f"  {len(seeds)} differ, rule {rule}: {where}"))
    print(printable(f"written to {place}"))
    return NOT_GOOD if found.differing else DONE


def _print_verdict(facts: dict[str, Any], as_json: bool, engine: str = "") -> None:
    from dynabench.fidelity.families import FAMILIES

    if as_json:
        print(json.dumps(facts, default=str))
    elif facts["matched"] is None:
        print(printable(f"not compared: {facts['error']}"))
    elif facts["matched"]:
        known = f"{FAMILIES[engine].title} {facts[engine]}"
        print(printable(f"{facts['file']}: matches {known} ({facts['steps']} steps, {facts['events']} events)"))
    else:
        difference, title = facts["difference"], f"{FAMILIES[engine].title}:"
        print(printable(f"{facts['file']}: differs at step {difference['step']} in {difference['what']}"))
        print(printable(f"  {title:7} {difference[engine]}\n  mocker: {difference['mocker']}"))
