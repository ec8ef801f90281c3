"""The mocker makes the steps that TensorRT-LLM's scheduler classes made."""

import pytest

from dynabench.fidelity import families
from dynabench.fidelity.trtllm import recordings, replay
from tests.mocker.trtllm.golden import FILES, GOLDEN


def test_the_recordings_are_here():
    assert len(FILES) == 67


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_field_of_every_step_of_a_recording_reproduces(path):
    recording = recordings.read(path)
    verdict = replay.verify(recording)
    assert verdict.difference is None
    assert verdict.num_steps == len(recording.steps) > 0


def test_a_changed_recording_is_told_apart():
    recording = recordings.read(GOLDEN / "gne_tight.jsonl.gz")
    recording.steps[7]["fit"] += 1
    verdict = replay.verify(recording)
    assert verdict.difference is not None
    assert (verdict.num_steps, verdict.difference["step"], verdict.difference["what"]) == (7, 7, "fit")


def test_a_field_that_only_one_side_has_is_a_difference():
    recording = recordings.read(GOLDEN / "adp2_balance.jsonl.gz")
    recording.steps[6]["ranks"][1].pop("held")
    verdict = replay.verify(recording)
    assert verdict.difference == {"step": 6, "what": "held of rank 1", "trtllm": None, "mocker": True}


def test_the_family_of_a_recording_is_found():
    assert families.verify(GOLDEN / "gne_tight.jsonl.gz").engine == "trtllm"
