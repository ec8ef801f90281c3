"""Recordings are held against the family of engines from which they come, as their first line says."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from dynabench.fidelity.recordings import Json, Recorded, RecordingError, Verdict, head_of
from dynabench.fidelity.sglang import recordings as sglang_recordings
from dynabench.fidelity.sglang import replay as sglang_replay
from dynabench.fidelity.trtllm import recordings as trtllm_recordings
from dynabench.fidelity.trtllm import replay as trtllm_replay
from dynabench.fidelity.vllm import recordings, replay
from dynabench.fidelity.vllm.step_times import step_times as vllm_step_times
from mocker.timing.config import TimingConfig
from mocker.vllm.versions import EngineVersion

StepTimes = list[tuple[bool, float, float]]
"""For each timed step: whether it had prefill, its recorded time, and its simulated time (s)."""


class Family(NamedTuple):
    """How recordings of one engine are held against the mocker."""

    title: str
    is_from: Callable[[Json], bool]
    """Whether a recording is from this engine, by what its first line says of it."""
    verify: Callable[[Path, EngineVersion | None], Verdict]
    step_times: Callable[[Path, TimingConfig, EngineVersion | None], StepTimes]


def refuse_times(path: Path, *_: object) -> StepTimes:
    """Refuse a recording whose steps are never timed.

    Raises:
        RecordingError: always.
    """
    raise RecordingError(f"{path}: contains no times; steps of SGLang are recorded without")


FAMILIES = {
    "vllm": Family(
        "vLLM",
        lambda head: "vllm_version" in head or "vllm" in head,  # a compact recording, or a trace of calls
        lambda path, version: replay.verify(recordings.read(path, version)),
        lambda path, timing, version: vllm_step_times(recordings.read(path, version), timing),
    ),
    "sglang": Family(
        "SGLang",
        lambda head: isinstance(head.get("resolved"), dict) and "sglang" in head["resolved"],
        lambda path, _: sglang_replay.verify(sglang_recordings.read(path)),
        refuse_times,
    ),
    "trtllm": Family(
        "TensorRT-LLM",
        lambda head: "policy" in head and "max_num_tokens" in head,  # they name no version
        lambda path, _: trtllm_replay.verify(trtllm_recordings.read(path)),
        lambda path, timing, _: trtllm_replay.step_times(path, timing),
    ),
}


def verify(path: Path, version: EngineVersion | None = None) -> Verdict:
    """Replay a recording step by step and stop at the first difference; `version` is as in `step_times`.

    Raises:
        RecordingError: it cannot be read or replayed, or its engine is unknown.
    """
    return _family_of(path, version).verify(path, version)


def record(engine: Literal["vllm", "sglang"], scenario: Path, out: Path) -> Recorded:
    """Record how an installed engine schedules a scenario.

    Raises:
        RecordingError: it is not installed, refuses a setting, or the scenario cannot be read.
    """
    if engine == "sglang":
        from dynabench.fidelity.sglang import record as sglang_recorder

        return sglang_recorder.record(scenario, out)
    from dynabench.fidelity.vllm import record as recorder

    return recorder.record(scenario, out)


def step_times(path: Path, timing: TimingConfig, version: EngineVersion | None = None) -> StepTimes:
    """Replay a recording with another engine's step times.

    Args:
        path: the recording.
        timing: the step times.
        version: of vLLM, whose rules apply (None: of the one that the recording names).

    Raises:
        RecordingError: it cannot be read or replayed, its engine is unknown, or no step was timed.
    """
    return _family_of(path, version).step_times(path, timing, version)


def _family_of(path: Path, version: EngineVersion | None) -> Family:
    """Find the family from whose engine a recording is; a version can be chosen only for vLLM's."""
    head = head_of(path)
    for family in FAMILIES.values():
        if family.is_from(head):
            if version is not None and family is not FAMILIES["vllm"]:
                raise RecordingError(
                    f"{path}: engine_version is {version}; expected none with a recording of {family.title}"
                )
            return family
    named = next(
        (key.removesuffix("_version") for key in head if key.endswith("_version")), "an engine that it does not name"
    )
    raise RecordingError(f"{path}: recorded from {named}; expected one of {', '.join(FAMILIES)}")
