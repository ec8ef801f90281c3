"""Runs of so many requests that not everything is kept in memory."""

import mmap

import numpy as np
import pytest

from dynabench.arm import Run, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.virtual import gaps, stamps
from dynabench.virtual.run import simulate
from foundation import large
from mocker import EngineConfig
from reports.figures.gap_bins import GAP_ERROR
from reports.figures.metrics import TokenGaps
from reports.record.records import COLUMNS
from workloads import Workload
from workloads.pacing import LoadConfig
from workloads.synthesize import SynthConfig, synthesize


def simulated(load):
    workload = Workload("w", 512, synthesize(SynthConfig(requests=300, rate=20, isl=500, osl=60)))
    deployment = Deployment(pools=(Pool(replicas=3, mocker=EngineConfig(block_size=64)),))
    return simulate(Run.alone(Settings(deployment, load=load)), workload)


@pytest.mark.parametrize("load", [LoadConfig(), LoadConfig(warmup_s=5.0)])
def test_only_the_times_between_tokens_differ_and_those_by_less_than_a_bin(monkeypatch, load):
    exact = simulated(load)
    monkeypatch.setattr(gaps, "MOST_ROWS", 100)
    monkeypatch.setattr(stamps, "REQUESTS_PER_TIDY", 20)
    found = simulated(load)
    assert (exact.requests.last_token_s == found.requests.last_token_s).all()
    assert found.gap_starts_s is None
    assert (exact.facts.get("gap_error"), found.facts["gap_error"]) == (None, GAP_ERROR)
    one, other = TokenGaps(exact.gaps), TokenGaps(found.gaps)
    assert (other.count, other.max()) == (one.count, pytest.approx(one.max()))
    assert other.mean() == pytest.approx(one.mean(), rel=1e-9)
    shares = np.array([0.5, 0.9, 0.99])
    assert other.quantiles(shares) == pytest.approx(one.quantiles(shares), rel=2 * GAP_ERROR)


def test_a_run_of_usual_size_keeps_them_all():
    assert simulated(LoadConfig()).gap_starts_s is not None


def is_in_a_file(values):
    while isinstance(values, np.ndarray):
        values = values.base
    return isinstance(values, memoryview) and isinstance(values.obj, mmap.mmap)


def test_what_is_kept_in_files_is_the_same(monkeypatch):
    usual = simulated(LoadConfig()).requests
    assert not is_in_a_file(usual.last_token_s)
    monkeypatch.setattr(large, "LARGE_BYTES", 64)
    monkeypatch.setattr(stamps, "REQUESTS_PER_TIDY", 20)
    found = simulated(LoadConfig()).requests
    assert is_in_a_file(found.last_token_s)
    for name in COLUMNS:
        assert getattr(found, name).tolist() == getattr(usual, name).tolist()
