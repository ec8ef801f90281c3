"""A frontend before vLLM workers of both roles, over HTTP."""

import asyncio
import os
import signal

import httpx
import pytest

from dynabench.deployment.description import Deployment, Pool
from dynabench.live.stack import LocalStack
from serving.frontend.config import FrontendConfig
from serving.runtime.address import EndpointAddress
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.messages import pack_u32
from serving.worker.config import WorkerConfig, flags_to_arguments
from tests.real_engines.test_vllm import tokens
from tests.support.processes import is_alive
from tests.support.stacks import in_background
from tests.support.waiting import in_time, until, until_async

pytestmark = pytest.mark.timeout(900)
BLOCK = 32


@pytest.fixture(scope="module")
def stack(engine, tmp_path_factory):
    def pool(role, **transfer):
        return Pool(
            name=role,
            role=role,
            engine="vllm",
            engine_args=flags_to_arguments(engine.flags) | {"kv_transfer_config": transfer},
            worker=WorkerConfig(model_path=str(engine.model), drain_s=86_400),
        )

    pools = (
        pool("prefill", kv_connector_extra_config={"kv_lease_duration": 100_000}),  # what is freed was read
        pool("decode", kv_load_failure_policy="fail"),  # what is answered was read, too
    )
    network = RuntimeConfig(etcd_endpoints="", nats_server="", discovery_dir=str(tmp_path_factory.mktemp("discovery")))
    frontend = FrontendConfig(http_port=0, drain_s=5.0)
    made = LocalStack(Deployment(pools=pools, router_mode="kv", frontend=frontend, runtime=network))
    made.network = network
    with in_background(made):
        yield made


def ask(stack, prompt, **more):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    body["nvext"] = {"extra_fields": ["worker_id", "timing"], "ignore_eos": True}
    answer = httpx.post(f"{stack.url}/v1/completions", json=body | more, timeout=240)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_an_answer_is_prefilled_by_one_and_said_by_another(stack, reference, tokenizer):
    for number, length in enumerate((5, BLOCK, 10 * BLOCK + 3)):
        prompt = tokens(f"stack {number}", length)
        answer = ask(stack, prompt)
        assert answer["choices"][0]["text"] == tokenizer.decode(reference.greedy(prompt, 8)[0])
        assert answer["usage"]["completion_tokens"] == 8
        workers = answer["nvext"]["worker_id"]
        assert workers["prefill_worker_id"] != workers["decode_worker_id"]


def test_cached_tokens_are_those_of_the_prefill_worker(stack):
    prompt = tokens("stack cached", 4 * BLOCK + 5)
    first, again = ask(stack, prompt), ask(stack, prompt)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 4 * BLOCK
    assert first["choices"][0]["text"] == again["choices"][0]["text"]


def test_a_prefill_worker_that_drains_waits_until_its_kv_was_read(stack, reference):
    """The last of all: it takes the worker away."""
    prompt = tokens("stack drain", 10 * BLOCK)
    asked = {
        "token_ids": pack_u32(prompt),
        "stop_conditions": {"max_tokens": 8, "min_tokens": 0, "ignore_eos": True, "stop": None},
        "sampling_options": {"temperature": 0},
        "eos_token_ids": [],
        "annotations": [],
        "dp_rank": 0,
        "request_id": "r",
    }

    health = httpx.get(f"{stack.url}/health").json()["instances"]
    addresses = [
        EndpointAddress(each["namespace"], each["component"], each["endpoint"])
        for each in sorted(health, key=lambda each: each["worker_type"] != "prefill")
    ]
    process = next(pid for name, pid in stack.group.processes.items() if "prefill" in name)

    async def main():
        async with await DistributedRuntime.connect(stack.network, drain_s=0.0) as runtime, in_time():
            prefill, decode = [await runtime.client(address) for address in addresses]
            for worker in (prefill, decode):
                await worker.wait_for_instances(1)
            [last] = [item async for item in prefill.direct(asked, prefill.instance_ids()[0])]
            os.kill(process, signal.SIGTERM)
            await until_async(lambda: not prefill.instance_ids())
            assert is_alive(process)
            shared = asked | {"kv_transfer_params": last["kv_transfer_params"]}
            items = [item async for item in decode.direct(shared, decode.instance_ids()[0])]
            said = [token for item in items for token in (item["token_ids"] if isinstance(item, dict) else item)]
            assert said == reference.greedy(prompt, 8)[0]

    asyncio.run(main())
    until(lambda: not is_alive(process))
