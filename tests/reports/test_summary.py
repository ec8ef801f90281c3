"""The summary: its shape in JSON, and what it says."""

import json
from pathlib import Path

import numpy as np
import pytest

from reports import folder
from reports.figures import slo
from reports.figures.metrics import Goodput
from reports.figures.outcomes import Outcome, binding, of_requests, state_of
from reports.summarize import summarize
from reports.tables.comparison import rows
from reports.verdicts import headline
from tests.reports.runs import run

BEFORE = Path(__file__).parent / "version_2"


def test_the_summary_has_the_keys_and_figures_it_had_before_it_had_a_type():
    manifest, runs = folder.read(BEFORE)
    made = summarize(runs, [], manifest["bound_s"]).as_json()
    assert made.pop("ranking")["compared"] == ["round-robin", "kv"]  # it had none
    for arm in made["arms"].values():
        del arm["split"]  # it had none
        assert "each of 4 workers had 3 requests" in arm["remarks"][0]  # it had none
        arm["remarks"] = []
    for difference in (one for names in made["differences"]["kv"].values() for one in names.values() if one):
        del difference["base"]
    before = json.loads((BEFORE / "summary.json").read_text())
    for name in ("verdict", "formulas"):  # their wording may change
        before[name] = made[name]
    assert json.dumps(made, indent=2) == json.dumps(before, indent=2)


def test_figures_that_need_limits_or_failures_are_left_out_without_them():
    plain = summarize([run()]).as_json()["arms"]["a"]
    assert not {"goodput", "outcomes"} & plain.keys()
    assert not {"adjusted_p90"} & plain["ttft_sched"].keys()
    limited = summarize([run(ttft=[1.0] * 4, error=["no", "", "", ""])], [slo.parse_slo("ttft <= 2s")])
    arm = limited.as_json()["arms"]["a"]
    assert arm["goodput"] == {"good": 3.0, "attempted": 4.0, "attainment": 0.75, "goodput_per_s": 3 / 13}
    assert arm["outcomes"] == []
    assert arm["ttft_sched"]["adjusted_p50"] == 1.0
    assert arm["errors"] == {"no": 1}


def test_figures_of_repeats_are_averaged_over_those_that_know_them():
    known, silent = run(cached_tokens=[50, 100]), run(cached_tokens=[None, None], repeat=1)
    arm = summarize([known, silent]).arms["a"]
    assert arm.repeats == 2
    assert arm.cache.hit_share == 0.75
    assert summarize([silent]).arms["a"].cache.hit_share is None


def test_preemptions_are_counted_or_taken_from_the_run_or_not_known():
    assert summarize([run(preemptions=[1, 2])]).arms["a"].preemptions == 3
    assert summarize([run(preemptions=[None, None])]).arms["a"].preemptions is None
    told = run(preemptions=[None, None], facts={"preemptions": 5.0})
    assert summarize([told]).arms["a"].preemptions == 5


def test_each_limit_of_a_run_is_met_or_missed_by_so_much_or_not_known():
    limits = [slo.parse_slo("ttft.p50 <= 1s"), slo.parse_slo("ttft.p99 <= 9s"), slo.parse_slo("tpot.mean <= 2s")]
    found = summarize([run(ttft=[1.5, 1.5])], limits).arms["a"].outcomes
    assert [str(outcome) for outcome in found] == [
        "missed by 50% (1,500 ms)",
        "not known: 2 samples; a p99 needs 368",
        "met by 50% (1,000 ms)",
    ]
    assert state_of(found) == "missed"
    assert state_of(found[1:]) == "unknown"
    assert binding(found) is found[0]
    assert binding(found[2:]) is found[2]


@pytest.mark.parametrize(
    ("late", "state"), [(0, "unknown"), (3, "unknown"), (7, "unknown"), (8, "missed"), (20, "missed")]
)
def test_a_limit_that_too_many_of_few_requests_exceed_is_missed_where_its_percentile_is_not_known(late, state):
    """Of 300, 3 may exceed a p99; 8 or more do in 1.2% of such samples, 7 or more in 3.3%."""
    limits = [slo.parse_slo("ttft.p99 <= 300ms")]
    [outcome] = summarize([run(ttft=[0.5] * late + [0.1] * (300 - late))], limits).arms["a"].outcomes
    assert outcome.state == state
    if state == "missed":
        assert outcome.reason == f"{late} of 300 requests exceed it, too many for a p99 within it"


def test_failed_requests_exceed_every_limit_of_few():
    runs = [run(ttft=[0.1] * 150, error=["refused"] * 5 + [""] * 145) for _ in range(2)]
    [outcome] = summarize(runs, [slo.parse_slo("ttft.p99 <= 300ms")]).arms["a"].outcomes
    assert outcome.reason == "10 of 300 requests exceed it, too many for a p99 within it"
    many = [run(ttft=[0.1] * 9000, error=["refused"] * 8900 + [""] * 100)]
    assert summarize(many, [slo.parse_slo("ttft.p99 <= 300ms")]).arms["a"].outcomes[0].state == "missed"


def test_gaps_that_exceed_a_limit_count_as_often_as_they_occur():
    gaps = np.array([[0.01, 0, 0, 90, 2], [0.2, 0, 0, 10, 2]])
    [outcome] = summarize([run(gaps=gaps)], [slo.parse_slo("itl.p99 <= 60ms")]).arms["a"].outcomes
    assert outcome.reason == "20 of 200 gaps exceed it, too many for a p99 within it"


