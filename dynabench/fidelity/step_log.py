"""What a real engine computed in each step, and the time of each step."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foundation.errors import UserError

RECORDER = "dynabench.fidelity.vllm.step_recorder.StepRecorder"
"""Value of vLLM's `--scheduler-cls` that makes it write a log."""
LOG = "DYNABENCH_STEP_LOG"
"""The environment variable with the log's path; each engine process appends its process id."""
Array = npt.NDArray[np.float64]
STEP_COLUMNS = (
    "scheduled_s",
    "ended_s",
    "prefill_tokens",
    "prefill_context",
    "prefill_pairs",
    "num_prefills",
    "num_decodes",
    "kv_tokens",
    "preempted",
    "goes_on",
)
FIRST_COLUMNS = ("arrived_s", "added_s", "first_token_s", "prompt_tokens")


class EngineStepLog(NamedTuple):
    """One engine's steps and its requests' first tokens; times are in seconds on a clock that all processes share."""

    engine: dict[str, Any]
    """The engine's settings as it resolved them."""
    steps: dict[str, Array]
    """Columns named by `STEP_COLUMNS`."""
    firsts: dict[str, Array]
    """Columns named by `FIRST_COLUMNS`."""

    @property
    def duration_s(self) -> Array:
        """The duration of each step: from the previous step's end while the engine was busy, else from its schedule.

        With asynchronous scheduling, that is the time between two results, while the host's work and the model's
        overlap. After idleness it also includes the work before the model runs, which every synchronous step includes.
        """
        scheduled, ended = self.steps["scheduled_s"], self.steps["ended_s"]
        started = scheduled.copy()
        is_busy = self.steps["goes_on"][:-1] > 0
        started[1:][is_busy] = ended[:-1][is_busy]
        return ended - started

    def between(self, start_s: float, end_s: float) -> "EngineStepLog":
        """Return the part of the log that began in an interval."""
        steps = (self.steps["scheduled_s"] >= start_s) & (self.steps["scheduled_s"] < end_s)
        firsts = (self.firsts["added_s"] >= start_s) & (self.firsts["added_s"] < end_s)
        return EngineStepLog(
            self.engine,
            {name: column[steps] for name, column in self.steps.items()},
            {name: column[firsts] for name, column in self.firsts.items()},
        )


def read_step_log(path: Path) -> EngineStepLog:
    """Read a log from `dynabench.fidelity.vllm.step_recorder`.

    Raises:
        UserError: the file is not a log, or contains no steps.
    """
    engine: dict[str, Any] = {}
    rows: dict[str, list[list[float]]] = {"step": [], "first": []}
    try:
        with path.open() as lines:
            for line in lines:
                kind, row = json.loads(line)
                if kind == "engine":
                    engine = row
                else:
                    rows[kind].append(row)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: cannot be read as a log of engine steps ({error})") from error
    if not rows["step"] or not engine:
        raise UserError(f"{path}: the engine ran no steps")
    return EngineStepLog(engine, _columns(rows["step"], STEP_COLUMNS), _columns(rows["first"], FIRST_COLUMNS))


def _columns(rows: list[list[float]], names: tuple[str, ...]) -> dict[str, Array]:
    table = np.array(rows, float).reshape(len(rows), len(names))
    return dict(zip(names, table.T, strict=True))
