"""What routers, autoscalers and dashboards of others read of a vLLM server is there, in the form in which they read it.

The lists are from their sources, in the autumn of 2026. Names that they still read and that vLLM 0.32 itself no longer has are
in `GONE`: they must be as absent here as they are there.
"""

import asyncio
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.stand_in.config import LoraConfig
from tests.stand_in.support import running

MODEL = {"model_name", "engine"}
HISTOGRAMS = (
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_max_num_generation_tokens",
    "vllm:iteration_tokens_total",
)
COUNTERS = (
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:external_prefix_cache_queries",
    "vllm:external_prefix_cache_hits",
    "vllm:num_preemptions",
)
QUEUES = ("vllm:num_requests_running", "vllm:num_requests_waiting")

READ_BY = {
    "llm-d's endpoint picker, and that of the Gateway API inference extension": [
        *((name, "gauge", MODEL) for name in (*QUEUES, "vllm:kv_cache_usage_perc")),
        ("vllm:cache_config_info", "gauge", {"block_size", "num_gpu_blocks"}),
        ("vllm:lora_requests_info", "gauge", {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}),
    ],
    "AIBrix": [
        *((name, "gauge", MODEL) for name in (*QUEUES, "vllm:kv_cache_usage_perc")),
        ("vllm:engine_sleep_state", "gauge", MODEL | {"sleep_state"}),
        *((name, "counter", MODEL) for name in COUNTERS),
        *((name, "histogram", MODEL) for name in HISTOGRAMS),
        ("vllm:lora_requests_info", "gauge", {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}),
        ("http_request_duration_seconds", "histogram", {"handler", "method"}),
        ("http_request_duration_highr_seconds", "histogram", set()),
    ],
    "production-stack's router": [(name, "gauge", MODEL) for name in QUEUES],
    "vLLM's router, which counts the data-parallel ranks": [(name, "gauge", {"engine"}) for name in QUEUES],
    "KEDA, and Prometheus' adapter for the HPA": [("vllm:num_requests_waiting", "gauge", MODEL)],
    "vLLM's dashboards": [
        ("vllm:request_success", "counter", MODEL | {"finished_reason"}),
        ("vllm:kv_cache_usage_perc", "gauge", MODEL),
        *((name, "counter", MODEL) for name in COUNTERS[:4]),
        *((name, "histogram", MODEL) for name in HISTOGRAMS),
    ],
}
GONE = (
    "vllm:gpu_cache_usage_perc",
    "vllm:cpu_cache_usage_perc",
    "vllm:num_requests_swapped",
    "vllm:gpu_prefix_cache_hits",
    "vllm:gpu_prefix_cache_queries",
    "vllm:gpu_prefix_cache_hit_rate",
    "vllm:time_per_output_token_seconds",
    "vllm:avg_prompt_throughput_toks_per_s",
    "vllm:avg_generation_throughput_toks_per_s",
)


async def scraped():
    """Return the families of a stand-in with adapters that has answered a few requests, by name."""
    async with running(lora=LoraConfig(max_loras=2)) as client:
        asked = {"model": "tiny", "prompt": "x" * 64, "max_tokens": 5}
        for _ in range(2):
            assert (await client.post("/v1/completions", json=asked)).status_code == 200
        text = (await client.get("/metrics")).text
    return {family.name: family for family in text_string_to_metric_families(text)}


@pytest.fixture(scope="module")
def families():
    return asyncio.run(scraped())


@pytest.mark.parametrize("reader", READ_BY)
def test_each_reader_finds_its_families_with_their_types_and_labels(families, reader):
    for name, kind, labels in READ_BY[reader]:
        assert families[name].type == kind, name
        assert all(labels <= sample.labels.keys() for sample in families[name].samples), name


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_quantiles_can_be_taken_of_what_has_happened(families, name):
    buckets = {
        sample.labels["le"]: sample.value for sample in families[name].samples if sample.name == f"{name}_bucket"
    }
    (count,) = (sample.value for sample in families[name].samples if sample.name == f"{name}_count")
    assert buckets["+Inf"] == count > 0
    assert list(buckets.values()) == sorted(buckets.values())


def test_the_size_of_the_cache_is_in_labels_that_are_whole_numbers(families):
    (sample,) = families["vllm:cache_config_info"].samples
    assert (int(sample.labels["block_size"]), int(sample.labels["num_gpu_blocks"])) == (16, 256)


def test_the_latest_state_of_the_adapters_is_the_sample_with_the_highest_time(families):
    latest = max(families["vllm:lora_requests_info"].samples, key=lambda sample: sample.value)
    assert latest.labels == {"max_lora": "2", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert 0 < latest.value <= time.time()


def test_what_vllm_no_longer_has_is_not_here_either(families):
    assert not set(GONE) & set(families)


def test_the_counters_have_the_tokens_that_the_second_request_found_in_the_cache(families):
    (queries,) = (s.value for s in families["vllm:prefix_cache_queries"].samples if s.name.endswith("_total"))
    (hits,) = (s.value for s in families["vllm:prefix_cache_hits"].samples if s.name.endswith("_total"))
    assert (queries, hits) == (128, 48)
