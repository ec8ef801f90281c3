"""What came of drafts, in a report: made of runs small enough to check by hand."""

import msgspec
import pytest
from msgspec.structs import replace

from reports import folder
from reports.record.pools import DraftUse, Gain, averaged
from reports.summarize import summarize
from reports.tables.drafts import draft_grid, gain_grid
from tests.reports.runs import run
from tests.reports.test_results_folder import MANIFEST

DRAFTS = DraftUse("workers", 100, 300, (80, 50, 20), 12.5, (Gain(1, 2.1), Gain(8, 1.5), Gain(64, 0.9)))
FEWER = DraftUse("workers", 50, 100, (30, 10), 6.0, (Gain(1, 1.6), Gain(8, 1.4)))


def test_the_length_counts_the_models_own_token():
    assert DRAFTS.length == pytest.approx(2.5)
    assert DraftUse("workers", 0, 0, (0, 0)).length == 1


def test_repeats_are_averaged_position_by_position():
    (mean,) = averaged([[DRAFTS], [DraftUse("workers", 200, 600, (120, 50, 40), 12.5, DRAFTS.gains)]])
    assert mean == DraftUse("workers", 150, 450, (100, 50, 30), 12.5, DRAFTS.gains)


def test_tables_have_a_line_for_each_arm_that_speculates():
    summary = summarize([run("off"), run("three", drafts=(DRAFTS,)), run("two", drafts=(FEWER,))])
    came = draft_grid(summary)
    assert came.columns == ["drafted tokens", "accepted", "tokens a step", "accepted, by draft"]
    assert came.rows == [
        ("three", ["300", "50%", "2.50", "80 50 20%"]),
        ("two", ["100", "40%", "1.80", "60 20%"]),
    ]
    pays = gain_grid(summary)
    assert "by sequences in a step that only decodes" in pays.title
    assert pays.columns == ["sequences a step, here", "1", "8", "64"]
    assert pays.rows == [("three", ["12.5", "2.10x", "1.50x", "0.90x"]), ("two", ["6.0", "1.60x", "1.40x", "-"])]


def test_without_speculation_there_is_no_table():
    summary = summarize([run("off"), run("on", repeat=1)])
    assert draft_grid(summary) is gain_grid(summary) is None


def test_a_folder_keeps_what_came_of_drafts(tmp_path):
    runs = [run("off"), run("three", drafts=(DRAFTS,))]
    folder.write(tmp_path / "out", MANIFEST | {"runs": folder.facts_of(runs)}, runs)
    _, again = folder.read(tmp_path / "out")
    assert [each.drafts for each in again] == [(), (DRAFTS,)]
    summary = msgspec.json.decode((tmp_path / "out" / "summary.json").read_bytes())
    assert summary["arms"]["three"]["drafts"][0]["accepted"] == [80, 50, 20]
    assert "drafts" not in summary["arms"]["off"]
    assert "Where does speculation pay?" in (tmp_path / "out" / "report.html").read_text()


def test_a_narrow_terminal_shows_what_came_of_three_drafts_in_one_table():
    drafts = replace(DRAFTS, steps=1_000, drafts=153_282)
    grid = draft_grid(summarize([run("off"), run("round-robin, 3", drafts=(drafts,))]))
    assert len(list(grid.tables(60))) == 1
