"""What a results folder keeps of how it was made."""

import json
import sys
from dataclasses import replace

import pytest

from dynabench.arm import ClientConfig, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.experiment.arms import comparison_of
from dynabench.experiment.manifest import manifest_of, subtitle_of
from dynabench.experiment.run import run_experiment
from dynabench.experiment.settings import ExperimentConfig
from dynabench.experiment.source import load_workload
from dynabench.experiment.step_times import describe_step_times
from dynabench.terminal import Terminal
from foundation.errors import UserError
from mocker.timing.config import TimingConfig
from serving.runtime.config import RuntimeConfig
from tests.support.servers import free_port
from workloads.pacing import LoadConfig
from workloads.shape import ShapeConfig


def test_results_keep_no_password_from_an_address(monkeypatch):
    words = ["--url", "http://me:hunter2@host:1", "--etcd-endpoints=me:hunter2@host:2"]
    words += ["--nats-server", "me:hunter2@host:3", "--label", "a=b@c"]
    words += [
        "--etcd-password",
        "hunter2",
        "--nats-token=hunter2",
        "--nats-password",
        "hunter2",
        "--api-key",
        "hunter2",
    ]
    monkeypatch.setattr(sys, "argv", ["dynabench", "run", *words])
    runtime = RuntimeConfig(etcd_endpoints="http://me:hunter2@host:2", nats_server="nats://hunter2@host:3")
    settings = Settings(Deployment(runtime=runtime), client=ClientConfig(url="http://me:hunter2@host:1"))
    workload = load_workload((), None, ShapeConfig(max_requests=1), 0)
    manifest = manifest_of("wall", (), workload, ExperimentConfig(), settings, [], [])
    assert "hunter2" not in json.dumps(manifest, default=str)
    assert manifest["client"]["url"] == "http://***@host:1"
    assert manifest["deployment"]["runtime"]["etcd_endpoints"] == "http://***@host:2"
    assert manifest["command"].endswith(
        "--url 'http://***@host:1' '--etcd-endpoints=***@host:2' --nats-server '***@host:3' --label a=b@c "
        "--etcd-password '***' '--nats-token=***' --nats-password '***' --api-key '***'"
    )


@pytest.mark.parametrize("axis", ["workers=1,2", "num_gpu_blocks=77,88", "kv_overlap_score_weight=0,1"])
def test_settings_of_our_stack_are_not_varied_where_somebody_elses_answers(axis):
    settings = Settings(client=ClientConfig(url="http://host:1"))
    with pytest.raises(ValueError, match=f"{axis.partition('=')[0]} cannot be varied with --url"):
        comparison_of(ExperimentConfig(router_mode=("kv",), vary=(axis,)), settings)
    experiment = ExperimentConfig(router_mode=("kv",), vary=("concurrency=1,2",))
    assert len(comparison_of(experiment, settings).arms) == 2


def test_an_endpoint_where_nothing_listens_is_sent_nothing(tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    settings = Settings(client=ClientConfig(url=url))
    with pytest.raises(UserError, match=rf"no server responds at {url} \(Connection refused\)"):
        run_experiment("wall", (), ExperimentConfig(out=tmp_path / "x"), settings, console=Terminal())
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("ends", "said", "counts"),
    [
        ((), "answers end by length;", {"length": 3}),
        (("stop",), "answers end by EOS (simulated ones at the workload's lengths);", {"stop": 3}),
        (("length", "stop"), "how answers end is varied;", {"length": 3}),
    ],
)
def test_results_say_how_answers_were_to_end(ends, said, counts):
    shape = ShapeConfig(max_requests=3, ends=ends[0] if ends else None)
    settings = Settings(shape=shape)
    experiment = ExperimentConfig(router_mode=("kv",), vary=(f"ends={','.join(ends)}",) if len(ends) > 1 else ())
    workload = load_workload((), None, shape, 0)
    manifest = manifest_of("virtual", (), workload, experiment, settings, comparison_of(experiment, settings).arms, [])
    assert said in manifest["subtitle"]
    assert manifest["workload"]["ends"] == counts