def test_a_share_of_requests_binds_only_where_more_of_what_may_be_over_is_used_up():
    ttft = Outcome("ttft.p99 <= 1000 ms", "met", 0.7, 0.3)
    [most, few, short] = (
        of_requests([slo.parse_slo("e2e <= 9s")], Goodput(count, 1000, count / 1000, None), 0.99)
        for count in (998, 992, 980)
    )
    assert [round(one.headroom, 4) for one in (most, few, short)] == [0.8, 0.2, -0.0101]
    assert [binding([ttft, one]) is ttft for one in (most, few, short)] == [True, False, False]
    assert str(most) == "met with 99.80%"


def test_a_limit_that_is_met_by_a_hair_is_not_met_by_nothing():
    (found,) = summarize([run(ttft=[0.9994] * 2)], [slo.parse_slo("ttft.p50 <= 1s")]).arms["a"].outcomes
    assert str(found) == "met by 0.06% (999.4 ms)"


def test_a_limit_is_missed_where_the_failed_requests_would_miss_it():
    failed = run(ttft=[0.1, 0.1, 0.1], error=["", "no", "no"])
    (found,) = summarize([failed], [slo.parse_slo("ttft.p50 <= 1s")]).arms["a"].outcomes
    assert str(found) == "missed: too many requests failed"


def test_an_arm_that_was_never_compared_has_no_difference():
    summary = summarize([run("a"), run("b")])
    assert summary.difference("a", "ttft_sched", "mean") is None
    assert summary.difference("b", "throughput", "mean") is None
    assert summary.difference("b", "ttft_sched", "mean").mean == 0.0


def test_nothing_that_succeeded_is_said_so():
    failed = run(error=["no", "no"])
    assert summarize([failed, run("b", error=["no", "no"])]).verdict == "No request succeeded."


@pytest.mark.parametrize(("notes", "is_valid"), [((), True), (("late",), False)])
def test_a_spoiled_run_makes_the_summary_invalid(notes, is_valid):
    summary = summarize([run(notes=notes)])
    assert summary.is_valid is is_valid
    assert summary.verdict.startswith("This run is not valid") is not is_valid


def test_how_answers_ended_is_counted_where_it_is_known():
    by_eos = run(ttft=(1.0,) * 4, finish_reason=["stop", "stop", "length", ""])
    summary = summarize([by_eos])
    assert summary.arms["a"].ends == {"stop": 2, "length": 1}
    assert dict(rows(summary))["answers ended by EOS"] == ["66.7%"]
    by_length = summarize([run(finish_reason=["length", "length"])])
    assert "answers ended by EOS" not in dict(rows(by_length))
    assert not summarize([run()]).arms["a"].ends


def test_arms_whose_answers_ended_in_other_ways_are_told_apart():
    by_length, by_eos = (run(arm, finish_reason=[reason] * 2) for arm, reason in (("a", "length"), ("b", "stop")))
    said = "Answers ended differently: by length in a; by EOS in b."
    assert said in summarize([by_length, by_eos]).verdict
    assert "did not end alike" not in summarize([by_length, run("b", finish_reason=["length"] * 2)]).verdict
    assert "did not end alike" not in summarize([by_length, run("b")]).verdict


def test_what_is_attained_is_of_the_limits_of_each_request():
    waits = run(ttft=[1.0, 1.0, 1.0, 5.0])
    limits = [slo.parse_slo("ttft <= 2s"), slo.parse_slo("e2e.p50 <= 1ms")]
    found = summarize([waits], limits).arms["a"].goodput
    assert (found.attainment, found.good) == (0.75, 0)


def test_a_remark_on_all_arms_is_made_once():
    many = {"ttft": [0.1] * 60, "last_token_s": np.arange(60) + 1.0, "done_s": np.arange(60) + 1.0}
    known, unknown = run("a", **many), [run(name, facts={"without_gpu": 1.0}, **many) for name in ("b", "c")]
    (of_each,) = headline.remarks(summarize(unknown))
    assert of_each.startswith("each arm: its step times")
    assert headline.remarks(summarize([known, *unknown])) == [of_each.replace("each arm", "each of b and c")]
    assert headline.remarks(summarize(unknown[:1]))[0].startswith("b: ")


def test_errors_are_merged_only_if_they_refuse_requests_beyond_the_same_context():
    beyond = "HTTP 400: this model's maximum context length is {} tokens; the request has {} prompt tokens"
    errors = [
        "HTTP 429: x",
        "HTTP 500: x",
        "HTTP 500: x",
        beyond.format(64, 70),
        beyond.format(64, 80),
        beyond.format(32, 80),
    ]
    arm = summarize([run(ttft=[1.0] * 6, error=errors)]).arms["a"]
    assert arm.errors == {
        "HTTP 429: x": 1,
        "HTTP 500: x": 2,
        beyond.format(64, 70): 2,
        beyond.format(32, 80): 1,
    }


def test_what_is_many_times_a_limit_is_told_as_a_multiple():
    missed = Outcome("ttft p95 <= 1.5s", "missed", value=2318.3, margin=1 - 2318.3 / 1.5)
    assert str(missed) == "missed by 1,545 times (2,318,300 ms)"
