"""What KV tiers gave and saved, made of runs and points small enough to check by hand."""

import csv
import io
import json
import math
from dataclasses import replace

import msgspec
import pytest
from msgspec import structs

from reports import folder
from reports.figures import tier_sizes, tiers
from reports.figures.tiers import Avoided, Hits, Saving, Spent
from reports.record.pools import Use
from reports.summarize import summarize
from reports.sweep import table as sweep_table
from reports.sweep.points import Point
from reports.tables import comparison as tables
from reports.tables import use as use_tables
from tests.reports.runs import HOST, busy, run, tiered
from tests.reports.test_results_folder import MANIFEST as SMALL
from tests.reports.test_sweep_report import MANIFEST, point


def without(arm="without", gpu_s=10.0, **changes):
    return run(arm, **{"pools": busy(gpu_s), "cached_tokens": [30, 30]} | changes)


def test_prompt_tokens_come_from_the_gpu_a_tier_or_are_computed():
    found = tiers.hits([tiered()])
    assert (found.gpu, found.host, found.computed) == pytest.approx((0.3, 0.2, 0.5))
    assert (found.disk, found.store) == (None, None)
    assert sum(found.parts.values()) == pytest.approx(1)


def test_each_tier_has_its_own_part_of_the_hits():
    found = tiers.hits([tiered(disk_tokens=[10, 0], store_tokens=[0, 5])])
    assert list(found.parts.values()) == pytest.approx([0.225, 0.2, 0.05, 0.025, 0.5])


def test_shares_are_averaged_over_the_repeats_that_know_them():
    found = tiers.hits([tiered(), tiered(repeat=1, host_tokens=[40, 40]), tiered(repeat=2, cached_tokens=[None, None])])
    assert (found.gpu, found.host) == pytest.approx((0.2, 0.3))


def test_a_server_does_not_say_that_its_hits_are_the_gpus():
    assert tiers.hits([run(is_live=True)]).parts == {"computed": 0.75}
    assert tiers.hits([run(is_live=True, host_tokens=[0, 0])]).gpu == 0.25
    assert tiers.hits([run(cached_tokens=[None, None])]) is None


def test_gpu_seconds_are_saved_against_the_first_arm():
    saved = summarize([without(), tiered()]).arms["tiered"].saved
    assert saved.gpu_s == Saving(2.0, 0.2, 1)
    assert saved.requests == 2


def test_each_arm_is_compared_with_the_smallest_tiers_where_all_else_is_alike():
    sizes = {"kv, kv_offloading_size 8": 8, "kv, kv_offloading_size 0": 0, "random, kv_offloading_size 0": 0}
    sizes |= {"random, kv_offloading_size 8": 8, "kv, kv_offloading_size 8 (A/A)": 8}
    kv, random = "kv, kv_offloading_size 0", "random, kv_offloading_size 0"
    assert list(tier_sizes.bases(sizes).values()) == [kv, kv, random, random, "kv, kv_offloading_size 8"]
    assert tier_sizes.bases({"before": 0, "after": 8, "other": 0}) == {
        "before": "before",
        "after": "before",
        "other": "other",
    }


def test_savings_have_an_interval_over_repeats():
    runs = [without(repeat=0), without(gpu_s=12.0, repeat=1), tiered(repeat=0), tiered(gpu_s=6.0, repeat=1)]
    arms = summarize(runs).arms
    assert (arms["without"].gpu_s, arms["tiered"].gpu_s) == (11.0, 7.0)
    saved = arms["tiered"].saved.gpu_s  # 2 and 6
    assert (saved.value, saved.repeats) == (4.0, 2)
    assert saved.interval == pytest.approx((4 - 12.706 * 2, 4 + 12.706 * 2), rel=1e-3)


def test_ttft_saved_is_the_paired_difference():
    before, after = [2.0 + n % 3 for n in range(100)], [1.0 + n % 3 for n in range(100)]
    saved = summarize([without(ttft=before, cached_tokens=[30] * 100), tiered(ttft=after)]).arms["tiered"].saved
    assert (saved.ttft_s.value, saved.ttft_s.interval) == (pytest.approx(1.0), pytest.approx((1.0, 1.0)))


@pytest.mark.parametrize("other", [{"osl": [10, 11]}, {"is_complete": False}, {"error": ["", "no"]}])
def test_only_the_same_work_is_compared(other):
    assert not summarize([without(), tiered(**other)]).arms["tiered"].saved