@pytest.mark.parametrize(("count", "said"), [(1, "1 request on "), (2, "2 requests on ")])
def test_results_say_how_many_requests_there_were(count, said):
    experiment, shape = ExperimentConfig(router_mode=("kv",)), ShapeConfig(max_requests=count)
    settings = Settings(shape=shape, load=LoadConfig(concurrency=1))
    workload, arms = load_workload((), None, shape, 0), comparison_of(experiment, settings).arms
    subtitle = subtitle_of("virtual", workload, experiment, settings, arms)
    assert subtitle.startswith(said)
    assert ", 1 request at a time, " in subtitle


@pytest.mark.parametrize(
    ("load", "shape", "is_said"),
    [
        ({}, {}, True),
        ({"max_concurrency": 2}, {}, True),
        ({"session_concurrency": 2}, {}, False),
        ({"concurrency": 2}, {}, False),
        ({}, {"arrival": "poisson", "rate": 1.0}, False),
    ],
)
def test_sessions_without_arrival_times_are_said_to_start_at_once(tmp_path, load, shape, is_said):
    for name in ("a", "b"):
        turn = {"t": 0.0, "in": 64, "out": 4, "hash_ids": [1], "type": "n"}
        calls = [turn, turn | {"t": 5.0, "in": 128, "hash_ids": [1, 2]}]
        (tmp_path / f"{name}.json").write_text(json.dumps({"id": name, "block_size": 64, "requests": calls}))
    settings = Settings(shape=ShapeConfig(**shape), load=LoadConfig(**load))
    experiment = ExperimentConfig(router_mode=("kv",))
    workload, arms = load_workload((tmp_path,), None, settings.shape, 0), comparison_of(experiment, settings).arms
    assert (len(workload), workload.has_dependencies) == (4, True)
    said = "all 2 requests that wait for no other arrive at once; set arrival times with --arrival, or send them with"
    assert (said in subtitle_of("virtual", workload, experiment, settings, arms)) is is_said


LLAMA = TimingConfig(model="meta-llama/Llama-3.1-70B", gpu="h100", tensor_parallel_size=4, quantization="fp8")


@pytest.mark.parametrize(
    ("pools", "said"),
    [
        ((Pool(),), "generic: a polynomial of no particular model or GPU"),
        (
            (Pool(timing=TimingConfig(speedup_ratio=2)),),
            "generic: a polynomial of no particular model or GPU, divided by 2",
        ),
        (
            (Pool(timing=TimingConfig(timing="constant", constant_prefill_ms=5)),),
            "generic: constant, 5 ms for prefill and 10 ms for decode, of no particular model or GPU",
        ),
        (
            (Pool(name="p", role="prefill", timing=LLAMA), Pool(name="d", role="decode", timing=LLAMA)),
            "roofline of meta-llama/Llama-3.1-70B with fp8 weights on h100 and tensor parallel size 4, timed as vllm",
        ),
        (
            (
                Pool(name="p", role="prefill", timing=replace(LLAMA, gpu="b200", tensor_parallel_size=1)),
                Pool(name="d", role="decode", timing=LLAMA),
            ),
            "p: roofline of meta-llama/Llama-3.1-70B with fp8 weights on b200, timed as vllm; "
            "d: roofline of meta-llama/Llama-3.1-70B with fp8 weights on h100 and tensor parallel size 4, timed as vllm",
        ),
        (
            (Pool(timing=TimingConfig(model="openai/gpt-oss-120b", gpu="h200", moe_backend="marlin")),),
            "roofline of openai/gpt-oss-120b on h200, timed as vllm with moe_backend marlin",
        ),
        ((Pool(engine="echo_core"),), None),
    ],
)
def test_results_name_the_step_time_model_and_what_it_is_of(pools, said):
    assert describe_step_times([Deployment(pools=pools)]) == said


def test_arms_that_differ_in_step_times_are_named_by_them_while_they_are_few():
    deployments = [
        Deployment(pools=(Pool(timing=TimingConfig(timing="table", timing_file=f"/x/{name}.csv")),)) for name in "abcde"
    ]
    assert (
        describe_step_times(deployments[:2] * 2)
        == "by arm: table a.csv of measured steps; or table b.csv of measured steps"
    )
    assert describe_step_times(deployments) == "5 kinds, by arm (see the settings)"


def test_somebody_elses_endpoint_has_no_step_times_of_ours():
    settings = Settings(client=ClientConfig(url="http://localhost:1"))
    manifest = manifest_of("wall", (), load_workload((), None, ShapeConfig(), 0), ExperimentConfig(), settings, [], [])
    assert manifest["step_times"] is None
