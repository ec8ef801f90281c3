"""Prefill and decode workers as processes: measured, served, and started one by one."""

import json

import httpx
import pytest

from dynabench.arm import ClientConfig, Run, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.flags import MeasuredFrontendConfig, MeasuredRouterConfig
from dynabench.live.run import measure
from dynabench.virtual.run import simulate
from mocker import EngineConfig, SglangConfig, TrtllmConfig
from mocker.network.config import TransferConfig
from mocker.timing.config import TimingConfig
from reports.figures.split import split_ttft
from reports.summarize import summarize
from serving.life import DisaggregationConfig
from tests.dynabench.test_serve import finish, start
from tests.serving.test_commands import terminal
from tests.support.commands import DYNAMO_RUN, dynabench
from tests.support.servers import free_port
from tests.support.waiting import PATIENCE_S, wait_for
from workloads import Request, Workload
from workloads.pacing import LoadConfig

FLOWS = ("source-first", "destination-first")


def apart(router=MeasuredRouterConfig(), **settings):  # noqa: B008 (frozen)
    engine = {"mocker": EngineConfig(block_size=16, num_gpu_blocks=500), "timing": TimingConfig(speedup_ratio=20.0)}
    return Deployment(
        pools=tuple(Pool(name=role, role=role, **engine) for role in ("prefill", "decode")),
        router=router,
        frontend=MeasuredFrontendConfig(),
        **settings,
    )


def workload(count=12):
    return Workload("w", 16, [Request(0.02 * n, 160, 5, tuple(range(10 * n, 10 * n + 10))) for n in range(count)])


@pytest.mark.parametrize("flow", FLOWS)
def test_a_live_run_says_where_the_ttft_of_each_request_went(flow):
    deployment = apart(disaggregation=DisaggregationConfig(flow=flow))
    record = measure(Run.alone(Settings(deployment, client=ClientConfig())), workload())
    found = record.requests
    assert (set(found.error), found.osl.tolist()) == ({""}, [5] * 12)
    assert (found.prefill_worker.tolist(), found.worker.tolist()) == ([0] * 12, [1] * 12)
    for name in ("admitted", "prefill_end", "decode_blocks", "transfer_start", "transfer_end", "decode_start"):
        assert not getattr(found, f"{name}_s").mask.any(), name
    for before, after in (
        ("admitted", "prefill_end"),
        ("decode_blocks", "transfer_end"),
        ("transfer_end", "decode_start"),
    ):
        assert (getattr(found, f"{before}_s") <= getattr(found, f"{after}_s")).all(), (before, after)
    parts = split_ttft([record])
    assert (parts.apart, parts.requests, parts.blocks_first) == (1.0, 12, flow == "destination-first")
    assert sum(parts.parts.values()) == pytest.approx(parts.ttft)
    assert summarize([record]).shows_ttst


@pytest.mark.parametrize(
    ("kind", "engine", "is_destination_first"),
    [
        ("sglang", {"sglang": SglangConfig(page_size=16, max_total_tokens=8000)}, True),
        ("trtllm", {"trtllm": TrtllmConfig(tokens_per_block=16, kv_cache_max_tokens=8000)}, False),
    ],
)
def test_live_workers_with_other_schedulers_share_requests_as_their_engines_do(kind, engine, is_destination_first):
    timing = TimingConfig(speedup_ratio=20.0)
    pools = [Pool(name=role, role=role, engine_type=kind, timing=timing, **engine) for role in ("prefill", "decode")]
    deployment = Deployment(pools=tuple(pools), router=MeasuredRouterConfig(), frontend=MeasuredFrontendConfig())
    found = measure(Run.alone(Settings(deployment, client=ClientConfig())), workload(6)).requests
    assert (set(found.error), found.osl.tolist()) == ({""}, [5] * 6)
    assert (found.prefill_worker.tolist(), found.worker.tolist()) == ([0] * 6, [1] * 6)
    assert (found.transfer_end_s <= found.decode_start_s).all()
    assert (found.decode_blocks_s <= found.prefill_end_s).all() == is_destination_first


