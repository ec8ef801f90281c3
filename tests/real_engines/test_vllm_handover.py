"""What vLLM's NixlConnector answers, and what a stand-in does: the same names and types, and the same statuses."""

import asyncio
import json

import httpx
import pytest

from serving.engines.mock.engine import EngineConfig
from serving.engines.mock.kv.nixl_peer import KvHandoverConfig
from tests.real_engines.serving_vllm import installed_version, until_ready, vllm_serve
from tests.real_engines.test_vllm_by_url import TRANSFER
from tests.stand_in.support import running
from tests.support.proxies import NONE

pytestmark = pytest.mark.timeout(600)
ASK = {"do_remote_decode": True, "do_remote_prefill": False, **NONE}
PROMPT = list(range(5, 105))


@pytest.fixture(scope="module")
def theirs(folder, tmp_path_factory):
    log = tmp_path_factory.mktemp("logs") / "vllm"
    flags = ("--enable-prompt-tokens-details", f"--kv-transfer-config={json.dumps(TRANSFER)}")
    with vllm_serve(folder, log, *flags) as (url, process):
        until_ready(url, process, log)
        with httpx.Client(base_url=url, timeout=120) as client:
            yield lambda body: client.post("/v1/completions", json=body)


@pytest.fixture
def ours(folder):
    """Ask a stand-in for the same instance, new each time."""
    handover = KvHandoverConfig(side_channel_host="127.0.0.1", side_channel_port=0)
    engine = EngineConfig(engine_version=installed_version(), block_size=32, num_gpu_blocks=200)

    def ask(*bodies):
        async def talk():
            async with running(model=str(folder), model_path=str(folder), served_model_names=("tiny",),
                               engine=engine, kv_handover=handover) as client:  # fmt: skip
                return [await client.post("/v1/completions", json=body) for body in bodies]

        return asyncio.run(talk())

    return ask


def request(prompt=PROMPT, max_tokens=1, **more):
    return {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True} | more


def kinds(value):
    """Return the types in JSON, of lists those of their entries."""
    if isinstance(value, dict):
        return {name: kinds(each) for name, each in value.items()}
    return [kinds(each) for each in value] if isinstance(value, list) else type(value).__name__


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_an_instance_that_computes_a_prompt_answers_with_the_same_parameters(theirs, ours, max_tokens):
    asked = request(max_tokens=max_tokens, kv_transfer_params=ASK)
    expected = theirs(asked).json()["kv_transfer_params"]
    (answer,) = ours(asked)
    found = answer.json()["kv_transfer_params"]
    assert list(found) == list(expected)
    assert kinds(found) == kinds(expected)
    same = ("do_remote_prefill", "do_remote_decode", "tp_size", "dcp_size", "pp_size", "remote_num_tokens",
            "remote_blocks_expiry_time", "transfer_mode")  # fmt: skip
    assert {name: found[name] for name in same} == {name: expected[name] for name in same}


def test_cached_tokens_are_told_on_by_the_instance_that_computes(theirs, ours):
    asked = request(prompt=list(range(300, 400)), kv_transfer_params=ASK)
    expected = [theirs(asked).json()["kv_transfer_params"]["remote_prefill_cached_tokens"] for _ in range(2)]
    found = [each.json()["kv_transfer_params"]["remote_prefill_cached_tokens"] for each in ours(asked, asked)]
    assert found == expected == [0, 96]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"do_remote_decode": False, "do_remote_prefill": False},
        [1],
        {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "nobody", "remote_request_id": "x",
         "remote_host": "127.0.0.1", "remote_port": 9, "remote_block_ids": [[1, 2, 3, 4]], "tp_size": 1},
    ],
)  # fmt: skip
def test_requests_get_the_same_status(theirs, ours, params):
    asked = request(prompt=list(range(500, 600)), max_tokens=2, kv_transfer_params=params)
    (answer,) = ours(asked)
    assert answer.status_code == theirs(asked).status_code
