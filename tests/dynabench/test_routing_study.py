"""The page of the routing study is made by a program, and recommends only what holds on cells not used for picking."""

import re
from pathlib import Path

import pytest

from tests.support import benchmarks

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "routing-study.md"


@pytest.fixture
def page():
    return benchmarks.program("routing_page")


@pytest.fixture
def program():
    return benchmarks.program("routing_study")


def cell(mode, part, ttft, e2e, **more):
    figures = {"ttft_ms": ttft, "ttft_p99_ms": 3 * ttft, "e2e_ms": e2e, "good": 0.9}
    row = {"mode": mode, "part": part, "case": f"case {part}", "load": 1.0, "hit_share": 0.5, "imbalance": 1.1}
    return row | figures | {"is_stable": True, "classes": {"short": figures | more, "long": figures}}


def study(*cells, **more):
    return {"cells": list(cells), "bursts": [], "costs": [], "unspread": []} | more


def test_a_pick_that_holds_on_unseen_cells_is_recommended(page):
    found = page.picks(
        study(*(cell(mode, part, ms, ms) for mode, ms in (("kv", 200), ("lmetric", 100)) for part in (0, 1, 2)))
    )
    there = "E2E 0.0%, TTFT 0.0%, 0.0% of good requests lost"
    assert (
        f"| nothing | `lmetric` | {there} | {there}: holds, best of its row | {there}: holds, best of its row |"
        in found
    )
    assert "none" not in found


@pytest.mark.parametrize("part", [1, 2])
def test_a_pick_that_another_mode_beats_on_unseen_or_fresh_cells_is_not(page, part):
    cells = [cell("kv", other, *[150 if other == part else 100] * 2) for other in (0, 1, 2)]
    cells += [cell("lmetric", other, *[100 if other == part else 150] * 2) for other in (0, 1, 2)]
    found = page.picks(study(*cells))
    assert "| none (`kv`) |" in found
    assert found.count(": does not hold, `lmetric` is 50.0% ahead |") == len(page.WANTS)


def test_of_modes_that_tie_in_one_metric_the_best_in_the_others_is_picked(page):
    cells = [cell("kv", part, 100, 200) for part in (0, 1, 2)] + [cell("lmetric", part, 101, 100) for part in (0, 1, 2)]
    assert "| nothing, and only TTFT matters | `lmetric` |" in page.picks(study(*cells))


def test_modes_that_predict_times_are_not_picked_for_those_who_know_nothing(page):
    cells = [cell(mode, part, ms, ms) for mode, ms in (("marginal-all", 50), ("kv", 100)) for part in (0, 1, 2)]
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


def test_ranks_are_means_and_worsts_over_the_cells_of_one_part(page):
    cells = [
        cell("kv", 0, 100, 100),
        cell("lmetric", 0, 121, 144),
        cell("kv", 1, 300, 300),
        cell("lmetric", 1, 100, 100),
    ]
    more = [row | {"load": 0.5} for row in (cell("kv", 0, 100, 100), cell("lmetric", 0, 100, 100))]
    found = page.ranks(study(*cells, *more), 0)
    assert "| `lmetric` | 20.0% | 44.0% | 10.0% | 21.0% | 10.0% | 21.0% | 0.0% | 0% |" in found
    assert "| `kv` | 0.0% | 0.0% |" in found


def test_a_burst_is_shown_with_its_share_and_times(page):
    figures = {"mode": "kv", "ttft_ms": 1954.6, "ttft_p99_ms": 4460, "e2e_ms": 5345}
    rows = [
        figures | {"workload": name, "most_requests": most} for name, most in (("burst", 7.33), ("equal prompts", 8))
    ]
    line = "1,955 / 4,460 | 5,345"
    assert f"| `kv` | 7.33 | {line} | 8.00 | {line} |" in page.bursts(study(bursts=rows))


