"""What a stand-in's metrics show is what vLLM's show, and is counted when vLLM counts it."""

import asyncio
import json
from dataclasses import replace

import pytest

from serving.engines.mock.engine import AnswerConfig, EngineConfig, TimingConfig
from serving.stand_in.config import (
    ApiConfig,
    KvHandoverConfig,
    LogConfig,
    LoraConfig,
    LoraModule,
    RanksConfig,
    StandInConfig,
)
from serving.stand_in.server import stand_in
from tests.stand_in.metric_facts import facts, recorded, values
from tests.stand_in.support import client_of, running
from tests.support.waiting import in_time, until_async

SMALL = EngineConfig(block_size=32, num_gpu_blocks=200, max_model_len=4096)
HERMES = ApiConfig(tool_call_parser="hermes")
SETTINGS = {
    "default": {},
    "without_stats": {"logs": LogConfig(has_stats=False), "api": HERMES},
    "everything": {
        "api": HERMES,
        "lora": LoraConfig(max_loras=2),
        "kv_handover": KvHandoverConfig(),
        "engine": replace(SMALL, num_speculative_tokens=3, acceptance_rates="1,1,0", drafting_ms=0),
    },
    "offloading": {
        "engine": EngineConfig(block_size=32, num_gpu_blocks=200, max_model_len=4096, num_host_blocks=100),
        "timing": TimingConfig(timing="constant"),
    },
}


OF_REFUSED_FLAGS = ("vllm:kv_block",)
"""Families that vLLM shows with --kv-cache-metrics."""


def talk(conversation, **settings):
    """Have a conversation with a stand-in; return what it returns."""

    async def main():
        async with running(**({"engine": SMALL} | settings)) as client:
            return await conversation(client)

    return asyncio.run(main())


async def scraped(client):
    return (await client.get("/metrics")).text


