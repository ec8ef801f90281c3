"""The mocker makes the steps that a real vLLM made."""

from collections import Counter
from pathlib import Path

import pytest

from dynabench.fidelity.vllm import recordings, replay
from mocker.models.kv_groups import LayerKv, layout_of

GOLDEN = Path(__file__).parent.parent.parent / "golden"
FILES = sorted(GOLDEN.glob("vllm-*/*.jsonl.gz"))
PLAIN = sorted((GOLDEN / "vllm-0.32").glob("*.jsonl.gz")) + sorted((GOLDEN / "vllm-0.32-full").glob("*.jsonl.gz"))


def test_the_recordings_are_here():
    by_folder = Counter(path.parent.name for path in FILES)
    assert by_folder == {"vllm-0.32": 16, "vllm-0.32-full": 36, "vllm-0.32-more": 55, "vllm-0.32-hybrid": 34}
    families = Counter(path.name.split("_")[0] for path in FILES if path.parent.name == "vllm-0.32-more")
    assert families == {"stop": 8, "pd": 14, "spec": 9, "offload": 9, "lora": 4, "pp": 6, "combo": 5}
    asynchronous = [path for path in FILES if recordings.read(path).config.async_scheduling]
    assert Counter(path.parent.name for path in asynchronous) == {
        "vllm-0.32-full": 12,
        "vllm-0.32-more": 27,
        "vllm-0.32-hybrid": 12,
    }


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
