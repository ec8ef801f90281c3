"""What `dynabench record --engine sglang` does without SGLang: it reads scenarios, and says what it recorded."""

import json
import os

import pytest

from dynabench.cli.fidelity import record as record_command
from dynabench.fidelity.recordings import RecordingError
from dynabench.fidelity.sglang import real, record
from dynabench.fidelity.sglang.record import read_scenario

ADD = {"op": "add", "before_step": 0, "id": "a", "prompt": [5, 6], "max_new_tokens": 3}


def written(folder, scenario):
    path = folder / "scenario.json"
    path.write_text(json.dumps(scenario))
    return path


def test_a_scenario_is_read_as_it_was_written(tmp_path):
    scenario = {
        "name": "all",
        "config": {"page_size": 1, "scheduler_recv_interval": 1},
        "actions": [
            ADD | {"eos_at": 2, "priority": None},
            {"op": "abort", "before_step": 1, "id": "a"},
            {"op": "flush", "before_step": 2},
            {"op": "end_copy", "before_step": 3, "direction": "store"},
        ],
    }
    assert read_scenario(written(tmp_path, scenario)) == scenario


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ([], "Expected `object`, got `array`; expected as in docs/engines.md"),
        ({"actions": []}, "missing required field `config`"),
        ({"config": {}, "actions": {}}, r"Expected `array`, got `object` - at `\$.actions`"),
        ({"config": {}, "actions": [{"op": "pause", "before_step": 0}]}, "Invalid value 'pause'"),
        ({"config": {}, "actions": [{"before_step": 0}]}, "missing required field `op`"),
        ({"config": {}, "actions": [{"op": "flush"}]}, "missing required field `before_step`"),
        ({"config": {}, "actions": [{"op": "abort", "before_step": 0}]}, "missing required field `id`"),
        (
            {"config": {}, "actions": [ADD, {"op": "add", "before_step": 0, "id": "b"}]},
            r"`prompt` - at `\$.actions\[1\]",
        ),
        ({"config": {}, "actions": [ADD | {"prompt": ["hello"]}]}, "Expected `int`, got `str`"),
        (
            {"config": {"scheduler_recv_interval": 10}, "actions": []},
            "scheduler_recv_interval is 10; expected 1, because",
        ),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_sglang_is_loaded(tmp_path, scenario, message):
    with pytest.raises(RecordingError, match=message) as caught:
        read_scenario(written(tmp_path, scenario))
    assert str(caught.value).startswith(str(tmp_path / "scenario.json"))


def test_a_process_has_one_scheduler(monkeypatch, tmp_path):
    monkeypatch.setattr(real.RealScheduler, "is_made", True)
    with pytest.raises(RecordingError, match="this process has had a scheduler of SGLang"):
        real.RealScheduler(tmp_path, {})


def test_only_what_a_scenario_sets_is_in_the_environment(monkeypatch):
    monkeypatch.setenv("SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS", "7")
    monkeypatch.setenv("SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP", "1")
    before = dict(os.environ)
    with real.environment({"no_consecutive": True, "page_size": 4}):
        assert "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS" not in os.environ
        assert os.environ["SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP"] == "1"
    with real.environment({"decay_steps": 20}):
        assert os.environ["SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS"] == "20"
        assert "SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP" not in os.environ
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("waiting", "ending"), [([], "2 steps\n"), (["a", "b"], "2 steps; 2 requests still wait, which never run\n")]
)
def test_requests_that_wait_forever_are_reported(monkeypatch, tmp_path, capsys, waiting, ending):
    rows = [{"waiting": []}, {"waiting": waiting}]
    monkeypatch.setattr(record, "recorded", lambda _: ({"scenario": {}}, rows))
    path = written(tmp_path, {"config": {}, "actions": []})
    record_command(scenario=path, out=tmp_path / "steps.jsonl", engine="sglang")
    assert capsys.readouterr().out.endswith(f"steps.jsonl: {ending}")