def test_without_tiers_nothing_is_said_of_them():
    summary = summarize([without("a"), without("b")])
    assert not {"hits", "tiers", "gpu_s", "saved"} & summary.as_json()["arms"]["b"].keys()
    assert "gpu_s" not in summary.formulas
    labels = [label for label, _ in tables.rows(summary)]
    assert not [label for label in labels if "GPU" in label or label == "computed"]
    assert all(grid.title != "What did KV tiers hold and move?" for grid in use_tables.grids(summary))


def test_tiers_are_averaged_over_repeats():
    more = structs.replace(HOST, flushes=4.0, read=structs.replace(HOST.read, bytes=4e9, busy=Use(0.5, 0.75)))
    (found,) = summarize([tiered(), tiered(repeat=1, tiers=(more,))]).arms["tiered"].tiers
    assert found == structs.replace(
        HOST, flushes=3.5, read=structs.replace(HOST.read, bytes=3e9, busy=Use(0.375, 0.625))
    )


def test_arms_with_the_same_tiers_save_nothing_by_them():
    arms = summarize([tiered(), replace(tiered(), arm="other")]).arms
    assert not arms["other"].saved


def test_the_terminal_shows_where_tokens_came_from_and_what_was_saved():
    summary = summarize([without(), tiered()])
    found = dict(tables.key_rows(summary))
    assert found["hits: GPU"] == ["30.0%", "30.0%"]
    assert found["hits: host memory"] == ["n/a", "20.0%"]
    assert "hits: disk" not in found
    assert found["computed"] == ["70.0%", "50.0%"]
    assert found["GPU-seconds"] == ["10", "8"]
    assert found["GPU-seconds saved"] == ["-", "2.0"]
    assert "; from one run each, so without an interval." in tables.figures(summary).note


def test_the_terminal_shows_what_tiers_held_and_moved():
    grid = use_tables.grids(summarize([without(), tiered()]))[-1]
    (line,) = grid.rows
    assert line[0] == "tiered: host memory"
    assert dict(zip(grid.columns, line[1], strict=True)) == {
        "caches": "2",
        "GiB each": "1.0",
        "tokens each": "2,048",
        "full at the end": "50%",
        "read (GB)": "2.0",
        "written (GB)": "8.0",
        "reading": "25.0% / 50.0%",
        "writing": "50.0% / 75.0%",
        "waited for": "3",
        "waited (s)": "0.50",
        "evicted chunks": "7",
    }


def test_markdown_has_the_tables_of_tiers():
    text = tables.markdown(summarize([without(), tiered()]), {"title": "t", "subtitle": "s"}, [])
    assert "| hits: host memory | n/a | 20.0% |" in text
    assert "**What did KV tiers hold and move?**" in text


def test_a_results_folder_keeps_tiers_and_formulas(tmp_path):
    runs = [without(), tiered()]
    folder.write(tmp_path / "x", SMALL | {"runs": [folder.run_facts(one) for one in runs]}, runs)
    _, (_, read) = folder.read(tmp_path / "x")
    assert read.tiers == (HOST,)
    assert read.requests.host_tokens.tolist() == [20, 20]
    assert read.requests.disk_tokens.mask.all()
    text = (tmp_path / "x" / "report.html").read_text()
    assert tiers.FORMULAS["gpu_s_saved"] in text
    arm = json.loads((tmp_path / "x" / "summary.json").read_text())["arms"]["tiered"]
    assert arm["tiers"][0]["read"] == {"bytes": 2e9, "copies": 4, "busy": {"mean": 0.25, "highest": 0.5}}
    assert arm["saved"]["gpu_s"]["value"] == 2.0


QUIET = structs.replace(HOST, flushes=0.0, stall_s=0.0)


@pytest.mark.parametrize(
    ("changes", "share", "said"),
    [
        ({}, 0.2, None),
        ({"read": structs.replace(HOST.read, busy=Use(0.5, 0.95))}, 0.2,
         "the link from host memory was busy for 95% of the run at the busiest worker, so copies waited for one another"),
        ({"written": structs.replace(HOST.written, busy=Use(0.5, 0.91))}, 0.2, "the link to host memory was busy for 91%"),
        ({"stalled": Use(0.01, 0.02), "stall_s": 3.0, "flushes": 1200.0}, 0.2,
         "steps waited 3 s for 1,200 copies to host memory, at the worst worker for 2.0% of the run, because GPU blocks were needed again"),
        ({"refused": 5.0}, 0.2, "host memory (2 x 1 GiB) had no room for what a request had computed (5 times), because"),
        ({"refused": 1.0}, 0.2, "host memory (2 x 1 GiB) had no room for what a request had computed (once), because"),
        ({}, 0.004, "host memory (2 x 1 GiB) provided only 0.40% of the prompt tokens, although 8 GB were written to it and 7 chunks"),
        ({"written": structs.replace(HOST.written, bytes=0.0)}, 0.0, None),
    ],
)  # fmt: skip
def test_a_remark_says_where_a_tier_moved_more_than_it_saved(changes, share, said):
    found = tiers.remarks([structs.replace(QUIET, **changes)], Hits(host=share))
    assert len(found) == (said is not None)
    assert said is None or found[0].startswith(said)


