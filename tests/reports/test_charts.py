"""The charts: what each shows of a run, and that it is left out where it says nothing."""

import numpy as np
import pytest

from reports import charts
from reports.charts import over_time, tiers
from reports.charts.comparison import Comparison
from reports.charts.drawing import duration, spread
from reports.charts.marks import Map
from reports.charts.rows import PART_COLOURS
from reports.figures import slo
from reports.key import PALETTE, key_of
from reports.record.pools import KvOverTime
from reports.record.server import ServerSample, ServerUse
from reports.summarize import summarize
from tests.reports.runs import GROWN, apart, busy, run, tiered


def chart(name, *runs, limits=()):
    summary = summarize(list(runs), [slo.parse_slo(limit) for limit in limits])
    return charts.CHARTS[name](Comparison({one.arm: one for one in runs}, summary, key_of([one.arm for one in runs])))


def drawn(name, *runs, limits=()):
    found = chart(name, *runs, limits=limits)
    return None if found is None else found.panels


def series(panel):
    return {one.label: one for one in panel.series}


def test_a_tail_goes_from_the_fastest_to_the_slowest():
    (panel,) = drawn("ttft_tail", run("a", ttft=[1.0, 2.0, 3.0]))
    line = series(panel)["a"]
    assert (line.x[0], line.y[0]) == pytest.approx((100.0, 1000.0))
    assert line.x[-1] == pytest.approx(100 / 3, rel=1e-3)
    assert line.y[-1] == pytest.approx(2333, rel=1e-3)


def test_a_tail_ends_where_the_sample_does():
    (panel,) = drawn("ttft_tail", run("a", ttft=[1 + n / 1000 for n in range(1000)]))
    assert series(panel)["a"].x[-1] == pytest.approx(0.1)
    labels = list(panel.axes.x.labels)
    assert labels == ["p50", "p90", "p99", "p99.9"]


def test_a_limit_is_drawn_into_the_tail():
    found = chart("ttft_tail", run("a", ttft=[1.0, 2.0] * 200), limits=["ttft.p99 <= 3s"])
    assert "ttft.p99 <= 3000 ms" in [text.text for text in found.canvas.texts]
    low, high = found.panels[0].axes.y.ends
    assert low < 3000 < high


def test_what_is_the_same_for_all_has_no_tail():
    assert drawn("ttft_tail", run("a", ttft=[1.0] * 10)) is None
    assert drawn("itl_tail", run("a")) is None


def test_percentiles_are_the_summarys_figures():
    first = drawn("percentiles", run("a", ttft=[1.0, 2.0]))[0]
    assert list(series(first)) == ["a mean: 1,500 ms", "a p50: 1,500 ms"]


def test_a_percentile_that_the_sample_cannot_carry_is_not_at_zero():
    first = drawn("percentiles", run("a", ttft=[1.0, 2.0]))[0]
    assert first.axes.x.low > 0
    assert not any("p99" in label for label in series(first))


def test_an_arm_without_a_figure_says_so():
    first = drawn("percentiles", run("a", ttft=[1.0, 2.0]), run("b", error=["no", "no"]))[0]
    assert "n/a" in [note.text for note in first.axes.notes]


def test_one_arm_has_no_differences():
    assert drawn("differences", run("a")) is None


def test_a_difference_is_shown_in_percent_with_its_interval():
    first = drawn("differences", run("a", ttft=[2.0] * 100), run("b", ttft=[1.0] * 100))[0]
    (label,) = (label for label in series(first) if label.startswith("b mean"))
    assert label == "b mean: -50.0% [-50.0, -50.0], better"


def test_failures_are_drawn_only_where_there_are_any():
    assert drawn("failures", run()) is None
    (panel,) = drawn("failures", run(ttft=[1.0] * 4, error=["no", "", "", ""]))
    assert sum(series(panel)["a"].y) == 1


def test_arrivals_that_all_arms_saw_are_drawn_once():
    (panel,) = drawn("arrivals", run("a", ttft=[1.0] * 200), run("b", ttft=[1.0] * 200))
    assert list(series(panel)) == ["arrivals"]


def test_hits_that_nobody_knows_are_not_drawn():
    assert drawn("hit_waterfall", run()) is None
    (panel,) = drawn("hit_waterfall", run(endless_tokens=[50, 100]))
    assert series(panel)["a"].y[0] == 75.0


def test_hits_of_nothing_are_not_drawn():
    assert drawn("hit_waterfall", run(endless_tokens=[0, 0], cached_tokens=[0, 0])) is None


def test_the_work_of_unknown_workers_is_not_drawn():
    assert drawn("worker_work", run(worker=[None, None])) is None
    (panel,) = drawn("worker_work", run(ttft=[1.0] * 4, worker=[0, 0, 1, None]))
    assert list(series(panel)) == ["worker 0", "worker 1"]


def test_one_worker_has_no_map():
    assert drawn("worker_work", run(worker=[0, 0], num_workers=1)) is None


