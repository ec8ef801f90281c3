"""The times of a recording's steps beside simulated ones."""

from collections import deque
from dataclasses import replace

from dynabench.fidelity.recordings import RecordingError
from dynabench.fidelity.vllm.entries import Action, Recording, Scheduled, Updated
from dynabench.fidelity.vllm.sequences import act
from mocker import Sequence
from mocker.batch import Batch
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from mocker.timing.model import Prefill, TimingModel, chunk
from mocker.vllm.core import VllmCore


def step_times(recording: Recording, timing: TimingConfig) -> list[tuple[bool, float, float]]:
    """Replay a recording with another engine's step times.

    Returns:
        for each timed step: whether it had prefill, its recorded time, and its simulated time (s).

    Raises:
        RecordingError: no step was timed.
    """
    for what, is_so in (
        ("speculation", recording.config.num_speculative_tokens > 0),
        ("several pipeline stages", recording.num_stages > 1),
        ("groups of layers", recording.layout is not None),
    ):
        if is_so:
            raise RecordingError(
                f"{recording.path}: it has {what}, with which times are not compared; expected a recording without"
            )
    # Timed steps never overlapped when they were recorded, even if scheduling was asynchronous.
    simulated = resolve(replace(recording.config, async_scheduling=False), timing)
    scheduler = VllmCore(recording.config, simulated.num_blocks)
    sequences: dict[str, Sequence] = {}
    in_flight, found = deque[tuple[Batch | None, float]](), []
    for entry in recording.entries:
        if isinstance(entry, Action):
            act(scheduler, sequences, entry, recording.config.block_size)
        elif isinstance(entry, Scheduled):
            batch = scheduler.schedule()
            expected_s = 0.0 if batch is None else _duration(simulated.timing, batch, scheduler.iteration - 1)
            in_flight.append((batch, expected_s))
        elif isinstance(entry, Updated):
            batch, expected_s = in_flight.popleft()
            if batch is None:
                continue
            if entry.duration_s is not None and not batch.is_empty:
                found.append((bool(batch.chunks), entry.duration_s, expected_s))
            scheduler.update(batch)
    if not found:
        raise RecordingError(
            f"{recording.path}: contains no times; record it again with `dynabench record`, which includes them"
        )
    return found


def _duration(timing: TimingModel, batch: Batch, iteration: int) -> float:
    """Return the time of a scheduled batch in an iteration; a batch of decodes covers several iterations in a row."""
    num_decodes = len(batch.decodes)
    num_kv_tokens = batch.num_kv_tokens + num_decodes * (iteration - batch.iteration)
    if batch.is_empty:
        return 0.0
    if not batch.chunks:
        return timing.decode(num_decodes, num_kv_tokens).first
    parts = [chunk(count, sequence.num_computed - count) for sequence, count in batch.chunks]
    return timing.mixed(Prefill(*map(sum, zip(*parts, strict=True))), num_decodes, num_kv_tokens)
