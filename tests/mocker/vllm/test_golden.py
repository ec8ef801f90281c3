"""The mocker makes the steps that a real vLLM made."""

from pathlib import Path

import pytest

from dynabench.fidelity.vllm import recordings, replay
from mocker.models.kv_groups import LayerKv, layout_of

GOLDEN = Path(__file__).parent.parent.parent / "golden"
FILES = sorted(GOLDEN.glob("vllm-*/*.jsonl.gz"))
PLAIN = sorted((GOLDEN / "vllm-0.32").glob("*.jsonl.gz")) + sorted((GOLDEN / "vllm-0.32-full").glob("*.jsonl.gz"))


def test_the_recordings_are_here():
    assert len(FILES) == 16 + 24 + 12 + 9 + 14 + 9 + 34
    assert sum(recordings.read(path).config.async_scheduling for path in FILES) == 12 + 7 + 6 + 4 + 12


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_step_of_a_recording_reproduces(path):
    recording = recordings.read(path)
    verdict = replay.verify(recording)
    assert verdict.difference is None
    steps = [entry for entry in recording.entries if isinstance(entry, recordings.Scheduled)]
    assert verdict.num_steps == len(steps) > 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_step_reproduces_if_tokens_are_counted_in_each_of_them(path):
    assert replay.verify(recordings.read(path), is_counted=True).difference is None


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.name)
def test_every_step_reproduces_if_the_only_table_is_kept_as_a_group(path):
    recording = recordings.read(path)
    recording.layout = layout_of([LayerKv(4.0)], recording.config.block_size)
    assert replay.verify(recording).difference is None


def test_a_changed_recording_is_told_apart():
    recording = recordings.read(GOLDEN / "vllm-0.32" / "kv_pressure.jsonl.gz")
    steps = [entry for entry in recording.entries if isinstance(entry, recordings.Scheduled)]
    steps[7].facts["free_blocks"] += 1
    verdict = replay.verify(recording)
    assert verdict.difference["step"] == 7
    assert verdict.difference["what"] == "free_blocks"
