"""The mocker makes the steps that a real SGLang made."""

from pathlib import Path

import pytest

from dynabench.fidelity import families
from dynabench.fidelity.sglang import recordings, replay

GOLDEN = Path(__file__).parent.parent.parent / "golden" / "sglang-0.5"
MORE = GOLDEN.with_name("sglang-0.5-more")
"""What the others do not pin: requests without output, some policies and limits."""
HICACHE = GOLDEN.with_name("sglang-0.5-hicache")
"""Random scenarios with host memory, in which copies end some steps after they began."""
FILES = [*sorted(GOLDEN.glob("*.jsonl.gz")), *sorted(MORE.glob("*.jsonl.gz"))]
HOSTED = sorted(HICACHE.glob("*.jsonl.gz"))


def test_the_recordings_are_here():
    assert len(FILES) == 52 + 15
    assert len(HOSTED) == 11
    assert sum(recordings.read(path).config.is_async for path in FILES) == 11 + 7


@pytest.mark.parametrize("path", [*FILES, *HOSTED], ids=lambda path: path.name)
def test_every_step_of_a_recording_reproduces(path):
    verdict = families.verify(path)
    assert verdict.difference is None
    assert verdict.num_steps == len(recordings.read(path).iterations) > 0


@pytest.mark.parametrize("what", ["kind", "reqs", "waiting", "requeued", "full", "free", "evictable", "ratio"])
def test_a_changed_recording_is_told_apart(what):
    recording = recordings.read(GOLDEN / "retract_p1.jsonl.gz")
    facts = recording.iterations[100].scheduled
    facts[what] = [facts[what], "changed"]
    verdict = replay.verify(recording)
    assert (verdict.difference["step"], verdict.difference["what"]) == (100, what)


@pytest.mark.parametrize("what", ["free", "evictable", "host_free", "reqs"])
def test_a_changed_recording_with_host_memory_is_told_apart(what):
    recording = recordings.read(HICACHE / "through_p16.jsonl.gz")
    facts = recording.iterations[60].scheduled
    facts[what] = [facts[what], "changed"]
    verdict = replay.verify(recording)
    assert (verdict.difference["step"], verdict.difference["what"]) == (60, what)


@pytest.mark.parametrize("what", ["tokens", "finished", "aborted", "free_after", "evictable_after", "ratio_after"])
def test_a_changed_result_is_told_apart(what):
    recording = recordings.read(GOLDEN / "ov_retract.jsonl.gz")
    facts = recording.iterations[100].processed
    facts[what] = [facts[what], "changed"]
    verdict = replay.verify(recording)
    assert (verdict.difference["step"], verdict.difference["what"]) == (100, what)


def test_a_changed_event_is_told_apart():
    recording = recordings.read(GOLDEN / "salt.jsonl.gz")
    iteration = next(each for each in recording.iterations if each.events)
    iteration.events[0]["hashes"][0] += 1
    verdict = replay.verify(recording)
    assert (verdict.difference["step"], verdict.difference["what"]) == (iteration.number, "events")