def test_remarks_are_part_of_the_summary():
    *_, found = summarize([tiered(host_tokens=[0, 0])]).arms["tiered"].remarks
    assert found.startswith("host memory (2 x 1 GiB) provided only 0.00%")


def sized(mode, size, gpu_s, ttft_s=0.2, **changes):
    """Return a point of a sweep."""
    one = point(f"{mode} {size}", ttft_s, router_mode=mode, kv_offloading_size=size, **changes)
    uses = [HOST] if size else []
    spent = [Spent(60, 6000, True, ttft_s, gpu_s, Avoided(400.0, 2.0) if size else Avoided(0.0, 0.0))]
    hits = Hits(0.3, 0.2 if size else None, None, None, 0.5 if size else 0.7)
    return structs.replace(one, hits=hits, tiers=uses, gpu_s=gpu_s, spent=spent)


def test_a_point_is_compared_with_the_smallest_tiers_where_all_else_is_alike():
    points = [sized(mode, size, 1.0) for mode in ("kv", "random") for size in (16, 0, 64)]
    found = {point.name: first.name for point, first in tier_sizes.smallest((one.changes, one) for one in points)}
    assert found == {f"{mode} {size}": f"{mode} 0" for mode in ("kv", "random") for size in (0, 16, 64)}


@pytest.mark.parametrize(
    "name", ["kv_offloading_size", "pools.worker.mocker.kv_offloading_size", "decode_kv_offloading_size"]
)
def test_what_a_tier_holds_is_known_by_its_name(name):
    assert tier_sizes.is_size(name)
    assert not tier_sizes.is_size("block_size")


def test_the_table_of_a_sweep_says_what_tiers_gave_and_saved():
    points = [sized("kv", 0, 100.0, 0.5), sized("kv", 16, 90.0, 0.375), sized("kv", 64, 110.0, 0.75)]
    grid = sweep_table.lay_out(points, MANIFEST, is_complete=True).tiers
    assert grid.columns == [
        "GPU", "host memory", "computed", "avoided (tokens)", "avoided (GPU-s)", "GPU-s", "GPU-s saved", "TTFT saved (ms)",
        "read (GB)", "written (GB)", "waited (s)",
    ]  # fmt: skip
    assert dict(grid.rows) == {
        "kv 0": ["30.0%", "n/a", "70.0%", "-", "-", "100", "-", "-", "-", "-", "-"],
        "kv 16": ["30.0%", "20.0%", "50.0%", "400", "2", "90", "10.0", "125.0", "2.0", "8.0", "0.50"],
        "kv 64": ["30.0%", "20.0%", "50.0%", "400", "2", "110", "-10.0", "-250.0", "2.0", "8.0", "0.50"],
    }


def test_ttft_is_not_compared_in_the_table_where_a_queue_grew():
    points = [sized("kv", 0, 100.0, 0.5), sized("kv", 16, 90.0, 0.4, is_stable=False)]
    grid = sweep_table.lay_out(points, MANIFEST, is_complete=True).tiers
    assert "TTFT saved (ms)" not in grid.columns
    assert "10.0" in dict(grid.rows)["kv 16"]


def test_a_sweep_without_tiers_has_no_table_of_them():
    assert sweep_table.lay_out([sized("kv", 0, 1.0)], MANIFEST, is_complete=True).tiers is None


def test_the_csv_of_a_sweep_has_what_each_tier_moved():
    (line,) = csv.DictReader(io.StringIO(sweep_table.as_csv([sized("kv", 16, 90.0)])))
    assert (line["hits.host"], line["gpu_s"], line["tiers.worker.host.read.bytes"]) == ("0.2", "90.0", "2000000000.0")


def test_a_point_that_was_kept_before_there_were_tiers_is_read():
    old = msgspec.to_builtins(point("kv", 0.1, router_mode="kv"))
    for name in ("hits", "tiers", "gpu_s", "spent"):
        del old[name]
    found = msgspec.convert(old, Point)
    assert (found.hits, found.tiers, found.spent) == (None, [], [])
    assert tiers.saved("", found.spent, found.spent) is None


def test_gpu_seconds_that_are_not_known_of_all_pools_are_unknown():
    assert tiers.spent(run()).gpu_s is None
    assert tiers.spent(tiered(gpu_s=0.0)).gpu_s == 0
    assert math.isclose(tiers.spent(tiered()).ttft_s, 1.5)


