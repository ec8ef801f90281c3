"""The page of the routing study is made by a program, and recommends only what holds on cells not used for picking."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "routing-study.md"


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import routing_page

    yield routing_page
    del sys.modules["routing_page"]


def cell(mode, part, ttft, e2e, **more):
    figures = {"ttft_ms": ttft, "ttft_p99_ms": 3 * ttft, "e2e_ms": e2e, "good": 0.9}
    row = {"mode": mode, "part": part, "case": f"case {part}", "load": 1.0, "hit_share": 0.5, "imbalance": 1.1}
    return row | figures | {"is_stable": True, "classes": {"short": figures | more, "long": figures}}


def study(*cells):
    return {"cells": list(cells), "bursts": [], "costs": []}


def test_a_pick_that_holds_on_unseen_cells_is_recommended(page):
    found = page.picks(
        study(*(cell(mode, part, ms, ms) for mode, ms in (("kv", 200), ("lmetric", 100)) for part in (0, 1)))
    )
    assert "| nothing | `lmetric` | E2E 0.0%, TTFT 0.0%, 0.0% of good requests lost |" in found
    assert "none" not in found


def test_a_pick_that_another_mode_beats_on_unseen_cells_is_not(page):
    cells = cell("kv", 0, 100, 100), cell("lmetric", 0, 150, 150), cell("kv", 1, 150, 150), cell("lmetric", 1, 100, 100)
    assert "| none (`kv`) |" in page.picks(study(*cells))
    assert "| does not hold: `lmetric` is 50.0% ahead there |" in page.picks(study(*cells))


def test_of_modes_that_tie_in_one_metric_the_best_in_the_others_is_picked(page):
    cells = [cell("kv", part, 100, 200) for part in (0, 1)] + [cell("lmetric", part, 101, 100) for part in (0, 1)]
    assert "| nothing, and only TTFT matters | `lmetric` |" in page.picks(study(*cells))


def test_modes_that_predict_times_are_not_picked_for_those_who_know_nothing(page):
    cells = [cell(mode, part, ms, ms) for mode, ms in (("marginal-all", 50), ("kv", 100)) for part in (0, 1)]
    found = page.picks(study(*cells))
    assert "| the times of steps | `marginal-all` |" in found
    assert "| nothing | `kv` | E2E 2.0 x" in found


def test_who_pays_is_named_by_class(page):
    cells = [cell("kv", 0, 100, 100, ttft_ms=300), cell("lmetric", 0, 100, 100)]
    assert "| `kv` | 3.0 x | 0.0% | short: 3.0 x |" in page.losers(study(*cells))


def test_the_page_has_a_place_for_each_table_and_each_is_filled(page):
    text = PAGE.read_text()
    for name in page.TABLES:
        made = re.search(rf"<!-- table: {name} -->\n(.*?)<!-- end -->", text, re.DOTALL)
        assert made is not None
        assert made[1].count("\n| ") > 4 or name == "picks"
