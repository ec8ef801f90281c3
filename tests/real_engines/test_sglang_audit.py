"""The installed SGLang's scheduler as judge: audits of random scenarios, of a trace, and of requests that are aborted."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dynabench.fidelity.audit.run import audit
from dynabench.fidelity.audit.scenarios import sglang_scenario
from dynabench.installed.process import scheduler_process
from foundation.errors import UserError
from mocker import SglangConfig
from mocker.installed.settings import sglang_settings
from tests.installed.test_audit import contended
from tests.installed.test_sglang_audit import TIGHT, rows_with_aborts, settings
from tests.support.workloads import conversations

pytestmark = pytest.mark.timeout(600)
NUM_SCENARIOS = 6


@pytest.fixture(scope="module")
def process():
    with scheduler_process(sys.executable, "sglang") as process:
        yield process


def test_random_scenarios_are_identical(process):
    num_preemptions = 0
    for seed in range(NUM_SCENARIOS):
        found = audit(*sglang_scenario(seed), process)
        assert found.difference is None, f"scenario {seed}: {found.difference}, {found.explanations}"
        num_preemptions += int(found.left.record.requests.preemptions.sum())
    assert num_preemptions > 0


def test_a_trace_is_identical_with_routers_that_look_at_caches(process):
    engine = SglangConfig(page_size=16, max_total_tokens=24_000, chunked_prefill_size=2048)
    found = audit(settings("kv", 2, engine), conversations(40), process)
    assert found.difference is None
    assert found.right.num_steps > 300
    assert [cost.left for cost in found.costs] == [cost.right for cost in found.costs]


@pytest.mark.parametrize("changes", [{}, {"enable_mixed_chunk": True, "chunked_prefill_size": 16}])
def test_aborted_requests_end_in_the_same_steps(process, changes):
    config = replace(TIGHT, max_total_tokens=400, **changes)
    ours, theirs = (rows_with_aborts(config, 1, each) for each in (None, process.new_scheduler))
    process.forget()
    assert ours == theirs


@pytest.mark.parametrize(("seed", "has_overlap"), [(10, False), (11, True), (11, False), (13, True)])
def test_requests_that_are_aborted_and_retracted_at_once_stay_over(process, seed, has_overlap):
    config = replace(TIGHT, max_total_tokens=160, new_token_ratio_decay_steps=1)
    config = replace(config, disable_overlap_schedule=not has_overlap)
    ours, theirs = (rows_with_aborts(config, seed, each, num_blocks=40) for each in (None, process.new_scheduler))
    process.forget()
    assert ours == theirs


def test_engines_leave_no_folder_and_one_that_cannot_be_made_ends(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    given = sglang_settings(TIGHT, 200, kv_events=False)
    with scheduler_process(sys.executable, "sglang") as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        process.new_scheduler(given)
        with pytest.raises(UserError, match="failed"):
            process.new_scheduler(given | {"max_running_requests": -1})
        assert (len(children.read_text().split()), len([*tmp_path.iterdir()])) == (1, 1)
        process.forget()
        assert [*tmp_path.iterdir()] == []
        process.new_scheduler(given)
    assert [*tmp_path.iterdir()] == []


def test_a_setting_that_is_changed_is_found_and_named(process):
    class Wrong:
        engine, release, forget = process.engine, process.release, process.forget

        @staticmethod
        def new_scheduler(given):
            return process.new_scheduler(given | {"enable_mixed_chunk": True})

    found = audit(settings(), contended(20), Wrong())
    assert found.difference is not None
    assert found.explanations[0].rule == "enable_mixed_chunk"
    assert found.explanations[0].difference is None
