"""The tables: a line a figure, a cell an arm."""

from reports.figures import cells, slo
from reports.record.pools import PoolUse, Use
from reports.summarize import summarize
from reports.tables import comparison as tables
from reports.tables import use as use_tables
from reports.verdicts import headline
from reports.verdicts.gates import GateResult
from tests.reports.runs import apart, run


def lines(*runs):
    return dict(tables.rows(summarize(list(runs))))


def test_times_are_in_milliseconds_and_small_samples_are_not_available():
    found = lines(run(ttft=[1.0, 2.0]))
    assert found["TTFT mean (ms)"] == ["1,500"]
    assert found["TTFT p99 (ms)"] == ["n/a"]
    assert "TTFT p90 (ms)" not in found


def test_one_arm_is_compared_with_nothing():
    assert not any(" vs " in label for label in lines(run()))


def test_differences_stand_beside_the_baseline():
    found = lines(run("a", ttft=[2.0] * 100), run("b", ttft=[1.0] * 100))
    assert found["TTFT mean vs a"] == ["-", "-50.0% [-50.0, -50.0]"]
    assert found["TPOT mean vs a"] == ["-", "equal"]


def test_what_no_arm_knows_has_no_line():
    known = run("a", worker=[0, 0], endless_tokens=[50, 50])
    found = lines(known, run("b", cached_tokens=[None, None]))
    assert found["hits: unlimited cache"] == ["50.0%", "n/a"]
    assert found["cache hit share"] == ["25.0%", "n/a"]
    assert found["imbalance (max/mean)"] == ["2.000", "1.000"]
    assert "hits: best worker" not in found


def test_a_comparison_shows_whole_answers_and_the_balance_by_default():
    summary = summarize([run("a", ttft=[2.0] * 100), run("b", ttft=[1.0] * 100)])
    for grid in (tables.comparison(summary, is_whole=False), tables.figures(summary)):
        labels = [label for label, _ in grid.rows]
        assert {"E2E mean (ms)", "E2E mean vs a"} <= set(labels)
    known = summarize([run("a", worker=[0, 0]), run("b", worker=[0, 1])])
    assert "imbalance (max/mean)" in dict(tables.key_rows(known))


def test_router_modes_have_their_names_in_other_routers():
    arms = {"kv, 2": {"router_mode": "kv"}, "kv, 4": {"router_mode": "kv"}, "own.py": {"router_mode": "own.py"}}
    manifest = {"arms": arms, "elsewhere": {"kv, 2": "D --kv", "kv, 4": "D --kv", "own.py": None, "other": "S --other"}}
    grid = tables.elsewhere_grid(manifest)
    assert grid.rows == [("kv", ["D --kv"]), ("own.py", ["only in dynabench"]), ("other", ["S --other"])]
    assert tables.elsewhere_grid({"arms": arms}) is None


def test_failures_have_lines_only_where_there_are_any():
    assert "failed requests" not in lines(run())
    found = lines(run(ttft=[1.0] * 100, error=["no"] * 5 + [""] * 95))
    assert found["failed requests"] == ["5"]
    assert found["TTFT p90, failures infinite (ms)"] == ["1,000"]
    assert lines(run(error=["no", "no"]))["E2E p90, failures infinite (ms)"] == ["infinite"]


def test_what_the_client_met_is_shown_where_it_sent_late():
    found = lines(run(facts={"cpu_share": 0.25, "tokens": 20.0, "tokens_together": 5.0}))
    assert found["client CPU (of a core)"] == ["25.0%"]
    assert found["tokens that came together"] == ["25.0%"]
    assert "client CPU (of a core)" not in lines(run(sent_s=[0.0, 1.0]))


FAILED = GateResult("a", "ttft.p90 > 1ms", "failed", "ttft.p90 > 1ms: a is at 2 s")


