"""The charts: what each shows of a run, and that it is left out where it says nothing."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgba

from reports import charts
from reports.drawing import COLOURS, STYLE
from reports.summary import summarize
from tests.reports.runs import apart, run


@pytest.fixture(autouse=True)
def style():
    with plt.rc_context(rc=STYLE):
        yield
    plt.close("all")


def drawn(name, *runs):
    chart = charts.CHARTS[name]({one.arm: one for one in runs}, summarize(list(runs)))
    return None if chart is None else chart.panels


def series(panel):
    return {one.label: one for one in panel.series}


def test_a_distribution_goes_from_the_least_to_the_most():
    (panel,) = drawn("ttft_distribution", run("a", ttft=[1.0, 2.0, 3.0]))
    assert series(panel)["a"].x == pytest.approx([1000.0, 2000.0, 3000.0])
    assert series(panel)["a"].y == pytest.approx([0.0, 0.5, 1.0])


def test_bars_are_the_summarys_figures():
    first = drawn("percentiles", run("a", ttft=[1.0, 2.0]))[0]
    assert series(first)["a"].y == [1500.0, 1500.0, None, None]


def test_a_percentile_that_the_sample_cannot_carry_has_no_bar():
    first = drawn("percentiles", run("a", ttft=[1.0, 2.0]))[0]
    assert [np.isnan(bar.get_height()) for bar in first.axes.patches] == [False, False, True, True]


def test_an_arm_without_a_figure_is_drawn_without_bars(tmp_path):
    failed = run("a", error=["no", "no"])
    charts.draw({"a": failed}, summarize([failed]), tmp_path / "charts")
    assert (tmp_path / "charts" / "percentiles.svg").exists()


def test_one_arm_has_no_differences():
    assert drawn("differences", run("a")) is None


def test_a_difference_is_shown_in_percent_with_its_interval():
    first = drawn("differences", run("a", ttft=[2.0] * 100), run("b", ttft=[1.0] * 100))[0]
    (label,) = (label for label in series(first) if label.startswith("b mean"))
    assert label == "b mean: -50.0% [-50.0, -50.0], better"


def test_failures_have_a_row_of_the_timeline_only_where_there_are_any():
    assert len(drawn("timeline", run())) == 2
    failures = drawn("timeline", run(ttft=[1.0] * 4, error=["no", "", "", ""]))[2]
    assert sum(series(failures)["a"].y) == 1


def test_hits_that_nobody_knows_are_not_drawn():
    assert drawn("hit_waterfall", run()) is None
    (panel,) = drawn("hit_waterfall", run(endless_tokens=[50, 100]))
    assert series(panel)["a"].y[0] == 75.0


def test_the_work_of_unknown_workers_is_not_drawn():
    assert drawn("worker_heat", run(worker=[None, None])) is None
    (panel,) = drawn("worker_heat", run(ttft=[1.0] * 4, worker=[0, 0, 1, None]))
    assert list(series(panel)) == ["worker 0", "worker 1"]


def test_hits_over_time_count_only_what_an_engine_reported():
    (panel,) = drawn("hits_over_time", run(ttft=[1.0] * 3, worker=[0, 0, 0], cached_tokens=[50, None, 100]))
    shown = [value for value in series(panel)["worker 0"].y if value is not None and not np.isnan(value)]
    assert shown == [0.5, 1.0]


def bars(panel):
    """Return (begin, width, row) of each bar."""
    return [(bar.get_x(), bar.get_width(), round(bar.get_y() + 0.3)) for bar in panel.axes.patches]


def test_the_parts_of_ttft_are_stacked_in_a_bar_per_arm():
    (panel,) = drawn("ttft_split", run("one", sent_s=[0.0, 1.0], admitted_s=[0.5, 1.5]), apart("two"))
    assert bars(panel) == [(0, 500, 0), (500, 1000, 0), *((1000 * place, 1000, 1) for place in range(5))]
    assert "two, decode queue: 1,000 ms" in series(panel)


def test_the_parts_of_ttft_have_one_key_and_no_arm_has_their_colours():
    (panel,) = drawn("ttft_split", apart("a"), apart("b"))
    shown = [text.get_text() for text in panel.axes.get_legend().get_texts()]
    assert shown == ["queue", "prefill", "decode queue", "transfer", "first step"]
    assert not set(charts.PART_COLOURS.values()) & set(COLOURS)


def test_blocks_that_were_waited_for_first_are_drawn_first():
    (panel,) = drawn("ttft_split", apart(decode_queued_s=[0.0, 10.0], decode_blocks_s=[0.75, 10.75]))
    assert panel.axes.patches[0].get_facecolor() == to_rgba(charts.PART_COLOURS["decode_queue"])


def test_the_ttft_of_a_server_is_not_divided():
    assert drawn("ttft_split", run(is_live=True, admitted_s=[None, None])) is None


def test_prompts_count_where_they_were_computed():
    made = apart(isl=[100, 100], cached_tokens=[0, 0], osl=[10, 10])
    (panel,) = drawn("worker_heat", made)
    work = [sum(series(panel)[f"worker {worker}"].y) for worker in range(4)]
    assert work[0] == pytest.approx(10 * work[2])
    assert (work[1], work[3]) == (0, 0)
    (panel,) = drawn("hits_over_time", made)
    assert any(value == 0 for value in series(panel)["worker 0"].y)
    assert all(value is None for value in series(panel)["worker 2"].y)


def test_a_request_is_on_its_prefill_worker_until_it_is_sent_on():
    (panel,) = drawn("running_over_time", apart(done_s=[14.0, 24.0]))
    assert series(panel)["worker 0"].y[:9] == [1, 1, 1, 1, 1, 1, 1, 1, 0]  # windows of a quarter of a second
    assert series(panel)["worker 2"].y[:9] == [0, 0, 0, 0, 0, 0, 0, 0, 1]


def test_every_chart_is_written_as_png_and_svg(tmp_path):
    one = run("a", ttft=[1.0] * 40, endless_tokens=[50] * 40)
    other = run("b", ttft=[2.0] * 40)
    found = charts.draw({"a": one, "b": other}, summarize([one, other]), tmp_path)
    names = {chart.name for chart in found}
    assert names == set(charts.CHARTS)
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
