"""Recordings of a real vLLM scheduler: the calls it received, what it scheduled, and the output of each step.

Two formats are read: `compact` and `traces`.
"""

from pathlib import Path

from dynabench.fidelity.recordings import MALFORMED, RecordingError, is_head, rows_of, why_unreadable
from dynabench.fidelity.vllm.compact import read_compact
from dynabench.fidelity.vllm.entries import Recording, Scheduled
from dynabench.fidelity.vllm.traces import read_trace
from mocker.vllm.versions import EngineVersion


def read(path: Path, version: EngineVersion | None = None) -> Recording:
    """Read a recording in either format, to be replayed with the rules of a version (None: of the one that it names).

    Raises:
        RecordingError: the file is not a recording, or uses a feature that the mocker does not model, or its version is not
            known.
    """
    try:
        rows = list(rows_of(path))
        if not rows:
            raise RecordingError(f"{path}: the file is empty")
        if is_head(rows[0], "scenario"):
            recording = read_compact(path, rows, version)
        elif is_head(rows[0], "op"):
            recording = read_trace(path, rows, version)
        else:
            raise RecordingError(f"{path}: expected a first line with `scenario` or `op: meta`")
    except MALFORMED as error:
        raise RecordingError(f"{path}: cannot be read as a recording ({why_unreadable(error)})") from error
    if not any(isinstance(entry, Scheduled) for entry in recording.entries):
        raise RecordingError(f"{path}: contains no steps")
    return recording