def test_hits_over_time_count_only_what_an_engine_reported():
    (panel,) = drawn("worker_hits", run(ttft=[1.0] * 3, worker=[0, 0, 0], cached_tokens=[50, None, 100]))
    assert [value for value in series(panel)["worker 0"].y if value is not None] == [50, 100]


def test_many_workers_share_rows_and_none_is_left_out():
    many = run(ttft=[1.0] * 300, worker=np.arange(300), num_workers=300)
    found = chart("worker_work", many)
    assert "mean of 5 workers" in found.description
    (table,) = (one.table for one in found.panels[0].axes.behind if isinstance(one, Map))
    assert table.shape == (60, 60)
    edges = over_time.windows([many], 60)
    work = (over_time.work(many, edges) * np.diff(edges)).sum()
    assert float((table * np.diff(edges)).sum() * 5) == pytest.approx(work)


def test_each_worker_has_a_row_up_to_the_most_that_a_page_can_show():
    found = chart("worker_work", run(ttft=[1.0] * 40, worker=np.arange(40), num_workers=40))
    assert found.panels[0].axes.behind[-1].table.shape[0] == 40
    assert found.description.endswith("Each row is a worker, with 0 at the bottom.")


def test_a_map_has_a_scale_of_its_colours_from_zero_with_the_unit():
    found = chart("worker_load", run(ttft=[1.0] * 4, worker=[0, 0, 1, 0]))
    *_, scale = found.canvas.all_axes
    assert scale.y.ends == (0, found.panels[0].axes.behind[-1].top) == (0, 2)
    first, *_, last = scale.y.labels
    assert (first, last) == ("0", "2")
    assert "requests" in [text.text for text in found.canvas.texts]


def bars(panel):
    """Return (begin, width, row) of each bar."""
    return [(bar.x, bar.width, round(bar.y + 0.31)) for bar in panel.axes.patches]


def test_the_parts_of_ttft_are_stacked_in_a_bar_per_arm():
    (panel,) = drawn("ttft_split", run("one", sent_s=[0.0, 1.0], admitted_s=[0.5, 1.5]), apart("two"))
    assert bars(panel) == [(0, 500, 0), (500, 1000, 0), *((1000 * place, 1000, 1) for place in range(5))]
    assert "two, decode queue: 1,000 ms" in series(panel)


def test_the_parts_of_ttft_have_one_key_and_no_arm_has_their_colours():
    found = chart("ttft_split", apart("a"), apart("b"))
    texts = [text.text for text in found.canvas.texts]
    assert [text for text in texts if text in {"queue", "prefill", "decode queue", "transfer", "first step"}] == [
        "first step", "transfer", "decode queue", "prefill", "queue",
    ]  # fmt: skip
    assert not set(PART_COLOURS.values()) & {colour for pair in PALETTE for colour in pair}


def test_blocks_that_were_waited_for_first_are_drawn_first():
    (panel,) = drawn("ttft_split", apart(decode_queued_s=[0.0, 10.0], decode_blocks_s=[0.75, 10.75]))
    assert panel.axes.patches[0].colour == PART_COLOURS["decode_queue"]


def test_the_ttft_of_a_server_is_not_divided():
    assert drawn("ttft_split", run(is_live=True, admitted_s=[None, None])) is None


def test_prompts_count_where_they_were_computed():
    made = apart(isl=[100, 100], cached_tokens=[0, 0], osl=[10, 10])
    edges = over_time.windows([made], 10)
    work = over_time.work(made, edges).sum(axis=1)
    assert work[0] == pytest.approx(10 * work[2])
    assert (work[1], work[3]) == (0, 0)
    hits = over_time.hits(made, edges)
    assert (hits[0] == 0).any()
    assert np.isnan(hits[2]).all()


def test_a_request_is_on_its_prefill_worker_until_it_is_sent_on():
    load = over_time.load(apart(done_s=[14.0, 24.0]), np.arange(0, 2.5, 0.25))
    assert load[0].tolist() == [1, 1, 1, 1, 1, 1, 1, 1, 0]
    assert load[2].tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 1]


def test_output_comes_at_an_even_pace():
    rate = over_time.output_rate(run(ttft=[1.0], osl=[18]).requests, np.array([0.0, 1.0, 5.5, 10.0, 20.0]))
    assert rate.tolist() == pytest.approx([0, 2, 2, 0])


def test_the_kv_in_use_is_known_as_long_as_it_was_noted():
    made = run(kv=(KvOverTime("workers", 1.0, (0.5, 0.25, 0.75)),))
    assert over_time.kv_use(made, "workers", np.array([0.0, 2.0, 3.0])) == pytest.approx([0.375, 0.75])
    assert np.isnan(over_time.kv_use(made, "workers", np.array([0.0, 3.0, 9.0]))[1])
    assert over_time.kv_use(made, "others", np.array([0.0, 1.0])) is None
    panels = drawn("load", run(ttft=[1.0] * 4, kv=(KvOverTime("workers", 1.0, (0.5, 0.25, 0.75, 0.5)),)))
    assert panels[-1].y_unit == "%"


