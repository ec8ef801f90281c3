"""Which arm is best among many: limits, then the arms that tie, then the next metric."""

import re

import numpy as np
import pytest
from msgspec import UNSET, structs

from reports.figures import slo
from reports.figures.outcomes import Outcome
from reports.figures.statistics import blocks_of, student_t
from reports.summarize import summarize
from reports.sweep import report as sweep_report
from reports.sweep.best_point import best_of, series
from reports.verdicts.differences import judged
from reports.verdicts.simultaneous import critical_value, lowest, parts_of
from tests.reports.runs import run
from tests.reports.test_sweep_report import MANIFEST, found_at, point, searched
from tests.reports.test_tier_report import HOST

COUNT = 2000
MISSED = Outcome("ttft.p90 <= 1000 ms", "missed", 2.0, -1.0)


def noisy(seed=0, offset=0.0, base=None):
    """Times of equal arms: the same requests, each with noise of its own that lasts for a lifetime."""
    rng = np.random.default_rng(seed)
    base = np.random.default_rng(99).lognormal(0, 0.5, COUNT) if base is None else base
    return base + np.repeat(rng.normal(0, 0.1, COUNT // 10), 10) + rng.normal(0, 0.3, COUNT) + 2 + offset


def arm(name, ttft, tpot=1.0, **changes):
    """Requests with so long a TTFT, and ten tokens with so long between two."""
    ttft = np.asarray(ttft, float)
    last = np.arange(len(ttft)) + ttft + 9 * np.asarray(tpot, float)
    return run(name, ttft=ttft, **{"last_token_s": last, "done_s": last} | changes)


def judge(pair):
    return judged(pair, None, smallest=1e-9)


def test_equal_arms_all_tie_and_the_best_is_never_left_out_in_95_of_100_experiments():
    """One by one against the best, some of eight equal arms would be left out in about half of the experiments."""
    blocks = blocks_of(np.arange(float(COUNT)), np.full(COUNT, 10.0))
    not_all = left_out = one_by_one = 0
    for experiment in range(60):
        base = np.random.default_rng(experiment).lognormal(0, 1, COUNT)
        arms = {str(seed): noisy(1000 * experiment + seed, base=base) for seed in range(8)}
        ties, found = lowest(parts_of(arms, blocks), judge)
        not_all += len(ties) < 8
        spread = critical_value(list(parts_of(arms, blocks).values()))
        alone = student_t(len(set(blocks)) - 1) / spread
        one_by_one += any(pair.mean > alone * (pair.high - pair.mean) for pair in found.values())
        arms["0"] = arms["0"] - 0.005  # the truly best, by less than can be seen
        arms["7"] = arms["7"] + 1
        ties, _ = lowest(parts_of(arms, blocks), judge)
        left_out += "0" not in ties
        assert "7" not in ties
    assert not_all <= 7  # 3 expected
    assert left_out <= 7
    assert one_by_one > 15


def test_the_critical_value_of_two_arms_is_that_of_a_single_comparison():
    blocks = np.arange(COUNT) // 100
    parts = parts_of({str(seed): noisy(seed) for seed in range(8)}, blocks)
    assert critical_value(list(parts.values())[:2]) == student_t(19)
    assert student_t(19) * 1.5 < critical_value(list(parts.values())) < student_t(19) * 2


def test_arms_that_are_equal_do_not_count_as_more_arms():
    blocks = np.arange(COUNT) // 100
    one, two = noisy(1), noisy(2)
    parts = parts_of({"a": one, "b": two, "c": two.copy(), "d": one.copy()}, blocks)
    assert critical_value(list(parts.values())) == pytest.approx(student_t(19), rel=0.05)


def test_a_hundred_arms_are_ranked_as_few_are():
    blocks = np.arange(COUNT) // 50
    arms = {str(n): noisy(n, offset=0.0 if n < 3 else n / 10) for n in range(100)}
    ties, found = lowest(parts_of(arms, blocks), judge)
    assert sorted(ties) == ["0", "1", "2"]
    assert len(found) == 99


def in_two_rounds():
    """Six arms far behind, and one that is behind by less than all eight together can show, but by more than two can."""
    blocks = np.arange(COUNT) // 100
    first, second = noisy(1) - 1.5, noisy(2) - 1.5
    apart = second - first
    error = np.std([apart[blocks == block].mean() for block in range(20)], ddof=1) / np.sqrt(20)
    return {"a": first, "b": second - apart.mean() + 2.6 * error} | {
        f"far{n}": noisy(n) + 5 for n in range(3, 9)
    }, blocks


def test_an_arm_that_leaves_after_others_keeps_the_interval_for_all_arms_together():
    arms, blocks = in_two_rounds()
    parts = parts_of(arms, blocks)
    ties, found = lowest(parts, judge)
    assert (ties, found["b"].verdict) == (["a"], "worse")
    alone = lowest({arm: parts[arm] for arm in ("a", "b")}, judge)[1]["b"]
    wider = critical_value(list(parts.values())) / student_t(19)
    assert found["b"].high - found["b"].mean == pytest.approx(wider * (alone.high - alone.mean), rel=0.05)
    assert found["b"].low < 0 < alone.low


def test_an_interval_for_all_arms_that_includes_zero_is_explained():
    arms, _ = in_two_rounds()
    verdict = summarize([arm(name, ttft) for name, ttft in arms.items()]).verdict
    said = r"a has the lowest mean TTFT of 8 arms, by \S+ ms \(\S+%\) against the next, b \(95% interval -\S+ to \S+ ms, paired by "
    said += r"request, for all 8 arms together\), which is more than noise once the arms that are clearly worse are left out\."
    assert re.search(said, verdict), verdict


def test_many_arms_without_requests_in_common_are_all_meant():
    failed = [["no" if n % 4 == place else "" for n in range(8)] for place in range(4)]
    summary = summarize([arm(name, [1.0] * 8, error=its) for name, its in zip("abcd", failed, strict=True)])
    assert "The compared arms have too few requests in common to compare their times." in summary.verdict


def test_among_many_arms_those_that_tie_are_named_and_the_next_metric_decides():
    runs = [
        arm("a", noisy(1), 1.1),
        arm("b", noisy(2), 1.0),
        arm("c", noisy(5), 1.05),
        arm("slow", noisy(4) + 2, 1.0),
    ]
    summary = summarize(runs)
    first, second = summary.ranking.steps
    assert sorted(first.ties) == ["a", "b", "c"]
    assert first.differences["slow"].verdict == "worse"
    assert (second.metric, second.ties) == ("tpot", ["b"])
    assert (summary.ranking.winner, summary.ranking.ties) == ("b", ["b"])
    assert " tie for the lowest mean TTFT of 4 arms: they differ by at most " in summary.verdict
    assert "; the next, slow, is " in summary.verdict
    assert "Of these, b has the lowest mean TPOT, by " in summary.verdict
    assert "the lower" not in summary.verdict


def test_one_best_arm_of_many_has_the_lowest_time_and_what_it_costs_is_said():
    summary = summarize([arm("a", noisy(1), 1.0), arm("b", noisy(2), 1.0), arm("c", noisy(3) - 1, 1.1)])
    assert "c has the lowest mean TTFT of 3 arms, by " in summary.verdict
    assert "has the lowest mean TPOT of 3 arms: c takes 100 ms (10.0%) more." in summary.verdict
    assert summary.ranking.winner == "c"


def test_arms_that_tie_in_everything_have_no_winner():
    summary = summarize([arm(name, noisy(seed)) for seed, name in enumerate("abc")])
    assert summary.ranking.winner is None
    assert sorted(summary.ranking.ties) == ["a", "b", "c"]
    assert " all tie in mean TTFT: they differ by at most " in summary.verdict
    assert " also tie in mean TPOT: every request took the same time in each." in summary.verdict


def test_equal_arms_of_many_are_said_to_be_equal():
    summary = summarize([arm(name, noisy(0)) for name in "abc"])
    assert "a, b and c all tie in mean TTFT: every request took the same time in each." in summary.verdict


def test_one_arm_has_no_ranking_and_neither_does_its_repeat():
    assert not summarize([run("a")]).ranking
    assert not summarize([run("a"), run("a (A/A)")]).ranking


def test_an_arm_that_refused_most_requests_does_not_win_by_the_rest():
    refused = ["refused" if n % 100 < 77 else "" for n in range(COUNT)]
    summary = summarize([arm("a", noisy(1)), arm("b", noisy(2) - 1.5, error=refused)])
    assert summary.ranking.set_aside == {"b": "1,540 of 2,000 requests failed"}
    assert summary.ranking.winner == "a"
    assert "1,540 of 2,000 requests failed in b, so it is not compared: its times cover only what it answered." in (
        summary.verdict
    )
    assert "lower" not in summary.verdict


def test_a_few_failures_are_counted_where_the_times_are_compared():
    failed = ["no" if n in (5, 900) else "" for n in range(COUNT)]
    summary = summarize([arm("a", noisy(1)), arm("b", noisy(2) - 1.5, error=failed)])
    assert summary.ranking.winner == "b"
    assert "Times are compared over the requests that every compared arm answered (failed: 2 in b)." in summary.verdict
    assert summary.ranking.steps[0].differences["a"].count == COUNT - 2


def test_two_failures_of_a_hundred_may_be_chance():
    failed = ["no" if n in (5, 90) else "" for n in range(100)]
    runs = [arm("a", [1.0] * 100), arm("b", [0.5] * 100, error=failed)]
    assert not summarize(runs).ranking.set_aside


def test_limits_come_first_and_an_arm_that_misses_one_is_not_compared():
    limits = [slo.parse_slo("tpot.mean <= 1050ms")]
    summary = summarize([arm("a", noisy(1), 1.0), arm("b", noisy(2) - 1, 1.1), arm("c", noisy(3) + 1, 1.0)], limits)
    assert summary.ranking.set_aside == {"b": "tpot.mean <= 1050 ms missed by 4.76%"}
    assert summary.verdict.startswith("a and c meet every limit; b (tpot.mean <= 1050 ms missed by 4.76%) does not. ")
    assert "a has the lower mean TTFT" in summary.verdict
    assert summary.ranking.winner == "a"


def test_limits_on_each_request_come_first_too():
    limits = [slo.parse_slo("tpot <= 1050ms")]
    slow = np.where(np.arange(COUNT) % 4 == 0, 1.1, 1.0)
    summary = summarize([arm("a", noisy(1)), arm("b", noisy(2) - 1, slow), arm("c", noisy(3) + 1)], limits)
    assert summary.ranking.steps[0].metric == "out_of_limits"
    assert summary.ranking.steps[0].differences["b"].mean == pytest.approx(0.25)
    assert "a and c tie for the most requests within tpot <= 1050 ms: 100.0%; fewer: b (75.0%)." in summary.verdict
    assert "Of these, a has the lower mean TTFT, by " in summary.verdict
    assert summary.ranking.winner == "a"


def test_two_arms_are_told_apart_by_the_limits_on_each_request():
    limits = [slo.parse_slo("tpot <= 1050ms")]
    slow = np.where(np.arange(COUNT) % 4 == 0, 1.1, 1.0)
    summary = summarize([arm("a", noisy(1)), arm("b", noisy(2) - 1, slow)], limits)
    assert summary.verdict == "a keeps more requests within tpot <= 1050 ms: 100.0%; fewer: b (75.0%)."
    assert summary.ranking.winner == "a"


def test_an_arm_with_fewer_requests_within_the_limits_by_no_more_than_noise_ties():
    few = np.where(np.arange(COUNT) == 7, 1.1, 1.0)
    summary = summarize([arm("a", noisy(1)), arm("b", noisy(2), few)], [slo.parse_slo("tpot <= 1050ms")])
    assert summary.verdict.startswith("a (100.0%) ties with b (100.0%) for the most") or summary.verdict.startswith(
        "a and b keep equally many requests within tpot <= 1050 ms: 100.0%."
    )
    some = np.where(np.arange(COUNT) % 200 == 7, 1.1, 1.0)
    summary = summarize([arm("a", noisy(1)), arm("b", noisy(2), some)], [slo.parse_slo("tpot <= 1050ms")])
    assert "a (100.0%) ties with b (99.5%) for the most requests within tpot <= 1050 ms." in summary.verdict


def test_an_arm_that_could_not_keep_up_is_not_the_best_of_three():
    ttft = np.linspace(0.1, 300, COUNT)
    growing = arm("growing", ttft, admitted_s=np.arange(COUNT) + ttft)
    summary = summarize([growing, arm("a", noisy(1)), arm("b", noisy(2) - 1)])
    assert summary.ranking.set_aside == {"growing": "could not keep up"}
    assert "b has the lower mean TTFT, by " in summary.verdict
    assert "growing could not keep up" in summary.verdict


def test_arms_whose_queues_grew_are_named_together_and_with_what_they_were_ahead_in():
    waits = {name: np.linspace(0.1, most, COUNT) for name, most in (("g", 30), ("h", 300))}
    growing = [arm(name, ttft, admitted_s=np.arange(COUNT) + ttft) for name, ttft in waits.items()]
    slower = [arm(name, noisy(seed) + 40) for seed, name in enumerate("ab")]
    summary = summarize([*growing, *slower])
    assert "2 arms could not keep up, as more and more requests waited: g (" in summary.verdict
    assert (
        "Over these requests, lower mean TTFT than every arm that is compared: g (15,050 ms). Use a" in summary.verdict
    )
    assert summary.verdict.count("h (") == 1, "it was not ahead"


def as_series(times):
    """A point's values by parts: TTFT as given, TPOT and E2E all equal."""
    same = np.ones(len(times))
    return series({"ttft_sched": np.asarray(times, float), "tpot": same, "e2e_sched": same}, 20)


def points_of(*times, **others):
    return [
        structs.replace(point(name, float(np.mean(its))), series=as_series(its), **others)
        for name, its in zip("abc", times, strict=False)
    ]


def test_points_of_a_sweep_tie_as_arms_do():
    best = best_of(points_of(noisy(1), noisy(2), noisy(3) + 1))
    assert sorted(one.name for one in best.points) == ["a", "b"]
    assert [step.metric for step in best.steps] == ["ttft_sched", "tpot", "e2e_sched"]


def test_a_point_that_failed_most_requests_does_not_win_by_the_rest(tmp_path):
    a, b, c = points_of(noisy(1), noisy(2) - 1, noisy(3) - 1.5)
    points = [structs.replace(one, requests=100, failed=failed) for one, failed in ((a, 0), (b, 0), (c, 90))]
    assert [one.name for one in best_of(points).points] == ["b"]
    found = sweep_report.write(tmp_path, MANIFEST, points, points, is_complete=True)
    assert (
        " Clearly more requests failed in c (90 of 100), so it is not compared. Lowest mean TTFT: b (" in found.verdict
    )
    assert found.best == {"{}": ["b"]}


def test_modes_that_failed_most_requests_do_not_win_combinations(tmp_path):
    points = [
        structs.replace(
            one, name=f"{one.name} {workers}", changes={"router_mode": one.name, "workers": workers}, requests=100,
            failed=90 * (one.name == "b"),
        )
        for workers in (2, 4)
        for one in points_of(noisy(1), noisy(2) - 1)
    ]  # fmt: skip
    found = sweep_report.write(tmp_path, MANIFEST, points, points, is_complete=True)
    said = " Clearly more requests failed in b 2 (90 of 100) and b 4 (90 of 100), so they are not compared."
    assert f"{said} Lowest mean E2E latency: a in 2 of 2." in found.verdict


def test_a_point_that_failed_most_requests_is_not_the_size_that_is_enough(tmp_path):
    sizes = [(0, 0.4, 0), (16, 0.2, 0), (64, 0.1, 90)]
    points = [
        structs.replace(
            point(f"size {size}", mean, kv_offloading_size=size),
            requests=100,
            failed=failed,
            tiers=[structs.replace(HOST, capacity_bytes=float(size))],
        )
        for size, mean, failed in sizes
    ]
    found = sweep_report.write(tmp_path, MANIFEST, points, points, is_complete=True)
    assert "of the lowest mean TTFT: 16 (" in found.verdict


def test_modes_of_other_routers_that_all_failed_are_not_named_as_best(tmp_path):
    points = [
        structs.replace(one, changes={"router_mode": one.name}, requests=100, failed=90 * (one.name == "b"))
        for one in points_of(noisy(1), noisy(2))
    ]
    manifest = MANIFEST | {"elsewhere": {"a": None, "b": "Dynamo --router-mode b"}}
    found = sweep_report.write(tmp_path, manifest, points, points, is_complete=True)
    assert found.verdict.endswith(" Lowest mean TTFT: a (3,119 ms).")


def test_points_of_different_workloads_or_older_sweeps_are_not_paired():
    (a, b) = points_of(noisy(1), noisy(2)[:1900])
    lowest_mean = min((a, b), key=lambda one: one.ttft_sched.mean).name
    assert [one.name for one in best_of([a, b]).points] == [lowest_mean]
    old = [structs.replace(one, series=UNSET) for one in points_of(noisy(1), noisy(2))]
    assert len(best_of(old).points) == 1


def test_the_verdict_of_a_sweep_names_ties_and_the_mode_to_deploy(tmp_path):
    points = points_of(noisy(1) - 1, noisy(2) - 1, noisy(3))
    points = [structs.replace(one, changes={"router_mode": one.name}) for one in points]
    manifest = MANIFEST | {"elsewhere": {"a": None, "b": None, "c": "Dynamo --router-mode c"}}
    found = sweep_report.write(tmp_path, manifest, points, points, is_complete=True)
    assert " Lowest mean TTFT: " in found.verdict
    assert " tie (" in found.verdict
    mean = f"{points[2].ttft_sched.mean * 1000:,.0f}"
    assert found.verdict.endswith(
        f"exist only in dynabench; the best mode here of each other router: c is Dynamo --router-mode c, "
        f"with a mean TTFT of {mean} ms."
    )
    assert {rest: sorted(names) for rest, names in found.best.items()} == {"{}": ["a", "b"]}


def test_a_mode_that_ties_with_the_best_counts_as_best(tmp_path):
    points = [
        structs.replace(one, name=f"{one.name} {workers}", changes={"router_mode": one.name, "workers": workers})
        for workers in (2, 4)
        for one in points_of(noisy(1), noisy(2), noisy(3) + 1)
    ]
    found = sweep_report.write(tmp_path, MANIFEST, points, points, is_complete=True)
    assert "Lowest mean E2E latency: a in 2 of 2, b in 2, c in 2; ties count for each." in found.verdict


def test_the_best_point_is_sought_among_those_that_meet_the_limits(tmp_path):
    good, bad = (Outcome("ttft.p99 <= 1 s", state, 0.5, 0.5) for state in ("met", "missed"))
    points = [
        structs.replace(one, outcomes=[outcome])
        for one, outcome in zip(points_of(noisy(1) - 1, noisy(2), noisy(3)), (bad, good, good), strict=True)
    ]
    manifest = MANIFEST | {"limits": ["ttft.p99 <= 1 s"]}
    found = sweep_report.write(tmp_path, manifest, points, points, is_complete=True)
    assert found.verdict.startswith("2 of 3 combinations meet every limit; b and c need the fewest GPUs (8). ")
    assert " Lowest mean TTFT within the limits: " in found.verdict
    assert "a" not in found.best["{}"]


def test_settings_that_all_points_share_are_left_out_of_the_verdict(tmp_path):
    points = [
        point("kv, workers 2", 0.2, router_mode="kv", workers=2),
        point("kv, workers 4", 0.1, router_mode="kv", workers=4),
    ]
    found = sweep_report.write(tmp_path, MANIFEST, points, points, is_complete=True)
    assert found.verdict.endswith("Lowest mean TTFT: workers 4 (100.0 ms).")


def test_too_little_data_at_a_point_is_said(tmp_path):
    points = [structs.replace(one, too_little=["too few requests"]) for one in points_of(noisy(1), noisy(2))]
    found = sweep_report.write(tmp_path, MANIFEST, points, points, is_complete=True)
    assert found.verdict.endswith(" Too little data in 2 of 2 combinations, such as a: too few requests.")


def test_prompts_that_waited_for_decodes_at_a_point_are_said(tmp_path):
    points = [*points_of(noisy(1)), structs.replace(points_of(noisy(1), noisy(2))[1], held="9 prompts waited")]
    made = sweep_report.write(tmp_path, MANIFEST, points, points, is_complete=True)
    assert " In 1 of 2 combinations, such as b: 9 prompts waited." in made.verdict


def test_too_little_data_where_a_search_ended_is_said(tmp_path):
    short, enough = points_of(noisy(1), noisy(2))
    short = structs.replace(short, too_little=["too few requests"])
    rows = [found_at(one.name, one.name, "rate", 4, 8, one) for one in (short, enough)]
    assert " Too little data in 1 of 2 combinations, such as a: too few requests." in searched(tmp_path, rows).verdict
    alone = searched(tmp_path / "alone", rows[:1]).verdict
    assert alone.endswith(" Too little data in a: too few requests.")
    missed = [found_at("a", "a", "rate", None, 8, None, structs.replace(short, outcomes=[MISSED]))]
    assert searched(tmp_path / "missed", missed).verdict.endswith(" Too little data in a: too few requests.")


KNOWN = {"ours": None, "kv": "Dynamo --router-mode kv", "p2c": "SGLang --policy power_of_two"}


def test_the_best_mode_that_other_routers_have_is_named_with_its_flags():
    runs = [arm("kv", noisy(1)), arm("ours", noisy(2) - 1), arm("p2c", noisy(3) + 1)]
    summary = summarize(runs, elsewhere=KNOWN)
    assert summary.ranking.elsewhere == {name: where for name, where in KNOWN.items() if where}
    by_p2c = summary.ranking.steps[0].differences["p2c"]
    apart = summary.ranking.steps[0].differences["kv"]
    assert summary.verdict.endswith(
        "ours exists only in dynabench; the best mode here of each other router: kv is Dynamo --router-mode kv, with a "
        f"mean TTFT {apart.mean * 1000:,.0f} ms ({apart.relative:.1%}) above that of ours; p2c is SGLang --policy "
        f"power_of_two, with a mean TTFT {by_p2c.mean * 1000:,.0f} ms ({by_p2c.relative:.1%}) above that of ours."
    )


def test_who_can_deploy_one_router_only_gets_the_best_of_its_modes():
    known = KNOWN | {"rr": "Dynamo --router-mode round-robin, SGLang --policy round_robin, KubeAI strategy: Turns"}
    runs = [arm("kv", noisy(1)), arm("ours", noisy(2) - 1), arm("p2c", noisy(3) + 1), arm("rr", noisy(4) + 0.5)]
    assert summarize(runs, elsewhere=known).ranking.elsewhere == {
        "kv": "Dynamo --router-mode kv",
        "rr": "SGLang --policy round_robin, KubeAI strategy: Turns",
    }


def test_a_best_mode_that_other_routers_have_needs_no_other():
    summary = summarize([arm("kv", noisy(1) - 1), arm("ours", noisy(2)), arm("p2c", noisy(3) + 1)], elsewhere=KNOWN)
    assert summary.ranking.elsewhere == {"kv": "Dynamo --router-mode kv"}
    assert "other routers" not in summary.verdict
    assert summarize([arm("kv", noisy(1) - 1), arm("ours", noisy(2))]).ranking.elsewhere == {}
