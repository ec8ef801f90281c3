"""A stand-in keeps KV in host memory, as with --kv-offloading-size: what the GPU has evicted is loaded, not computed."""

import asyncio
from dataclasses import replace

import pytest

from serving.engines.mock.engine import EngineConfig
from serving.engines.mock.kv.nixl_peer import KvHandoverConfig
from serving.stand_in.config import ApiConfig, RanksConfig
from serving.transfer.config import TransferRunConfig
from tests.stand_in.support import running

SMALL = EngineConfig(block_size=16, num_gpu_blocks=20)
"""Room for 19 blocks; each prompt takes 7."""
WITH_HOST = replace(SMALL, kv_offloading_size=0.5)
LOCAL = KvHandoverConfig(side_channel_host="127.0.0.1", side_channel_port=0)
DETAILED = ApiConfig(enable_prompt_tokens_details=True)
ASK = {"do_remote_decode": True, "do_remote_prefill": False}


def prompt(letter):
    return letter * 100


async def cached_of(client, letter, rank=None, **more):
    """Ask with a prompt of 100 tokens; return how many were found in a cache, and the answer."""
    body = {"model": "tiny", "prompt": prompt(letter), "max_tokens": 4} | more
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    answer = (await client.post("/v1/completions", json=body, headers=headers)).json()
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer


@pytest.mark.parametrize(("engine", "found"), [(SMALL, 0), (WITH_HOST, 96)])
def test_a_prompt_that_the_gpu_evicted_is_found_in_host_memory(engine, found):
    async def talk():
        async with running(engine=engine, api=DETAILED) as client:
            firsts = [(await cached_of(client, letter))[0] for letter in "abcd"]
            again, _ = await cached_of(client, "a")
            assert (firsts, again) == ([0, 0, 0, 0], found)

    asyncio.run(talk())


def test_the_answer_is_the_same_wherever_its_prompt_was_found():
    async def talk():
        async with running(engine=WITH_HOST, api=DETAILED) as client:
            answers = [(await cached_of(client, letter))[1]["choices"][0]["text"] for letter in "abcda"]
            assert answers[0] == answers[4]

    asyncio.run(talk())


def test_each_rank_has_host_memory_of_its_own():
    async def talk():
        engine = replace(WITH_HOST, dp_size=2)
        async with running(engine=engine, api=DETAILED, ranks=RanksConfig(size=2)) as client:
            for letter in "abcd":
                await cached_of(client, letter, rank=0)
            for rank, found in ((1, 0), (0, 96)):
                here, _ = await cached_of(client, "a", rank=rank)
                assert here == found

    asyncio.run(talk())


def test_an_instance_with_both_connectors_hands_over_what_it_loaded_from_host_memory():
    async def talk():
        transfer = TransferRunConfig()
        settings = {"engine": WITH_HOST, "api": DETAILED, "kv_handover": LOCAL, "transfer": transfer}
        async with running(**settings) as prefill, running(**settings) as decode:
            for letter in "abcd":
                await cached_of(prefill, letter)
            _, first = await cached_of(prefill, "a", max_tokens=1, kv_transfer_params=ASK)
            params = first["kv_transfer_params"]
            assert params["remote_prefill_cached_tokens"] == 96
            found, answer = await cached_of(decode, "a", kv_transfer_params=params)
            assert found == 96
            assert answer["choices"][0]["text"] == (await cached_of(prefill, "a"))[1]["choices"][0]["text"]

    asyncio.run(talk())