def test_a_markdown_summary_names_what_failed_and_what_is_not_valid():
    summary = summarize([run("a|b", notes=("late",))])
    text = tables.markdown(summary, {"title": "t", "subtitle": "s"}, [FAILED])
    assert "**Not valid**: a\\|b: late" in text
    assert "**Failed**: ttft.p90 > 1ms: a is at 2 s" in text
    assert "|  | a\\|b |" in text
    assert "p50" not in text


def test_markdown_has_the_small_tables_of_the_terminal():
    text = tables.markdown(
        summarize([run("one", sent_s=[0.0, 1.0]), apart("two")]), {"title": "t", "subtitle": "s"}, []
    )
    assert "| TTST mean (ms) | n/a | 6,000 |" in text
    assert "**Where does TTFT go? (means)**\n\n|  | one | two |\n|---|---:|---:|\n| queue (ms) |" in text
    assert "| transfer (ms) | - | 1,000 |" in text
    assert "| two: decode | 2 | 2 | 75% / 100% | - | 12% / 19% |" in text


def test_milliseconds_have_as_many_digits_as_matter():
    shown = [cells.milliseconds(seconds) for seconds in (None, 0.00123, 0.1234, 12.3456)]
    assert shown == ["n/a", "1.23", "123.4", "12,346"]


def test_a_small_table_says_where_ttft_goes_in_each_arm():
    (grid, *_) = use_tables.grids(summarize([run("one", sent_s=[0.0, 1.0]), apart("two")]))
    assert grid.title == "Where does TTFT go? (means)"
    assert dict(grid.rows) == {
        "queue (ms)": ["0.00", "1,000"],
        "prefill (ms)": ["1,500", "1,000"],
        "decode queue (ms)": ["-", "1,000"],
        "transfer (ms)": ["-", "1,000"],
        "first step (ms)": ["-", "1,000"],
        "TTFT from sent (ms)": ["1,500", "5,000"],
        "queue (share)": ["0%", "20%"],
        "prefill (share)": ["100%", "20%"],
        "decode queue (share)": ["-", "20%"],
        "transfer (share)": ["-", "20%"],
        "first step (share)": ["-", "20%"],
        "prefilled by another worker": ["0.0%", "100.0%"],
    }


def test_arms_that_took_blocks_before_the_prefill_are_named():
    early = apart("early", decode_queued_s=[0.0, 10.0], decode_blocks_s=[0.5, 10.5])
    grid = use_tables.grids(summarize([early, apart()]))[0]
    assert grid.note.endswith("The decode queue comes before the prefill in early.")


def test_a_run_over_http_has_no_small_table():
    assert use_tables.grids(summarize([run(is_live=True, admitted_s=[None, None])])) == []


def test_how_busy_pools_and_links_were_has_a_line_each():
    grid = use_tables.grids(summarize([apart("a")]))[1]
    assert dict(grid.rows) == {
        "a: prefill": ["2", "4", "25% / 50%", "12% / 25%", "-"],
        "a: decode": ["2", "2", "75% / 100%", "-", "12% / 19%"],
        "a: racks": ["-", "-", "-", "50% / 50%", "-"],
    }


def test_pools_are_shown_only_where_one_prefills_for_others():
    alone = run("a", pools=(PoolUse("worker", "aggregated", 2, 2, Use(0.5, 0.5)),))
    assert len(use_tables.grids(summarize([alone]))) == 1
    assert len(use_tables.grids(summarize([alone, apart("b")]))) == 2


def test_the_second_token_has_lines_where_some_workers_only_prefill():
    found = lines(run(second_token_s=[2.0, 3.0]), apart("b"))
    assert found["TTST mean (ms)"] == ["1,750", "6,000"]
    assert lines(run(), apart("b"))["TTST mean (ms)"] == ["n/a", "6,000"]
    assert not any("TTST" in label for label in lines(apart(second_token_s=[None, None])))


def test_without_such_workers_it_has_lines_where_a_limit_asks_for_it():
    runs = [run(second_token_s=[2.0, 3.0])]
    assert not any("TTST" in label for label in lines(*runs))
    found = summarize(runs, [slo.parse_slo("ttst.mean <= 2s")])
    assert dict(tables.rows(found))["TTST mean (ms)"] == ["1,750"]


