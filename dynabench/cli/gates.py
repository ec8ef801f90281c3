"""Gates of commands: the flags, and how their results are printed, written and turned into an exit code."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from dynabench.experiment.manifest import now
from dynabench.terminal import Terminal
from foundation.exit_codes import DONE, NOT_GOOD
from foundation.files import replace_text
from foundation.settings import check_settings
from reports import junit
from reports.capacity.answer import PlanAnswer
from reports.figures.conditions import Condition
from reports.gate import PLANS, POINTS, RUNS, GateKind, parse_gate
from reports.summary import Summary
from reports.sweep.points import Impossible, Sweep, name_and_point
from reports.verdicts.gates import GateResult, GateState
from serving.cli.command_line import flat


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """When to exit with 1."""

    of: ClassVar[GateKind] = RUNS

    fail_if: tuple[str, ...] = ()
    """Exit with 1 if an arm is beyond a limit, such as 'ttft.p99 > 2s', 'attainment < 95%' or 'failed > 0', or worse than
    the first arm by more than this, such as 'ttft.p90 > +5%' or 'throughput < -3%', beyond noise; may be repeated."""

    junit: Path | None = None
    """Write the result of each --fail-if, and whether each arm is valid, to this file as JUnit XML; an older one
    is removed at the start."""

    def __post_init__(self) -> None:
        """Remove an older JUnit file, and refuse what could not be judged or written, before anything is run."""
        check_settings(self)
        if self.junit is not None:
            _check_writable(self.junit)
            # Whatever refuses or ends the command from here on, CI does not read the results of an earlier one. So that
            # it holds for the other flags too, commands take this group before theirs.
            self.junit.unlink(missing_ok=True)
        _ = self.gates()

    def gates(self, of: GateKind | None = None) -> list[Condition]:
        """Return the conditions.

        Raises:
            ValueError: one is not understood.
        """
        return [parse_gate(text, of or self.of) for text in self.fail_if]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepGateConfig(GateConfig):
    """When a sweep exits with 1."""

    of: ClassVar[GateKind] = POINTS

    fail_if: tuple[str, ...] = ()
    """Exit with 1 if a point is beyond a limit, such as 'ttft.p99 > 2s' or 'failed > 0', worse than the first point by
    more than this, such as 'ttft.p90 > +5%', or, with --find, if 'found < 2'; may be repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanGateConfig(GateConfig):
    """When a plan exits with 1."""

    of: ClassVar[GateKind] = PLANS

    fail_if: tuple[str, ...] = ()
    """Exit with 1 if the layout that was found needs more than this, such as 'gpus > 16' or 'cost > 40'; may be repeated.
    If no layout meets the limits, the exit code is 1 in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareGateConfig(GateConfig):
    """When a comparison of runs or of sweeps exits with 1."""

    of: ClassVar[GateKind] = replace(RUNS, single=(*RUNS.single, "found"))


Gate = Annotated[GateConfig, flat("Gate", 1)]
SweepGate = Annotated[SweepGateConfig, flat("Gate", 1)]
CompareGate = Annotated[CompareGateConfig, flat("Gate", 1)]
PlanGate = Annotated[PlanGateConfig, flat("Gate", 1)]


def _check_writable(path: Path) -> None:
    """Refuse a file that cannot be written, or that is something else."""
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise ValueError(f"junit is {str(path)!r}; expected a file in a folder that can be written")
    if path.exists() and not (path.is_file() and b"<testsuites" in path.read_bytes()[:200]):
        raise ValueError(f"junit is {str(path)!r}, which exists and is not JUnit XML; choose another file")


def checks_of(summary: Summary) -> list[GateResult]:
    """Return whether the runs of each arm are valid."""
    found = []
    for name, arm in summary.arms.items():
        state: GateState = "failed" if arm.notes else "passed" if arm.is_complete else "undecided"
        why = "; ".join(arm.notes) or ("valid" if arm.is_complete else "interrupted")
        found.append(GateResult(name, "the run is valid", state, f"{name}: {why}"))
    return found


def checks_of_sweep(sweep: Sweep) -> list[GateResult]:
    """Return which combinations could be simulated."""
    found = []
    for row in sweep.points:
        name, _ = name_and_point(row)
        state: GateState = "undecided" if isinstance(row, Impossible) else "passed"
        why = f"impossible: {row.reason}" if isinstance(row, Impossible) else "simulated"
        found.append(GateResult(name, "it can be simulated", state, f"{name}: {why}"))
    return found


def check_of_plan(answer: PlanAnswer) -> GateResult:
    """Return whether a plan found a layout."""
    return GateResult("", "a layout meets the limits", "passed" if answer.commands else "failed", answer.verdict)


def wall_s_of(manifest: Mapping[str, Any]) -> dict[str, float]:
    """Return how long the runs of each arm took."""
    found: dict[str, float] = {}
    for run in manifest.get("runs", ()):
        found[run["arm"]] = found.get(run["arm"], 0.0) + run["wall_s"]
    return found


def wall_s_of_sweep(sweep: Sweep) -> dict[str, float]:
    """Return how long the shown point of each row took."""
    return {name: point.wall_s for name, point in map(name_and_point, sweep.points) if point}


def finish(
    config: GateConfig,
    title: str,
    checks: Sequence[GateResult],
    results: Sequence[GateResult],
    *,
    wall_s: Mapping[str, float],
    console: Terminal,
) -> int:
    """Write the JUnit file, and return the exit code; what was found is already written."""
    if config.junit is not None:
        text = junit.document(title, [*checks, *results], created=now().isoformat(), wall_s=wall_s)
        config.junit.absolute().parent.mkdir(parents=True, exist_ok=True)
        replace_text(config.junit, text)
        console.verbatim(f"junit: {config.junit}")
    return NOT_GOOD if any(result.state == "failed" for result in [*checks, *results]) else DONE


def print_results(results: Sequence[GateResult], console: Terminal) -> None:
    """Print the result of each gate."""
    for result in results:
        console.item(f"{result.state}: {result.text}", style={"failed": "red"}.get(result.state))


def gates_as_json(results: Sequence[GateResult]) -> dict[str, Any]:
    """Return the results as part of a command's JSON; nothing without gates."""
    return {"gates": [result._asdict() for result in results]} if results else {}
