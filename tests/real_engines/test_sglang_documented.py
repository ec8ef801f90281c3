"""What the documentation shows of `dynabench record --engine sglang` works as it is printed."""

import pytest

from tests.real_engines.documented import OF_SGLANG, run_all, scenario_in, section

pytestmark = pytest.mark.timeout(500)


def test_the_scenario_of_the_page_on_engines_is_recorded_and_verifies(tmp_path):
    text = section(*OF_SGLANG)
    (tmp_path / "scenario.json").write_text(scenario_in(text))
    assert "steps.jsonl.gz: matches SGLang" in run_all(text, tmp_path)
