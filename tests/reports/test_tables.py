"""The tables: a line a figure, a cell an arm."""

import io

from rich.console import Console

from reports import tables
from reports.summary import summarize
from tests.reports.runs import run


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
    assert found["TTFT mean vs a"] == ["-", "-50.0% [-1e+03, -1e+03]"]
    assert found["TPOT mean vs a"] == ["-", "+0.0% [+0, +0] ~"]


def test_what_no_arm_knows_has_no_line():
    known = run("a", worker=[0, 0], endless_tokens=[50, 50])
    found = lines(known, run("b", cached_tokens=[None, None]))
    assert found["hits: unlimited cache"] == ["50.0%", "n/a"]
    assert found["cache hit share"] == ["25.0%", "n/a"]
    assert found["imbalance (max/mean)"] == ["2.000", "1.000"]
    assert "hits: best worker" not in found


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


def test_the_console_has_a_column_an_arm():
    console = Console(file=io.StringIO(), width=200)
    console.print(tables.comparison(summarize([run("one"), run("two")])))
    assert "one" in console.file.getvalue()
    assert "two" in console.file.getvalue()


def test_a_markdown_summary_names_what_failed_and_what_is_not_valid():
    summary = summarize([run("a|b", notes=("late",))])
    text = tables.markdown(summary, {"title": "t", "subtitle": "s"}, ["ttft.p90 > 1ms: a is at 2 s"])
    assert "**Not valid**: a\\|b: late" in text
    assert "**Failed**: ttft.p90 > 1ms: a is at 2 s" in text
    assert "| | a\\|b |" in text
    assert "p50" not in text


def test_milliseconds_have_as_many_digits_as_matter():
    shown = [tables.milliseconds(seconds) for seconds in (None, 0.00123, 0.1234, 12.3456)]
    assert shown == ["n/a", "1.23", "123.4", "12,346"]