async def complete(client, prompt, **more):
    answer = await client.post("/v1/completions", json={"model": "tiny", "prompt": prompt, "ignore_eos": True, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def series(counted, name, **labels):
    """Return the value of a series of the only engine."""
    labels = {"engine": "0", "model_name": "tiny", **labels}
    return counted[(f"vllm:{name}", *sorted(labels.items()))]


async def until_shown(client, name, value, **labels):
    """Wait until a series has a value; return all values then."""
    async with in_time():
        while series(counted := values(await scraped(client)), name, **labels) != value:
            await asyncio.sleep(0.005)
        return counted


def of_histogram(counted, name):
    return series(counted, f"{name}_count"), series(counted, f"{name}_sum")


@pytest.mark.parametrize("name", SETTINGS)
def test_families_types_labels_and_buckets_are_those_of_vllm(name):
    found, expected = facts(talk(scraped, **SETTINGS[name])), recorded(name)
    if name == "offloading":  # recorded without a server
        found = {family: fact for family, fact in found.items() if family.startswith("vllm:")}
        expected = {family: fact for family, fact in expected.items() if family.startswith("vllm:")}
    expected = {family: fact for family, fact in expected.items() if not family.startswith(OF_REFUSED_FLAGS)}
    assert found == expected


def test_families_come_in_the_order_of_vllm():
    found = [name for name in facts(talk(scraped)) if name.startswith("vllm:") and not name.endswith("_created")]
    assert found[:4] == [
        "vllm:estimated_flops_per_gpu",
        "vllm:estimated_read_bytes_per_gpu",
        "vllm:estimated_write_bytes_per_gpu",
        "vllm:num_requests_running",
    ]
    assert found[-1] == "vllm:cache_config_info"


def test_each_rank_is_an_engine_numbered_from_the_first_that_runs_here():
    engine = EngineConfig(block_size=32, num_gpu_blocks=200, max_model_len=4096, dp_size=2)
    text = talk(scraped, engine=engine, ranks=RanksConfig(size=4, first=2))
    for each in ("vllm:num_requests_running", "vllm:prompt_tokens_total", "vllm:cache_config_info"):
        lines = [line for line in text.splitlines() if line.startswith(f"{each}{{")]
        assert [f'engine="{number}"' in line for number, line in zip((2, 3), lines, strict=True)] == [True, True]


def test_stand_ins_in_one_process_count_apart():
    async def main():
        async with running(engine=SMALL) as one, running(engine=SMALL) as other:
            await complete(one, "x" * 10, max_tokens=3)
            return [series(values(await scraped(each)), "generation_tokens_total") for each in (one, other)]

    assert asyncio.run(main()) == [3, 0]


def test_a_repeated_prompt_is_counted_by_where_its_tokens_came_from():
    async def ask(client):
        for _ in range(2):
            await complete(client, "x" * 70, max_tokens=6)
        return values(await scraped(client))

    counted = talk(ask)
    assert series(counted, "prompt_tokens_total") == series(counted, "prefix_cache_queries_total") == 140
    assert series(counted, "prefix_cache_hits_total") == series(counted, "prompt_tokens_cached_total") == 64
    assert series(counted, "prompt_tokens_by_source_total", source="local_compute") == 76
    assert series(counted, "prompt_tokens_by_source_total", source="local_cache_hit") == 64
    assert series(counted, "prompt_tokens_cached_by_source_total", source="device") == 64
    assert series(counted, "external_prefix_cache_queries_total") == 0  # there is no connector
    assert of_histogram(counted, "iteration_tokens_total") == (12, 76 + 12)
    assert of_histogram(counted, "request_prefill_kv_computed_tokens") == (2, 76)
    assert of_histogram(counted, "request_generation_tokens") == (2, 12)
    assert of_histogram(counted, "request_params_max_tokens") == (2, 12)
    assert series(counted, "inter_token_latency_seconds_count") == 10
    assert series(counted, "request_success_total", finished_reason="length") == 2


def test_times_between_tokens_add_up_to_the_time_of_decoding():
    async def ask(client):
        await asyncio.gather(*(complete(client, "x" * length, max_tokens=length) for length in (9, 20, 40)))
        return values(await scraped(client))

    counted = talk(ask)
    between, decoding = (
        of_histogram(counted, name) for name in ("inter_token_latency_seconds", "request_decode_time_seconds")
    )
    assert (between[0], decoding[0]) == (9 + 20 + 40 - 3, 3)
    assert between[1] == pytest.approx(decoding[1])


def test_several_answers_to_a_prompt_are_one_request():
    async def ask(client):
        await complete(client, "x" * 70, max_tokens=5, n=3)
        await complete(client, ["x" * 70, "y"], max_tokens=4)
        return values(await scraped(client))

    counted = talk(ask)
    assert series(counted, "request_success_total", finished_reason="length") == 5
    assert of_histogram(counted, "request_params_n") == (3, 3 + 1 + 1)
    assert of_histogram(counted, "request_max_num_generation_tokens") == (3, 5 + 4 + 4)
    assert of_histogram(counted, "request_params_max_tokens") == (5, 3 * 5 + 2 * 4)


def test_an_answer_that_a_stop_string_ends_has_stopped():
    async def ask(client):
        text = (await complete(client, "x" * 10, max_tokens=40))["choices"][0]["text"]
        before = values(await scraped(client))
        answer = await complete(client, "x" * 10, max_tokens=40, stop=[text[7:12]])
        return answer["usage"]["completion_tokens"], before, values(await scraped(client))

    num_tokens, before, after = talk(ask)
    assert 0 < num_tokens < 40
    assert series(after, "request_success_total", finished_reason="stop") == 1
    for name in ("generation_tokens_total", "request_generation_tokens_sum"):
        assert series(after, name) - series(before, name) == num_tokens


def test_a_request_whose_client_hangs_up_never_finishes():
    async def ask(client):
        asked = {"model": "tiny", "prompt": "x" * 10, "max_tokens": 3000, "stream": True, "ignore_eos": True}
        async with client.stream("POST", "/v1/completions", json=asked) as answer:
            async for _ in answer.aiter_lines():
                break
            running_then = series(values(await scraped(client)), "num_requests_running")

        counted = await until_shown(client, "num_requests_running", 0)
        return running_then, counted

    running_then, counted = talk(ask)
    assert running_then == 1
    assert series(counted, "kv_cache_usage_perc") == 0
    assert series(counted, "generation_tokens_total") > 0
    assert series(counted, "time_to_first_token_seconds_count") == 1
    assert series(counted, "e2e_request_latency_seconds_count") == 0
    assert sum(value for (name, *_), value in counted.items() if name == "vllm:request_success_total") == 0


def test_preemptions_are_counted_by_engine_and_by_request():
    engine = EngineConfig(block_size=4, num_gpu_blocks=16, max_model_len=60)

    async def ask(client):
        await asyncio.gather(*(complete(client, letter * 10, max_tokens=30) for letter in "ab"))
        return values(await scraped(client))

    counted = talk(ask, engine=engine)
    assert series(counted, "num_preemptions_total") == series(counted, "request_num_preemptions_sum") > 0
    assert series(counted, "generation_tokens_total") == 60
    assert series(counted, "prompt_tokens_total") == 20
    assert series(counted, "prefix_cache_queries_total") == 20  # those of preempted requests are not counted


def test_requests_that_wait_for_their_turn_wait_for_capacity():
    engine = EngineConfig(block_size=32, num_gpu_blocks=200, max_model_len=4096, max_num_seqs=2)

    async def ask(client):
        asking = [asyncio.create_task(complete(client, "x" * 10, max_tokens=300)) for _ in range(5)]
        counted = await until_shown(client, "num_requests_waiting", 3)
        for task in asking:
            task.cancel()
        return counted

    counted = talk(ask, engine=engine)
    assert series(counted, "num_requests_running") == 2
    assert series(counted, "num_requests_waiting_by_reason", reason="capacity") == 3
    assert series(counted, "num_requests_waiting_by_reason", reason="deferred") == 0
    assert series(counted, "kv_cache_usage_perc") == pytest.approx(2 / 199, abs=20 / 199)


def test_calls_are_counted_by_route_as_by_the_instrumentator():
    async def ask(client):
        await client.get("/health")
        await client.get("/v1/models")
        await client.get("/nowhere")
        await client.delete("/v1/models")
        await client.post("/v1/completions", json={"model": "other", "prompt": "x"})
        return await scraped(client)

    lines = talk(ask).splitlines()
    counted = {line for line in lines if line.startswith("http_requests_total{")}
    assert counted == {
        'http_requests_total{handler="/v1/models",method="GET",status="2xx"} 1.0',
        'http_requests_total{handler="none",method="GET",status="4xx"} 1.0',
        'http_requests_total{handler="none",method="DELETE",status="4xx"} 1.0',
        'http_requests_total{handler="/v1/completions",method="POST",status="4xx"} 1.0',
    }
    assert 'http_request_size_bytes_sum{handler="/v1/completions"} 30.0' in lines
    assert "http_request_duration_highr_seconds_count 4.0" in lines


def test_the_settings_of_the_cache_are_labels():
    engine = EngineConfig(block_size=8, num_gpu_blocks=50, max_model_len=100, enable_prefix_caching=False)
    text = talk(
        scraped, engine=engine, given={"block_size": 8, "kv_cache_dtype": "fp8", "enable_prefix_caching": False}
    )
    [line] = [line for line in text.splitlines() if line.startswith("vllm:cache_config_info{")]
    for label, value in {
        "block_size": "8",
        "cache_dtype": "fp8",
        "num_gpu_blocks": "50",
        "kv_cache_size_tokens": "400",
        "kv_cache_max_concurrency": "4.0",
        "enable_prefix_caching": "False",
        "user_specified_block_size": "True",
    }.items():
        assert f"{label}={json.dumps(value)}" in line


IDLE_LINE = (
    "Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0 tokens/s, Running: 0 reqs, "
    "Waiting: 0 reqs, GPU KV cache usage: 0.0%, Prefix cache hit rate: 0.0%"
)


def test_lines_about_throughput_are_logged_while_something_happens_and_once_more(caplog):
    def lines():
        return [record.getMessage() for record in caplog.records if record.name.endswith("stats_log")]

    async def main():
        timing = TimingConfig(timing="constant", speedup_ratio=1000.0)
        config = StandInConfig(model="tiny", engine=SMALL, logs=LogConfig(stats_interval_s=0.05), timing=timing)
        async with stand_in(config) as server, client_of(server) as client:
            await complete(client, "x" * 70, max_tokens=6)
            assert server.metrics.stats_log.is_due
            await until_async(lambda: IDLE_LINE in lines())
            assert not server.metrics.stats_log.is_due

    with caplog.at_level("INFO", "serving.stand_in.vllm.metrics.stats_log"):
        asyncio.run(main())
    *busy, idle = lines()
    assert idle == IDLE_LINE
    assert IDLE_LINE not in busy
    assert busy[0].startswith("Engine 000: Avg prompt throughput: ")


@pytest.mark.parametrize(("path", "num_finished"), [("/pause", 1), ("/abort_requests", 0)])
def test_only_requests_that_the_engine_itself_aborts_are_finished(path, num_finished):
    async def ask(client):
        asking = asyncio.create_task(complete(client, "x" * 10, max_tokens=3000))
        await until_shown(client, "num_requests_running", 1)
        await client.post(path, json={})
        await asking
        return await until_shown(client, "num_requests_running", 0)

    counted = talk(ask, is_dev_mode=True)
    assert series(counted, "request_success_total", finished_reason="abort") == num_finished
    assert series(counted, "e2e_request_latency_seconds_count") == num_finished


LOOK_UP = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>'


def searches(tmp_path, *, stream, answer=CALL, **more):
    """Have a chat that may call a tool answered by a text; return what was counted, and the tokens of the answer."""
    (tmp_path / "answers.jsonl").write_text(f"{json.dumps({'prompt': 'x', 'answer': answer})}\n")

    async def ask(client):
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": [LOOK_UP]}
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        reply = await client.post("/v1/chat/completions", json=asked | options)
        assert reply.status_code == 200, reply.text
        usage = json.loads(reply.text.split("data: ")[-2])["usage"] if stream else reply.json()["usage"]
        counted = values(await scraped(client))
        found = {
            (labels["mode"], labels["outcome"], labels["request_type"]): value
            for (name, *pairs), value in counted.items()
            if name == "vllm:tool_call_parser_invocations_total" and value and (labels := dict(pairs))
        }
        return found, usage["completion_tokens"]

    api = ApiConfig(tool_call_parser="hermes", enable_auto_tool_choice=True, **more)
    return talk(ask, api=api, answers=AnswerConfig(answers=f"{tmp_path}/answers.jsonl"))


def test_an_answer_is_searched_for_tool_calls_once(tmp_path):
    found, _ = searches(tmp_path, stream=False)
    assert found == {("non_streaming", "tool_call", "chat_completions"): 1}


def test_a_streamed_answer_is_searched_for_tool_calls_with_every_token(tmp_path):
    found, num_tokens = searches(tmp_path, stream=True)
    assert found["streaming", "tool_call", "chat_completions"] >= 2  # the name, and the arguments
    assert sum(found.values()) == num_tokens


def test_reasoning_is_not_searched_for_tool_calls(tmp_path):
    thoughts = "<think>hm</think>"
    found, num_tokens = searches(tmp_path, stream=True, answer=thoughts + CALL, reasoning_parser="qwen3")
    assert sum(found.values()) == num_tokens - len(thoughts) + 1  # the token that ends it counts


def test_an_adapter_is_shown_from_its_first_token_to_its_end():
    lora = LoraConfig(max_loras=2, modules=(LoraModule(name="poems", path="org/poems"),))

    def combinations(text):
        return {line.split(" ")[0] for line in text.splitlines() if line.startswith("vllm:lora_requests_info{")}

    async def ask(client):
        body = {"model": "poems", "prompt": "x" * 10, "max_tokens": 3000, "stream": True, "ignore_eos": True}
        before = combinations(await scraped(client))
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for _ in answer.aiter_lines():
                break
            return before, combinations(await scraped(client))

    before, during = talk(ask, lora=lora)
    assert before == set()
    named = 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="poems",waiting_lora_adapters="poems"}'
    assert named in during


def test_drafts_are_counted_by_position_and_tokens_come_with_them():
    engine = EngineConfig(
        block_size=16,
        num_gpu_blocks=200,
        max_model_len=1024,
        num_speculative_tokens=2,
        acceptance_rates="1,0",
        drafting_ms=0,
    )

    async def conversation(client):
        answer = await complete(client, [1, 2, 3], max_tokens=11)
        assert answer["usage"]["completion_tokens"] == 11
        return await until_shown(client, "spec_decode_num_drafts_total", 5)

    counted = talk(conversation, engine=engine)
    assert series(counted, "spec_decode_num_draft_tokens_total") == 10
    assert series(counted, "spec_decode_num_accepted_tokens_total") == 5
    assert series(counted, "spec_decode_num_accepted_tokens_per_pos_total", position="0") == 5
    assert series(counted, "spec_decode_num_accepted_tokens_per_pos_total", position="1") == 0
    assert series(counted, "generation_tokens_total") == 11
