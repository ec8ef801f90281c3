"""KV tiers, held against published figures: the quick situations; and the example that has every tier."""

import json
from pathlib import Path

import pytest

from tests.support import benchmarks
from tests.support.commands import dynabench

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "kv-tiers.md").read_text()


@pytest.fixture
def published():
    return benchmarks.program("kv_tiers_published")


def test_a_pool_that_is_full_loses_its_hits_and_drives_keep_them(published):
    """As Mooncake measured it: hits fall from 83 to 36% when the rounds outgrow 80 GB, and stay above 84% with SSDs."""
    rows = list(published.ssd())
    assert [row.ours for row in rows if row.what.startswith("where the hits")] == ["82% to 28%, in round 8"]
    assert [row.ours for row in rows if row.what.startswith("hits with SSDs")] == ["87%"]


def test_figures_are_those_of_the_page(published):
    for row in published.ssd():
        for figure in row.ours.split(", "):
            assert figure in PAGE, row


def test_each_turn_holds_the_turns_before_it(published):
    made = published.conversations(published.Turns(2, 3, 128, 64, 64, common=64), block_size=64).requests
    assert [request.input_length for request in made] == [192, 192, 320, 320, 448, 448]
    first, other, second = (made[place].hash_ids for place in (0, 1, 2))
    assert second[:3] == first
    assert (first[0], set(first[1:]) & set(other)) == (other[0], set())
    assert [request.after for request in made] == [(), (), (0,), (1,), (2,), (3,)]


def test_the_example_has_every_tier_and_each_can_be_varied(tmp_path):
    example = ["--deployment", ROOT / "examples" / "kv_tiers.yaml", "--max-requests", "60"]
    sizes = ["--vary", "kv_disk_size=0,4096", "--vary", "kv_store_size=0,16384"]
    done = dynabench("simulate", *example, *sizes, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    arms = json.loads((tmp_path / "out" / "summary.json").read_text())["arms"]
    assert len(arms) == 4
    tiers = [{tier["tier"] for tier in arm["tiers"]} for arm in arms.values()]
    assert tiers == [{"host"}, {"host", "store"}, {"host", "disk"}, {"host", "disk", "store"}]