def limited(**ttft):
    limits = [slo.parse_slo("ttft.mean <= 2s")]
    return summarize([run(arm, ttft=its) for arm, its in ttft.items()], limits)


def test_limits_say_that_they_count_failed_requests_as_infinite():
    limits = [slo.parse_slo("ttft.p50 <= 2s")]
    summary = summarize([run("a", error=["no", ""]), run("b")], limits)
    said = "; a failed request counts as infinite here, but not in the percentiles of the tables"
    assert [line.endswith(said) for line in headline.limits(summary)] == [True, False]
    assert tables.limit_grid(summary).note.startswith("A failed request counts as infinite here")
    assert not tables.limit_grid(summarize([run()], limits)).note


def test_an_arm_whose_percentile_is_not_known_does_not_come_closest():
    limits, few = [slo.parse_slo("ttft.p99 <= 2s")], "(ttft.p99 <= 2000 ms: 9 samples; a p99 needs 368)"
    short = [run(arm, ttft=[1.0] * 9) for arm in "ab"]
    assert headline.answer(summarize(short, limits)) == f"It is not known whether any arm meets every limit {few}."
    assert headline.answer(summarize([*short, run("c", ttft=[9.0] * 9)], limits)) == (
        f"It is not known whether a and b meet every limit {few}; c (ttft.p99 <= 2000 ms missed: 9 of 9 requests exceed "
        "it, too many for a p99 within it) does not."
    )


def test_the_answer_names_who_meets_the_limits_or_comes_nearest():
    assert headline.answer(limited(a=[1.0, 1.0], b=[4.0, 4.0])) == (
        "a meets every limit; b (ttft.mean <= 2000 ms missed by 100%) does not."
    )
    assert headline.answer(limited(a=[3.0, 3.0], b=[4.0, 4.0])) == (
        "No arm meets every limit; a comes closest: ttft.mean <= 2000 ms missed by 50%."
    )
    assert headline.answer(limited(a=[3.0, 3.0])) == "a: ttft.mean <= 2000 ms missed by 50%."
    assert headline.answer(summarize([run()])) == ""
    grid = tables.limit_grid(limited(a=[1.0, 1.0], b=[4.0, 4.0]))
    assert grid.rows == [("ttft.mean <= 2000 ms", ["met by 50%", "missed by 100%"])]


def test_failures_are_an_alert_unless_a_note_tells_of_them():
    failed = run("a", ttft=[1.0] * 3, error=["reset", "", ""])
    assert headline.alerts(summarize([failed])) == ["a: 1 of 3 requests failed, 1 of them with: reset"]
    noted = run("a", ttft=[1.0] * 3, error=["reset", "", ""], notes=("1 of 3 requests failed",))
    assert headline.alerts(summarize([noted])) == ["Not valid: a: 1 of 3 requests failed"]


def test_many_arms_are_rows_on_a_page():
    summary = summarize([run(f"arm {number}") for number in range(9)])
    figures = tables.figures(summary)
    parts = tables.for_page(figures)
    assert [column for part in parts for column in part.columns] == [label for label, _ in figures.rows]
    for part in parts:
        assert [label for label, _ in part.rows] == [f"arm {number}" for number in range(9)]
        assert len(part.columns) <= tables.ACROSS
    few = tables.figures(summarize([run()]))
    assert tables.for_page(few) == [few]


def test_why_a_percentile_is_not_known_is_said_with_the_number_that_it_needs():
    rows = [("TTFT mean (ms)", ["1"]), ("TTFT p90 (ms)", ["1"]), ("TTFT p99 (ms)", ["n/a"])]
    assert tables.too_few(rows) == "n/a: too few requests; a p99 needs 368."
    assert (
        tables.too_few([*rows, ("TPOT p90", ["2", "n/a"])])
        == "n/a: too few requests; a p90 needs 36 and a p99 needs 368."
    )
    assert tables.too_few(rows[:2]) == ""
