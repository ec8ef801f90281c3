"""The mocker makes the steps that a real vLLM made."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from dynabench.fidelity.vllm import recordings, replay
from mocker.models.kv_groups import LayerKv, layout_of

GOLDEN = Path(__file__).parent.parent.parent / "golden"
FILES = sorted(GOLDEN.glob("vllm-*/*.jsonl.gz"))
PLAIN = sorted((GOLDEN / "vllm-0.32").glob("*.jsonl.gz")) + sorted((GOLDEN / "vllm-0.32-full").glob("*.jsonl.gz"))


def test_the_recordings_are_here():
    assert Counter(path.parent.name for path in FILES) == {
        "vllm-0.32": 16,
        "vllm-0.32-full": 36,
        "vllm-0.32-more": 55,
        "vllm-0.33": 37,
        "vllm-0.32-hybrid": 34,
    }
    asynchronous = [path for path in FILES if recordings.read(path).config.async_scheduling]
    assert Counter(path.parent.name for path in asynchronous) == {
        "vllm-0.32-full": 12,
        "vllm-0.32-more": 27,
        "vllm-0.33": 18,
        "vllm-0.32-hybrid": 12,
    }


def test_a_recording_follows_the_rules_of_the_version_that_it_names():
    versions = {path.parent.name: recordings.read(path).config.engine_version for path in FILES}
    assert versions == {folder: folder[5:9] for folder in versions}


@pytest.mark.parametrize(
    "name",
    ["lora33_dev1", "interval33_dev1", "offlru33_dev1", "offsync33_dev1", "prio33_dev2", "spec33_dev1", "eagle33_dev1"],
)
def test_with_the_rules_of_another_version_a_recording_does_not_reproduce(name):
    recording = recordings.read(GOLDEN / "vllm-0.33" / f"{name}.sched.jsonl.gz")
    if recording.offloading is not None:
        recording.offloading = replace(recording.offloading, load_tokens_within_step=0)
    recording.config = replace(recording.config, engine_version="0.32", prefill_schedule_interval=1)
    assert replay.verify(recording).difference is not None


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


def test_events_of_another_group_are_told_apart():
    recording = recordings.read(GOLDEN / "vllm-0.32-hybrid" / "swa_dev1.sched.jsonl.gz")
    updated = next(entry for entry in recording.entries if isinstance(entry, recordings.Updated) and entry.events)
    kind, hashes = updated.events[0]
    updated.events[0] = (kind.replace("group 0", "group 1"), hashes)
    assert kind != updated.events[0][0]
    assert replay.verify(recording).difference["what"] == "events"
