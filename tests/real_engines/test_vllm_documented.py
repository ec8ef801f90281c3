"""What the documentation shows of `dynabench record` works as it is printed."""

import json

import pytest

from tests.real_engines.documented import OF_ONES_OWN_VLLM, OF_VLLM, ROOT, run_all, scenario_in, section

pytestmark = pytest.mark.timeout(500)


def test_the_scenario_of_the_page_on_engines_is_recorded_and_verifies(tmp_path):
    text = section(*OF_VLLM)
    (tmp_path / "scenario.json").write_text(scenario_in(text))
    assert "steps.jsonl.gz: matches vLLM" in run_all(text, tmp_path)
    assert json.loads(scenario_in(text))["engine"]["async_scheduling"] is True


def test_a_recording_of_ours_is_repeated_by_the_installed_vllm(tmp_path):
    (tmp_path / "recordings").symlink_to(ROOT / "tests" / "golden" / "vllm-0.32")
    text = section(*OF_ONES_OWN_VLLM)
    assert "mine.jsonl.gz: matches vLLM" in run_all(text, tmp_path)
