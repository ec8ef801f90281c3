"""Several pools of different engines behind one router, on both clocks."""

import json

import pytest

from dynabench.arm import ClientConfig, Run, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.live.run import measure
from dynabench.virtual.run import simulate
from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from serving.frontend.config import FrontendConfig
from tests.support.commands import dynabench
from workloads import Request, Workload, WorkloadError


def pool(name, replicas, prefill_ms, blocks=1000):
    timing = TimingConfig(timing="constant", constant_prefill_ms=prefill_ms, constant_decode_ms=1.0)
    return Pool(name=name, replicas=replicas, mocker=EngineConfig(block_size=16, num_gpu_blocks=blocks), timing=timing)


def one_by_one(count, length=32):
    return Workload(
        "w", 16, [Request(float(number), length, 3, (2 * number, 2 * number + 1)) for number in range(count)]
    )


FAST_AND_SLOW = (pool("new", 1, 10.0), pool("old", 2, 100.0))


def test_each_pool_takes_its_own_time_in_virtual_time():
    record = simulate(Run.alone(Settings(Deployment(pools=FAST_AND_SLOW))), one_by_one(6))
    assert record.requests.worker.tolist() == [0, 1, 2, 0, 1, 2]
    ttft_ms = (record.requests.first_token_s - record.requests.sent_s) * 1000
    assert ttft_ms.tolist() == pytest.approx([10, 100, 100, 10, 100, 100])
    assert record.num_workers == 3


def test_a_request_must_fit_into_every_pool():
    small = pool("small", 1, 10.0, blocks=5)
    with pytest.raises(
        WorkloadError, match="request 0 has 100 prompt and 3 output tokens, more than the 64 that an engine"
    ):
        simulate(Run.alone(Settings(Deployment(pools=(*FAST_AND_SLOW, small)))), one_by_one(1, length=100))


def test_pools_of_different_engines_serve_one_model_over_http():
    deployment = Deployment(
        pools=(pool("new", 1, 1.0), pool("old", 1, 5.0, blocks=500)),
        router_mode="round-robin",
        frontend=FrontendConfig(http_port=0),
    )
    requests = [Request(number * 0.01, 40, 3, (number, 100 + number, 200)) for number in range(12)]
    record = measure(Run.alone(Settings(deployment, client=ClientConfig())), Workload("w", 16, requests))
    assert record.requests.succeeded.all()
    assert sorted(record.requests.worker.tolist()) == [0] * 6 + [1] * 6


TWO_MODELS = "pools: {a: {model_name: x}, b: {model_name: y}}"
TWO_POOLS = "pools: {new: {replicas: 1, timing: constant}, old: {replicas: 2}}"


def test_a_setting_of_a_pool_is_varied_by_its_path(tmp_path):
    (tmp_path / "d.yaml").write_text(TWO_POOLS)
    flags = ["-f", tmp_path / "d.yaml", "--max-requests", 30, "--out", tmp_path / "out"]
    done = dynabench("simulate", *flags, "--vary", "pools.old.replicas=1,3")
    assert done.returncode == 0, done.stderr
    experiment = json.loads((tmp_path / "out" / "experiment.json").read_text())
    assert experiment["workers"] == {"pools.old.replicas 1": 2, "pools.old.replicas 3": 4}
    assert experiment["deployment"]["pools"]["new"]["timing"] == "constant"
    assert "on 2 to 4 engines, in virtual time" in experiment["subtitle"]


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        (TWO_MODELS, (), "pools serve x, y; an experiment sends its requests to one model"),
        ("pools: {a: {engine: echo_full}}", (), "pools.a.engine is 'echo_full'; expected 'mocker'"),
        (TWO_POOLS, ("--vary", "workers=1,2"), "workers could belong to any pool; expected one of pools.new.replicas"),
        (TWO_POOLS, ("--vary", "pools.mid.replicas=1,2"), "pools.mid is unknown; expected one of new, old"),
        (
            TWO_POOLS,
            ("--vary", "pools.new.replicas=one"),
            "pools.new.replicas is 'one'; expected a whole number from 0 to 10000",
        ),
        (
            TWO_POOLS,
            ("--vary", "pools.new.block_size=16,32"),
            "pools.old.block_size is 64; expected 16, as in pools.new",
        ),
        (TWO_POOLS, ("--vary", "frontend.http_workers=1,2"), "frontend.http_workers applies only to real processes"),
        (TWO_POOLS, ("--vary", "pools.new.drain_s=1,2"), "pools.new.drain_s applies only to real processes"),
        (TWO_POOLS, ("--workers", "2"), "--workers cannot be used with --deployment "),
        (TWO_POOLS, ("--max-num-seqs", "256"), "a flag that describes a deployment cannot be used with --deployment "),
    ],
)
def test_what_cannot_be_simulated_is_one_line(tmp_path, text, flags, message):
    (tmp_path / "d.yaml").write_text(text)
    done = dynabench("simulate", "-f", tmp_path / "d.yaml", *flags, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("pools", "flags", "hint"),
    [
        ("{new: {}, old: {}}", ["--speedup-ratio", "0.9"], "--vary pools.new.speedup_ratio=0.9 (pools: new, old)"),
        ("{new: {}, old: {}}", ["--workers", "3"], "--vary pools.new.replicas=3 (pools: new, old)"),
        ("{new: {}}", ["--no-enable-prefix-caching"], "--vary pools.new.enable_prefix_caching=false (pools: new)"),
        ("{new: {}}", ["--planner", "hpa"], "--vary planner=hpa"),
        (
            "{echo: {engine: echo_full, model_name: echo}, new: {}}",
            ["--speedup-ratio", "2"],
            "--vary pools.new.speedup_ratio=2.0 (pools: new)",
        ),
    ],
)
def test_a_flag_beside_a_file_is_answered_with_the_vary_that_does_the_same(tmp_path, pools, flags, hint):
    (tmp_path / "d.yaml").write_text(f"pools: {pools}")
    done = dynabench("simulate", "-f", tmp_path / "d.yaml", *flags)
    assert done.returncode == 2
    assert done.stderr.endswith(f"put the setting in the file, or set it here with {hint}\n")