def test_live_and_simulated_transfers_take_what_the_deployments_links_say():
    """A prompt has 160 MB: it takes 0.3 s and 0.08 s."""
    links = TransferConfig(latency_ms=300, bandwidth_gb_s=2, kv_bytes_per_token=1e6)
    alone = Workload("w", 16, [Request(0.0, 160, 5, tuple(range(10)))])
    for client, may_be_late in ((ClientConfig(), True), (None, False)):
        settings = Settings(apart(transfer=links), client=client)
        found = (measure if client else simulate)(Run.alone(settings), alone).requests
        took_s = (found.transfer_end_s - found.transfer_start_s).tolist()[0]
        assert took_s >= 0.379
        assert may_be_late or took_s == pytest.approx(0.38)


def test_prompts_that_a_decode_worker_mostly_has_are_not_sent_to_a_prefill_worker():
    local = DisaggregationConfig(conditional_disagg="isl_bounding")
    deployment = apart(
        disaggregation=local, router=MeasuredRouterConfig(use_kv_events=False)
    )  # predicts, and waits for none
    alike = Workload("w", 16, [Request(0.0, 160, 5, (*range(9), 9 + n)) for n in range(4)])
    settings = Settings(deployment, load=LoadConfig(concurrency=1), client=ClientConfig())
    record = measure(Run.alone(settings), alike)
    assert record.requests.prefill_worker.tolist() == [0, None, None, None]
    parts = split_ttft([record])
    assert (parts.apart, parts.requests) == (0.25, 4)
    assert sum(parts.parts.values()) == pytest.approx(parts.ttft)


def test_the_command_ends_in_a_report_with_the_split_of_ttft(tmp_path):
    flags = ("--prefill-workers", 1, "--decode-workers", 1, "--transfer", "shm")
    load = ("--max-requests", 10, "--speedup-ratio", 20, "--router-mode", "kv")
    done = dynabench("run", "--all-metrics", *flags, *load, "--out", tmp_path / "out")
    assert done.returncode in (0, 1), done.stdout + done.stderr  # 1: a busy machine made the client late
    assert "Where does TTFT go?" in done.stdout
    assert "TTST" in done.stdout
    arm = json.loads((tmp_path / "out" / "summary.json").read_text())["arms"]["kv"]
    assert (arm["failed"], arm["split"]["apart"]) == (0, 1.0)
    assert [(pool["role"], pool["busy"]) for pool in arm["pools"]] == [("prefill", None), ("decode", None)]
    assert "Where does TTFT go?" in (tmp_path / "out" / "report.html").read_text()


def asked(url):
    body = {"model": "mock", "prompt": "once upon a time " * 20, "max_tokens": 4}
    answer = httpx.post(
        f"{url}/v1/completions", json=body | {"nvext": {"extra_fields": ["worker_id", "timing"]}}, timeout=PATIENCE_S
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4
    return answer.json()["nvext"]


def test_a_deployment_file_with_roles_is_served(tmp_path):
    port = free_port()
    file = tmp_path / "deployment.yaml"
    file.write_text(
        f"frontend: {{http_port: {port}}}\nkv_transfer: {{transfer: tcp}}\n"
        "pools: {p: {role: prefill, speedup_ratio: 20}, d: {role: decode, speedup_ratio: 20}}"
    )
    process = start(tmp_path, "--deployment", file)
    url = f"http://127.0.0.1:{port}"
    wait_for(url, 2, process)
    workers = asked(url)["worker_id"]
    assert workers["prefill_worker_id"] != workers["decode_worker_id"]
    finish(process, 2)


def test_workers_with_roles_are_started_one_by_one_in_any_order(tmp_path):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    folder = ("--discovery-dir", tmp_path / "d")
    with terminal(tmp_path) as shell:
        shell.run(DYNAMO_RUN, "in=dyn://", "out=mocker", "--role", "prefill", *folder)
        frontend = shell.run(DYNAMO_RUN, "in=http", "out=dyn", "--http-port", port, *folder)
        shell.run(DYNAMO_RUN, "in=dyn://", "out=mocker", "--role", "decode", *folder)
        wait_for(url, 2, frontend)
        assert {"prefill_worker_id", "decode_worker_id"} <= asked(url)["worker_id"].keys()
