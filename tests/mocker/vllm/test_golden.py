"""The mocker makes the steps that a real vLLM made."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from dynabench.fidelity.vllm import recordings, replay
from dynabench.fidelity.vllm.entries import Action, Ended, Scheduled, Updated
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
        "vllm-0.32-media": 5,
        "vllm-0.33-media": 5,
    }
    asynchronous = [path for path in FILES if recordings.read(path).config.async_scheduling]
    assert Counter(path.parent.name for path in asynchronous) == {
        "vllm-0.32-full": 12,
        "vllm-0.32-more": 27,
        "vllm-0.33": 18,
        "vllm-0.32-hybrid": 12,
        "vllm-0.32-media": 2,
        "vllm-0.33-media": 2,
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


@pytest.mark.parametrize("folder", ["vllm-0.32-media", "vllm-0.33-media"])
def test_without_its_images_or_with_others_a_recording_does_not_reproduce(folder):
    for forget in (lambda media: (), lambda media: tuple(item._replace(id="same") for item in media)):
        differences = []
        for path in sorted((GOLDEN / folder).glob("*.jsonl.gz")):
            recording = recordings.read(path)
            for entry in recording.entries:
                if isinstance(entry, Action):
                    entry.media = forget(entry.media)
            differences.append(replay.verify(recording).difference)
        assert None not in differences


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_step_of_a_recording_reproduces(path):
    recording = recordings.read(path)
    verdict = replay.verify(recording)
    assert verdict.difference is None
    steps = [entry for entry in recording.entries if isinstance(entry, Scheduled)]
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
    steps = [entry for entry in recording.entries if isinstance(entry, Scheduled)]
    steps[7].facts["free_blocks"] += 1
    verdict = replay.verify(recording)
    assert verdict.difference["step"] == 7
    assert verdict.difference["what"] == "free_blocks"


def test_events_of_another_group_are_told_apart():
    recording = recordings.read(GOLDEN / "vllm-0.32-hybrid" / "swa_dev1.sched.jsonl.gz")
    updated = next(entry for entry in recording.entries if isinstance(entry, Updated) and entry.events)
    event = updated.events[0]
    updated.events[0] = event._replace(kind=event.kind.replace("group 0", "group 1"))
    assert updated.events[0] != event
    assert replay.verify(recording).difference["what"] == "events"


def lora(recording):
    """Return the first event that names an adapter."""
    return next(event for event in events(recording) if event.facts["lora_name"])


def events(recording):
    updates = [entry for entry in recording.entries if isinstance(entry, Updated)]
    return [event for entry in updates for event in entry.events if event.kind.startswith("stored")]


def of(recording, kind):
    return [entry for entry in recording.entries if isinstance(entry, kind)]


def rename_adapter(recording):
    lora(recording).facts["lora_name"] = "another"


def renumber_adapter(recording):
    lora(recording).facts["lora_id"] += 1


def forget_adapter_in_keys(recording):
    lora(recording).facts["extra_keys"] = None


def change_tokens(recording):
    events(recording)[3].facts["token_ids"][5] += 1


def change_parent(recording):
    event = next(event for event in events(recording) if event.facts["parent_block_hash"] is None)
    event.facts["parent_block_hash"] = events(recording)[0].hashes[0]


def compute_one_more(recording):
    cached = next(entry.facts["cached"] for entry in of(recording, Scheduled) if len(entry.facts["cached"]) > 2)
    next(iter(cached.values()))[0] += 1


def say_one_more(recording):
    cached = next(entry.facts["cached"] for entry in of(recording, Scheduled) if len(entry.facts["cached"]) > 2)
    next(iter(cached.values()))[1] += 1


def preempt_once_more(recording):
    of(recording, Ended)[4].facts["num_preemptions"] += 1


def end_otherwise(recording):
    of(recording, Ended)[4].facts["status"] = "FINISHED_ABORTED"


def swap_cached_blocks(recording):
    """Swap the last two of a free queue, of which the last cached contents."""
    queue = next(e.facts["free_queue"] for e in of(recording, Scheduled) if e.number > 150)
    queue[-1], queue[-2] = queue[-2], queue[-1]


def name_block_otherwise(recording):
    action = next(action for action in of(recording, Action) if len(action.hashes) > 1)
    action.hashes[0], action.hashes[1] = action.hashes[1], action.hashes[0]


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (rename_adapter, "lora_name of stored blocks"),
        (renumber_adapter, "lora_id of stored blocks"),
        (forget_adapter_in_keys, "extra_keys of stored blocks"),
        (change_tokens, "token_ids of stored blocks"),
        (change_parent, "parent_block_hash of stored blocks"),
        (compute_one_more, "cached"),
        (say_one_more, "cached"),
        (preempt_once_more, "num_preemptions"),
        (end_otherwise, "status"),
        (swap_cached_blocks, "free_queue"),
        (name_block_otherwise, "content of stored blocks"),
    ],
)
def test_what_vllm_says_beside_its_schedule_is_compared(edit, what):
    recording = recordings.read(GOLDEN / "vllm-0.32-more" / "lora_dev3.sched.jsonl.gz")
    assert replay.verify(recording).difference is None
    edit(recording)
    assert replay.verify(recording).difference["what"] == what


def test_what_a_recording_has_and_nothing_is_compared_with_is_named():
    verdict = replay.verify(recordings.read(GOLDEN / "vllm-0.32-more" / "pd_decode_dev2.sched.jsonl.gz"))
    expected = {f"schedule.{field}" for field in ("new.block_ids", "cached.new_block_ids")}
    assert set(verdict.not_compared) == expected | {
        "schedule.kv_meta.recv.await",
        "schedule.kv_meta.recv.block_ids",
        "schedule.deferred_free",
        "update.deferred_free",
        "schedule.matched",
    }
    assert replay.verify(recordings.read(GOLDEN / "vllm-0.32-hybrid" / "swa_dev1.sched.jsonl.gz")).not_compared == ()
