"""Disaggregated prefill and decode, held against published points: one configuration is here, all where `../shared/perfdata` lies."""

import csv
from pathlib import Path

import pytest

from tests.support import benchmarks

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "perfdata" / "e2e_points.csv"

# InferenceX, Kimi K2.5 in FP4 on vLLM 0.18 and GB200, ISL 8192, OSL 1024, one prefill and four decode workers with 4 GPUs
# each: concurrency, mean TTFT and TPOT (ms).
POINTS = [(4, 473.0, 7.116), (8, 496.5, 7.729), (16, 629.0, 8.686), (32, 811.5, 10.310), (128, 11635.6, 12.798)]
KIMI = {
    "backend": "vllm",
    "backend_version": "0.18.0",
    "model_path": "moonshotai/Kimi-K2.5",
    "system": "gb200",
    "precision": "fp4",
    "mode": "disagg",
    "isl": 8192,
    "osl": 1024,
    "prefill_num_workers": 1,
    "decode_num_workers": 4,
}
SIDE = {"tp_size": 4, "attention_dp_size": 1, "moe_ep_size": 4}
KIMI |= {f"{role}_{name}": value for role in ("prefill", "decode") for name, value in SIDE.items()}


def row(concurrency, ttft=500.0, tpot=10.0, **others):
    measured = {"silicon_ttft_ms": ttft, "silicon_tpot_ms": tpot, "decode_batch_size": concurrency / 4}
    return KIMI | measured | {"silicon_data_source": f"db-dump; silicon_concurrency={concurrency}"} | others


@pytest.fixture
def points():
    return benchmarks.program("disagg_points")


@pytest.fixture
def read(points, tmp_path):
    def read_rows(*rows):
        path = tmp_path / "points.csv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(KIMI | row(4)))
            writer.writeheader()
            writer.writerows(rows)
        return points.read(path)

    return read_rows


def test_points_whose_workers_are_not_counted_are_dropped_and_counted(read):
    table, dropped = read(row(4), row(8, prefill_num_workers=""), row(8, system="tpu"), row(8, mode="agg"))
    assert table.concurrency.tolist() == [4]
    assert dropped == {"numbers of workers not given": 1, "GPU not known": 1}


def test_a_point_without_a_concurrency_has_what_its_batches_come_to(read):
    table, _ = read(row(4, silicon_data_source="job 7", decode_batch_size=224, decode_attention_dp_size=2))
    assert table.concurrency.tolist() == [4 * 2 * 224]


def test_every_second_concurrency_is_fitted_and_two_are_too_few(points, read):
    rows = [row(concurrency) for concurrency, *_ in reversed(POINTS)]
    table, _ = read(*rows, row(4, isl=1024), row(8, isl=1024))
    [(known, others)] = points.halves(table)
    assert sorted(point.concurrency for point in known) == [4, 16, 128]
    assert sorted(point.concurrency for point in others) == [8, 32]


def test_the_burst_at_the_start_is_one_wave_of_ten(points):
    assert points.mean_of_waves([100.0, 100.0, 10.0, 10.0, 10.0, 10.0, 40.0, 40.0], 2) == pytest.approx(22.0)


def test_half_of_a_configuration_tells_the_rest_and_the_gpu_alone_tells_less(
    points, read, tmp_path, monkeypatch, capsys
):
    read(*(row(*point) for point in POINTS))
    monkeypatch.setattr(
        "sys.argv", ["", str(tmp_path / "points.csv"), "--most", "32", "--csv", str(tmp_path / "out.csv")]
    )
    points.main()
    with (tmp_path / "out.csv").open() as file:
        found = [line for line in csv.DictReader(file) if not line["problem"]]
    half, blind = ([line for line in found if line["prediction"] == name] for name in ("half fitted", "blind"))
    assert (len(half), len(blind)) == (2, 4)
    assert max(abs(float(line["ttft_error"])) for line in half) < 20
    assert max(abs(float(line["tpot_error"])) for line in half) < 10
    assert max(abs(float(line["ttft_error"])) for line in blind) < 65
    assert max(abs(float(line["tpot_error"])) for line in blind) < 20
    assert "not predicted: 1 points: more than 32 requests at a time" in capsys.readouterr().out


@pytest.mark.skipif(not DATA.exists(), reason="the measurements are not in the repository")
def test_146_published_points_count_their_workers(points):
    table, dropped = points.read(DATA)
    assert len(table) == 146
    assert dropped == {"numbers of workers not given": 611}
    assert sum(len(others) for _, others in points.halves(table)) == 37
