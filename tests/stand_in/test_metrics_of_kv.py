"""What a stand-in's metrics show of KV that comes from elsewhere: from another engine, or from host memory."""

import tempfile

import pytest
import uvloop

from serving.engines.mock.engine import EngineConfig, Mocker, TimingConfig
from serving.model.files import ModelFiles
from serving.stand_in.config import KvHandoverConfig, StandInConfig
from serving.stand_in.vllm.metrics.metrics import VllmMetrics
from serving.transfer.config import TransferRunConfig
from serving.worker.config import WorkerConfig
from tests.engines.kv_world import FIRST, TOKEN, Pair
from tests.engines.test_mocker_roles import Served
from tests.stand_in.metric_facts import values
from tests.stand_in.test_metrics import complete, of_histogram, scraped, series, talk, until_shown
from tests.support.waiting import in_time, until_async

FAST = TimingConfig(timing="constant", speedup_ratio=20.0)
ENGINE = EngineConfig(block_size=4, num_gpu_blocks=100)
PROMPT = list(range(1, 60))
BLOCK_BYTES = 2 << 20
"""Bytes of 16 tokens, of a model whose shape is not known."""


@pytest.fixture
def short_folder(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield folder


async def observed(role):
    """Start a mocker; return it and its metrics."""
    mocker = Mocker(WorkerConfig(role=role), ENGINE, FAST, transfer=TransferRunConfig())
    mocker.transfer_with(lambda: TOKEN)
    await mocker.start(ModelFiles({}))
    part = "kv_producer" if role == "prefill" else "kv_consumer"
    config = StandInConfig(model="tiny", engine=ENGINE, kv_handover=KvHandoverConfig(role=part))
    metrics = VllmMetrics(config, 4096)
    metrics.observe(mocker)
    mocker.publish_to([])
    return mocker, metrics


def test_a_prompt_that_another_engine_computed_is_external(short_folder):
    async def main():
        async with in_time():
            (prefill, of_prefill), (decode, of_decode) = await observed("prefill"), await observed("decode")
            pair = Pair(Served(prefill), Served(decode))
            first = await pair.ask(pair.prefill, PROMPT, kv_transfer_params=FIRST).over()
            await pair.answer(PROMPT, 5, first.said("kv_transfer_params")).over()
            await until_async(lambda: not decode.load(0).num_running)
            counted = [values(each.text().decode()) for each in (of_prefill, of_decode)]
            await decode.close()
            await prefill.close()
            return counted

    computed, read = uvloop.run(main())
    assert (
        "vllm:num_requests_kv_fetch_by_stage",
        ("engine", "0"),
        ("model_name", "tiny"),
        ("stage", "in_progress"),
    ) in read
    assert not [key for key in computed if key[0] == "vllm:num_requests_kv_fetch_by_stage"]  # it reads none
    for each, name, count in (
        (computed, "local_compute", 59),
        (computed, "external_kv_transfer", 0),
        (read, "local_compute", 0),
        (read, "external_kv_transfer", 59),
    ):
        assert series(each, "prompt_tokens_by_source_total", source=name) == count
    assert series(read, "prompt_tokens_cached_by_source_total", source="p2p") == 59
    assert series(read, "external_prefix_cache_hits_total") == series(read, "external_prefix_cache_queries_total") == 59
    assert series(read, "prefix_cache_queries_total") == 59
    assert of_histogram(read, "nixl_bytes_transferred") == (1, 15 * 4 * 131_072)
    assert series(read, "nixl_xfer_time_seconds_count") == 1
    assert of_histogram(read, "iteration_tokens_total") == (5, 5)
    assert series(computed, "request_success_total", finished_reason="length") == 1
    assert series(computed, "generation_tokens_total") == 1


def test_a_prompt_that_host_memory_kept_is_external():
    engine = EngineConfig(block_size=16, num_gpu_blocks=14, max_model_len=200, num_host_blocks=64)

    async def ask(client):
        for number, letter in enumerate("abc", start=1):  # each has 10 blocks, so that the first is evicted
            await complete(client, letter * 160, max_tokens=2)
            num_bytes = number * 10 * BLOCK_BYTES
            await until_shown(client, "kv_offload_total_bytes_total", num_bytes, transfer_type="GPU_to_CPU")
        await complete(client, "a" * 160, max_tokens=2)
        return values(await scraped(client))

    counted = talk(ask, engine=engine, timing=FAST)
    kept = series(counted, "prompt_tokens_cached_by_source_total", source="host")
    assert kept == series(counted, "external_prefix_cache_hits_total") > 0
    assert series(counted, "prompt_tokens_by_source_total", source="external_kv_transfer") == kept
    assert series(counted, "prompt_tokens_total") == 640
    assert series(counted, "kv_offload_load_bytes_total") == series(
        counted, "kv_offload_total_bytes_total", transfer_type="CPU_to_GPU"
    )
