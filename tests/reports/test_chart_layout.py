"""Nothing in a chart overlaps or is cut, as measured: of few arms and of many, of sweeps and of searches."""

import itertools
from xml.etree import ElementTree

import numpy as np
import pytest
from msgspec import structs

from reports import charts
from reports.capacity.answer import AtLoad, PlanAnswer, Ranked, Sureness
from reports.charts import drawing, plan, sweep
from reports.charts.comparison import Comparison
from reports.figures import slo
from reports.figures.outcomes import Outcome, of_run
from reports.key import key_of
from reports.record.pools import KvOverTime
from reports.summarize import summarize
from reports.sweep.points import Quantiles, SearchResult
from tests.reports.runs import apart, run
from tests.reports.test_sweep_report import point

MODES = ["round-robin", "kv", "lmetric+eps(5)", "prodstack-loadaware"]
LIMITS = ["ttft.p99 <= 2000 ms", "itl.p99 <= 60 ms"]
READ = [slo.parse_slo(limit) for limit in LIMITS]


def boxes(canvas):
    """Return the texts of a picture, and the box of each: left, top, right and bottom."""
    picture = ElementTree.fromstring(canvas.svg("x", lambda colour: colour))
    for text in picture.iter("{http://www.w3.org/2000/svg}text"):
        width, x, y = drawing.text_width(text.text), float(text.get("x")), float(text.get("y"))
        left = x - width * {"middle": 0.5, "end": 1.0}.get(text.get("text-anchor"), 0.0)
        yield text.text, (left, y - drawing.SIZE * 0.75, left + width, y + drawing.SIZE * 0.2)


def overlaps(canvas):
    """Return the texts of a picture that meet others, or leave it."""
    found = [(text, np.array(box)) for text, box in boxes(canvas) if text.strip()]
    outside = [
        text
        for text, (left, top, right, bottom) in found
        if left < 0 or top < 0 or right > canvas.width or bottom > canvas.height
    ]
    met = [
        (text, other)
        for (text, box), (other, its) in itertools.combinations(found, 2)
        if (box[:2] + 1.5 < its[2:]).all() and (its[:2] + 1.5 < box[2:]).all()
    ]
    return met + outside


def check(found):
    assert found
    for name, chart in found.items():
        assert overlaps(chart.canvas) == [], name


def arm(number, count, *, failed=0):
    random = np.random.default_rng(number)
    times = np.sort(random.gamma(1.0 + number / 4, 0.3, 400))
    waits = random.permutation(times) + 0.01
    kv = (KvOverTime("workers", 1.0, tuple(random.random(400).round(3))),)
    name = f"{MODES[number % 4]}, max_num_batched_tokens {512 << number // 4}" if count > 4 else MODES[number]
    return run(
        name, ttft=waits + 0.3, admitted_s=np.arange(400) + waits, endless_tokens=[50] * 400, num_workers=8,
        worker=np.arange(400) % 8, gaps=np.array([[0.01, 0.001 * (number + 1), 0, 90, 400]]), kv=kv,
        error=["no"] * failed + [""] * (400 - failed),
    )  # fmt: skip


def compared(runs, limits=LIMITS):
    summary = summarize(runs, [slo.parse_slo(limit) for limit in limits])
    shown = Comparison({one.arm: one for one in runs}, summary, key_of([one.arm for one in runs]))
    return {name: chart for name, make in charts.CHARTS.items() if (chart := make(shown)) is not None}


@pytest.mark.parametrize("count", [1, 3, 7])
def test_a_comparison(count):
    check(compared([arm(number, count, failed=number) for number in range(count)]))


def test_a_disaggregated_run():
    check(compared([apart("2 prefill, 2 decode"), arm(0, 2)]))


def swept(axis, values, limits=LIMITS):
    points = []
    for number, mode in enumerate(MODES):
        for value in values:
            seconds = 0.5 + 4 / value + number / 10
            one = point(f"{mode}, {axis} {value}", seconds, router_mode=mode, **{axis: value})
            times = Quantiles(seconds / 100, seconds / 100, seconds / 90, seconds / 50)
            outcomes = [
                structs.replace(of_run(slo.parse_slo(limit), summary), limit=limit)
                for limit, summary in zip(limits, (_statistics(seconds), _statistics(seconds / 50)), strict=False)
            ]
            points.append(structs.replace(one, workers=value, gpus=2 * value, tpot=times, itl=times, outcomes=outcomes))
    return points


def _statistics(seconds):
    return summarize([run("a", ttft=[seconds] * 400)]).arms["a"].ttft_sched


@pytest.mark.parametrize("values", [[1, 2, 4, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [1, 16, 1000]])
def test_a_sweep(values):
    points = swept("workers", values)
    check(sweep.charts(sweep.swept(points, READ), []))


def test_a_sweep_of_modes_alone():
    points = list(swept("workers", [4]))
    for one in points:
        del one.changes["workers"]
    check(sweep.charts(sweep.swept(points, READ), []))


def test_a_search():
    points = swept("rate_scale", [1, 2, 3, 4])
    rows = [
        SearchResult(mode, {"router_mode": mode}, "rate_scale", "highest", 2.15, 2.21, False, points[0], points[1])
        for mode in MODES
    ]
    check(sweep.charts(sweep.of_search(rows, points, READ), rows))


def test_a_plan():
    outcomes = [Outcome(limit, "met", value=0.05, margin=0.2) for limit in LIMITS]
    missed = [Outcome(limit, "missed", value=9.0, margin=-3.5) for limit in LIMITS]
    layouts = [
        Ranked("TP 4, chunk 512", {}, gpus=12, workers=3, outcomes=outcomes),
        Ranked("TP 8, chunk 512", {}, gpus=16, workers=2, outcomes=outcomes),
        *(Ranked(f"TP 2, chunk {512 << n}, caching 0", {}, at_least=16, outcomes=missed) for n in range(20)),
    ]
    loads = [AtLoad(load, "TP 4, chunk 512", 12 + number, 3, []) for number, load in enumerate((1, 1.25, 1.5, 2))]
    sure = [Sureness(limit, 0.05, 0.03, 0.07, 0.1) for limit in LIMITS]
    answer = PlanAnswer(
        "", "t", "s", True, "v", LIMITS, layouts, [*loads, AtLoad(4.0, "", None, None, [])], [], [], sure, [], 9, 1.0
    )
    found = plan.charts(answer, key_of([layout.name for layout in layouts[:7]]))
    assert list(found) == ["layouts", "loads", "sureness"]
    check(found)


def test_what_a_plan_does_not_know_is_not_drawn():
    answer = PlanAnswer("", "t", "s", True, "v", LIMITS, [], [], [], [], [], [], 0, 1.0)
    assert plan.charts(answer, {}) == {}