def priced(costs, ttft, e2e, mode="marginal-all"):
    return {"case": "chats", "mode": mode, "costs": costs, "ttft_ms": ttft, "e2e_ms": e2e}


def test_wrong_costs_are_compared_with_right_ones_and_the_worst_of_another_engine_is_named(page):
    rows = [priced(costs, *ms, mode) for mode in ("marginal-all", "marginal") for costs, ms in (
        ("", (100, 200)), ("all x 2", (150, 400)), ("of A", (131, 190)), ("of B", (90, 211)))]  # fmt: skip
    made = study(costs=rows)
    assert "| all x 2 | +50.0% / +100.0% | +50.0% / +100.0% |" in page.wrong_costs(made)
    assert page.worst_of_others(made, "ttft_ms") == "31.0%"
    assert page.FIGURES["E2E with costs of others"](made) == "5.5%"


def test_what_spreading_costs_is_shown_against_the_same_rule_without_it(page):
    row = {"case": "chats", "load": 0.7}
    rows = [row | {"mode": "marginal-all", "ttft_ms": 90, "e2e_ms": 202}]
    rows += [row | {"mode": "unspread.py", "ttft_ms": 100, "e2e_ms": 200}]
    assert "| chats, 70% | -10.0% | +1.0% |" in page.unspread(study(unspread=rows))
    assert page.FIGURES["worst E2E of spreading"](study(unspread=rows)) == "+1.0%"


def test_a_cell_shows_its_latencies_good_requests_hits_and_growth(page):
    grew = cell("kv", 0, 1234, 5678) | {"is_stable": False}
    assert "### Case 0" in page.cells(study(grew))
    assert "| `kv` | 1,234 / 3,702 / 5,678, 90% (grew) | 50.0% | 1.10 |" in page.cells(study(grew))


def test_tables_and_figures_replace_what_is_between_their_markers_and_nothing_else(page, monkeypatch):
    monkeypatch.setattr(page, "TABLES", {"one": lambda study: "| new |"})
    monkeypatch.setattr(page, "FIGURES", {"two": lambda study: "7%"})
    text = "a\n<!-- table: one -->\n\n| old |\n\n<!-- end -->\nat most <!-- figure: two -->5%<!-- end --> of b\n"
    assert page.fill(text, {}) == text.replace("old", "new").replace("5%", "7%")
    with pytest.raises(SystemExit, match="the page has 0 places for the figure 'two'; expected one"):
        page.fill("", {})


def test_no_ordinary_load_is_more_than_1_percent_slower_because_bursts_are_spread():
    found = re.search(r"<!-- figure: worst E2E of spreading -->([+-][0-9.]+)%<!-- end -->", PAGE.read_text())
    assert found is not None and float(found[1]) <= 1


@pytest.mark.parametrize("change", ["requests", "traces", "sessions"])
def test_a_study_of_other_sources_is_refused_and_stays(program, tmp_path, change):
    traces, sessions = tmp_path / "traces", tmp_path / "sessions"
    for folder in (traces, sessions):
        folder.mkdir()
        (folder / "mooncake_x.json").write_text("1")
    file = tmp_path / "study.json"
    program.Study(file, program.Sources(traces, sessions, 10), 1).save()
    before = file.read_text()
    program.Study(file, program.Sources(traces, sessions, 10), 1)
    if change != "requests":
        (tmp_path / change / "mooncake_x.json").write_text("2")
    with pytest.raises(SystemExit, match=r"has changed|--requests was 10 and is 11"):
        program.Study(file, program.Sources(traces, sessions, 11 if change == "requests" else 10), 1)
    assert file.read_text() == before


def test_a_study_of_another_version_is_refused(program, tmp_path):
    (tmp_path / "study.json").write_text('{"requests": 10, "cells": []}')
    with pytest.raises(SystemExit, match=r"study.json: .*; remove it, or write to another --out"):
        program.Study(tmp_path / "study.json", program.Sources(tmp_path, None, 10), 1)
