import gzip
import json

import numpy as np
import pytest

from workloads import Request, Workload, WorkloadError, mooncake
from workloads.describe import describe
from workloads.shape import ShapeConfig, shape
from workloads.synthesize import SynthConfig, synthesize
from workloads.tokens import prompt_tokens

ROW = {"timestamp": 1000, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}


def write(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_a_trace_is_read_plain_or_compressed(tmp_path):
    plain = write(tmp_path / "a.jsonl", ROW, ROW)
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert list(mooncake.read(plain)) == list(mooncake.read(packed)) == [Request(1.0, 700, 5, (0, 1))] * 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 2.*truncated"),
        (
            {key: value for key, value in ROW.items() if key != "output_length"},
            "line 2.*missing required field `output_length`",
        ),
        (ROW | {"input_length": -1}, "line 2: input_length must be at least 1, not -1"),
        (ROW | {"output_length": 0}, "line 2: output_length must be at least 1"),
        (ROW | {"timestamp": 5}, "line 2: timestamp 5 is before the line above"),
        (ROW | {"hash_ids": [1]}, "line 2: 700 tokens in blocks of 512 need 2 hash_ids, not 1"),
        (ROW | {"input_length": "many"}, "line 2.*Expected `int`"),
    ],
)
def test_a_bad_line_is_named(tmp_path, row, message):
    with pytest.raises(WorkloadError, match=message):
        list(mooncake.read(write(tmp_path / "bad.jsonl", ROW, row)))


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(WorkloadError, match=r"none.jsonl: cannot be read"):
        list(mooncake.read(tmp_path / "none.jsonl"))
    broken = tmp_path / "b.jsonl.gz"
    broken.write_bytes(b"not gzip")
    with pytest.raises(WorkloadError, match="cannot be read"):
        list(mooncake.read(broken))


def test_equal_ids_become_equal_tokens():
    one, two = Request(0.0, 700, 1, (3, 4)), Request(0.0, 1024, 1, (3, 5))
    first, second = prompt_tokens(one, 512), prompt_tokens(two, 512)
    assert len(first) == 700
    assert (first[:512] == second[:512]).all()
    assert (first[512:] != second[512:700]).any()
    assert (prompt_tokens(one, 512, salt="x") != first).mean() > 0.9


def test_the_same_seed_makes_the_same_workload():
    config = SynthConfig(requests=200, turns=3, prefix_depth=2, arrival="gamma", burstiness=0.5)
    assert synthesize(config) == synthesize(config)
    assert synthesize(config) != synthesize(SynthConfig(requests=200, turns=3, prefix_depth=2, seed=1))


def test_a_synthetic_workload_is_a_valid_trace(tmp_path):
    requests = synthesize(SynthConfig(requests=300, turns=4, block_size=64, isl=100))
    with (tmp_path / "s.jsonl").open("wb") as file:
        mooncake.write(requests, file)
    again = list(mooncake.read(tmp_path / "s.jsonl", block_size=64))
    assert len(again) == 300
    assert [request.hash_ids for request in again] == [request.hash_ids for request in requests]


def test_synthetic_lengths_rates_and_sharing_follow_the_dials():
    config = SynthConfig(requests=4000, rate=8, isl=600, osl=50, prefix_blocks=2, prefix_groups=4)
    facts = describe(Workload("s", 512, synthesize(config)))
    assert facts.isl["mean"] == pytest.approx(1024 + 600, rel=0.05)
    assert facts.osl["mean"] == pytest.approx(50, rel=0.05)
    assert facts.rate == pytest.approx(8, rel=0.08)
    assert facts.burstiness_cv == pytest.approx(1, abs=0.1)
    assert facts.endless_cache_hit_share == pytest.approx(1024 / 1624, abs=0.02)
    bursty = describe(Workload("b", 512, synthesize(SynthConfig(requests=4000, arrival="gamma", burstiness=0.25))))
    assert bursty.burstiness_cv == pytest.approx(2, abs=0.3)  # 1 / sqrt(burstiness)


def test_ids_are_chained():
    parents = {}
    for request in synthesize(SynthConfig(requests=500, turns=3, prefix_depth=3, prefix_groups=6)):
        for place, hash_id in enumerate(request.hash_ids):
            assert parents.setdefault(hash_id, request.hash_ids[:place]) == request.hash_ids[:place]


def test_shaping_cuts_scales_caps_and_starts_at_zero():
    requests = [Request(float(second), 1500, 10, (0, second + 1, second + 100)) for second in range(10)]
    shaped = shape(Workload("w", 512, requests), ShapeConfig(start_s=2, duration_s=5, rate_scale=2, cap_isl=600))
    assert [request.arrival_s for request in shaped] == [0, 0.5, 1, 1.5, 2]
    assert {(request.input_length, len(request.hash_ids)) for request in shaped} == {(600, 2)}
    assert len(shaped.notes) == 3
    with pytest.raises(WorkloadError, match="no request is left"):
        shape(Workload("w", 512, requests), ShapeConfig(start_s=50))


def test_spreading_ticks_keeps_order_and_stays_inside_the_tick():
    requests = [Request(3.0 * (number // 5), 1, 1, (number,)) for number in range(20)]
    spread = shape(Workload("w", 512, requests), ShapeConfig(spread_ticks=True))
    arrivals = np.array([request.arrival_s for request in spread])
    assert [request.hash_ids for request in spread] == [request.hash_ids for request in requests]
    assert (np.diff(arrivals) >= 0).all()
    assert len(set(arrivals)) == 20


def test_settings_without_a_meaning_are_refused():
    with pytest.raises(ValueError, match="rate must be greater than 0, not 0"):
        SynthConfig(rate=0)
    with pytest.raises(ValueError, match="rate_scale must be greater than 0"):
        ShapeConfig(rate_scale=-1)