def test_the_queue_the_batch_the_tokens_and_the_kv_in_use_are_shown_over_time():
    kv = (KvOverTime("workers", 1.0, (0.5, 0.25, 0.75, 0.5)),)
    found = chart("load", run(ttft=[1.0] * 8, admitted_s=np.arange(8) + 0.75, kv=kv))
    assert [text.text for text in found.canvas.texts] == [
        "requests waiting", "requests running (batch)", "output tokens/s", "KV in use",
    ]  # fmt: skip


@pytest.mark.parametrize("count", [3, 4])
def test_lines_that_would_tangle_have_a_panel_each(count):
    runs = [run(f"arm {n}", ttft=[1.0 + n + m for m in range(9)]) for n in range(count)]
    panels = drawn("ttft_over_time", *runs)
    assert len(panels) == (2 if count == 3 else 2 * count)
    assert len({panel.axes.y.ends for panel in panels[::2]}) == 1


def test_labels_keep_their_distance_and_order():
    assert spread([1.0, 1.0, 1.0], 2, 0, 100) == [0, 2, 4]
    assert spread([50.0, 10.0], 2, 0, 100) == [50, 10]
    assert spread([99.0, 100.0], 4, 0, 100) == [96, 100]
    assert spread([5.0] * 3, 10, 0, 10) == [0, 5, 10]


def test_times_have_the_unit_that_suits_them():
    assert [duration(value) for value in (0.5, 20, 999, 1000, 2500)] == ["0.5 ms", "20 ms", "999 ms", "1 s", "2.5 s"]


def test_every_chart_is_written_as_svg(tmp_path):
    kv = (KvOverTime("workers", 1.0, tuple(n % 3 / 4 for n in range(60))),)
    one = run(
        "a",
        ttft=[1.0 + n % 5 for n in range(400)],
        endless_tokens=[50] * 400,
        error=[""] * 399 + ["no"],
        kv=kv,
        pools=busy(9.0),
        fleet=GROWN,
        server=ServerUse(samples=(ServerSample(0.0, 1, 2, 0.3), ServerSample(300.0, 4, 5, 0.6))),
    )
    other = tiered(
        "b",
        ttft=[2.0 + n % 7 for n in range(400)],
        gaps=np.array([[1.0, 0.1, 0, 9, 400]]),
        kv=kv,
        error=[""] * 399 + ["no"],
    )
    found = charts.draw({"a": one, "b": other}, summarize([one, other]), tmp_path)
    assert {chart.name for chart in found} == set(charts.CHARTS)
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.svg" for name in charts.CHARTS}
    for each in found:
        assert each.title.endswith("?")
        assert "<svg" in each.svg
        assert "#1c1c1c" not in each.svg
        assert each.title in (tmp_path / f"{each.name}.svg").read_text()


def test_where_prompt_tokens_come_from_is_a_bar_of_all_of_them():
    (panel,) = drawn("hits_by_tier", run("a", cached_tokens=[30, 30]), tiered("b"))
    assert [(round(begin), round(width), row) for begin, width, row in bars(panel)] == [
        (0, 30, 0), (30, 70, 0), (0, 30, 1), (30, 20, 1), (50, 50, 1),
    ]  # fmt: skip
    assert "b, host memory: 20.0%" in series(panel)
    assert not set(tiers.COLOURS.values()) & {colour for pair in PALETTE for colour in pair}


def test_what_tiers_save_has_a_row_for_each_arm_but_the_first():
    ttft, cached = [2.0 + n % 3 for n in range(100)], [30] * 100
    before = run("a", ttft=ttft, pools=busy(10.0), cached_tokens=cached)
    of_ttft, of_gpus = drawn("tier_savings", before, tiered("b", ttft=[one - 1 for one in ttft]))
    assert list(series(of_ttft)) == ["b, mean TTFT saved: 1 s (1 s to 1 s)"]
    assert list(series(of_gpus)) == ["b, GPU-seconds saved: 2"]


def test_without_tiers_there_is_no_chart_of_them():
    runs = [run("a", pools=busy(10.0)), run("b", pools=busy(8.0))]
    assert drawn("hits_by_tier", *runs) is None
    assert drawn("tier_savings", *runs) is None


@pytest.mark.parametrize("late_s", [0.5, 5e3, 5e10])
def test_answers_that_all_come_at_one_instant_count_however_late_it_is(late_s):
    times = ("intended_s", "sent_s", "admitted_s", "first_byte_s", "first_token_s", "last_token_s", "done_s")
    made = run(ttft=[0.0, 0.0], **{name: [late_s, late_s] for name in times})
    edges = np.array([0.0, 0.9, 1.1, 2.0]) * late_s
    with np.errstate(all="raise"):
        rate = over_time.output_rate(made.requests, edges)
    assert (rate * np.diff(edges)).tolist() == pytest.approx([0, 20, 0], rel=1e-3)