def test_what_hits_beyond_the_gpu_avoided_is_shown_in_tokens_and_gpu_seconds():
    summary = summarize([without(), tiered(tiers=(structs.replace(HOST, tokens=40.0, avoided_gpu_s=6.0),))])
    found = dict(tables.key_rows(summary))
    assert found["prefill avoided (tokens)"] == ["0", "40"]
    assert found["prefill avoided (GPU-s)"] == ["0", "6"]
    assert summary.arms["tiered"].saved.avoided_gpu_s.value == 6
    assert "a worker that decodes is busy" in summary.verdict  # 2 GPU-seconds less, for 6 of prefill


def test_gpu_seconds_that_fall_with_the_prefill_need_no_remark():
    summary = summarize([without(), tiered(tiers=(structs.replace(HOST, tokens=40.0, avoided_gpu_s=2.5),))])
    assert "a worker that decodes is busy" not in summary.verdict


def test_prefill_that_is_hardly_avoided_is_not_worth_a_remark():
    summary = summarize([without(), tiered(gpu_s=10.0, tiers=(structs.replace(HOST, tokens=1.0, avoided_gpu_s=0.05),))])
    assert "a worker that decodes is busy" not in summary.verdict


def test_what_is_not_known_of_a_live_run_is_not_shown_as_nothing():
    assert "prefill avoided (tokens)" not in dict(tables.rows(summarize([tiered()])))


def test_columns_in_which_nothing_happened_are_left_out():
    (grid,) = [grid for grid in use_tables.grids(summarize([tiered(tiers=(QUIET,))])) if "tiers" in grid.title]
    assert not {"waited for", "waited (s)"} & set(grid.columns)


def test_a_tier_is_named_with_its_pool_only_where_several_have_one():
    store = structs.replace(HOST, pool="all", tier="store")
    (grid,) = [grid for grid in use_tables.grids(summarize([tiered(tiers=(HOST, store))])) if "tiers" in grid.title]
    assert [label for label, _ in grid.rows] == ["tiered: host memory", "tiered: shared store"]
    other = structs.replace(HOST, pool="prefill")
    (grid,) = [grid for grid in use_tables.grids(summarize([tiered(tiers=(HOST, other))])) if "tiers" in grid.title]
    assert [label for label, _ in grid.rows] == ["tiered: worker, host memory", "tiered: prefill, host memory"]


def of_size(mode, size, ttft_s, **changes):
    """Return a point whose tiers hold so many GiB."""
    one = sized(mode, size, 100.0, ttft_s, **changes)
    return structs.replace(one, tiers=[structs.replace(HOST, capacity_bytes=float(size * tiers.GIB))] if size else [])


def test_the_verdict_names_the_smallest_size_near_the_best():
    curve = {0: 1.0, 16: 0.5, 64: 0.41, 256: 0.40}
    points = [of_size("kv", size, ttft_s) for size, ttft_s in curve.items()]
    points += [of_size("random", size, 0.8 - size / 1000) for size in curve]
    assert sweep_table.lay_out(points, MANIFEST, is_complete=True).verdict.startswith(
        "No queue grew in any of the 8 combinations. Lowest mean TTFT: kv 256 (400.0 ms). Smallest kv_offloading_size within 5% "
        "of each lowest mean TTFT: 64 (410.0 ms) with kv; 256 (544.0 ms, the largest tried) with random."
    )


def test_sizes_that_change_little_are_called_so():
    points = [of_size("kv", size, ttft_s) for size, ttft_s in ((0, 1.0), (16, 0.99))]
    verdict = sweep_table.lay_out(points, MANIFEST, is_complete=True).verdict
    assert "within 5% of the lowest mean TTFT: 0 (1,000 ms; more helps little)." in verdict


def test_repeats_that_are_equal_have_no_interval():
    points = [sized("kv", 0, 100.0, 0.5), sized("kv", 16, 90.0, 0.375)]
    points = [structs.replace(one, spent=one.spent * 2) for one in points]
    found = sweep_table.lay_out(points, MANIFEST, is_complete=True)
    assert dict(found.tiers.rows)["kv 16"][6:8] == ["10.0", "125.0"]
    assert found.verdict.endswith("The runs are deterministic: all repeats are equal, so there are no intervals.")


def test_an_arm_whose_repeats_are_equal_is_called_deterministic():
    summary = summarize([without(), without(repeat=1), tiered(), tiered(repeat=1, ttft=(1.0, 2.5))])
    assert summary.arms["without"].remarks[0] == "deterministic, so its 2 repeats are equal"
    assert "deterministic" not in " ".join(summary.arms["tiered"].remarks)
