"""A data-parallel rank is chosen as vLLM's client chooses; `tests/real_engines/test_vllm_balance.py` asks that client."""

import asyncio
import contextlib

from serving.engines.mock.engine import EngineConfig
from serving.stand_in.balance import Balance
from serving.stand_in.config import ApiConfig, RanksConfig, StandInConfig
from serving.stand_in.server import stand_in
from serving.worker.engine import EngineLoad
from tests.stand_in.support import client_of, running
from tests.support.waiting import until_async

DETAILED = ApiConfig(enable_prompt_tokens_details=True)


def test_a_burst_goes_round():
    balance = Balance(3)
    assert [sent(balance) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def sent(balance):
    rank = balance.choose()
    balance.begin(rank)
    return rank


def test_what_is_in_progress_counts_even_if_a_report_does_not_know_of_it_yet():
    balance = Balance(2)
    assert [sent(balance), sent(balance), sent(balance)] == [0, 1, 0]
    balance.hear([EngineLoad(), EngineLoad()])
    assert sent(balance) == 1  # two are in progress on rank 0


def test_what_others_sent_counts_as_reported():
    balance = Balance(2)
    balance.hear([EngineLoad(num_running=3), EngineLoad(num_waiting=2)])
    assert sent(balance) == 1


def test_requests_that_wait_count_more_where_blocks_run_out():
    balance = Balance(2)
    balance.hear(
        [
            EngineLoad(num_waiting=1, num_running=2, kv_active_blocks=8, kv_total_blocks=8),
            EngineLoad(num_waiting=1, num_running=4),
        ]
    )
    assert sent(balance) == 1  # 3 + 3 against 5


def test_between_equals_each_is_the_first_in_turn():
    balance = Balance(2)
    firsts = []
    for _ in range(4):
        rank = sent(balance)
        balance.end(rank)
        balance.hear([EngineLoad(), EngineLoad()])
        firsts.append(rank)
    assert firsts == [0, 1, 0, 1]


def test_a_request_that_names_a_rank_goes_there_and_one_that_is_not_there_is_refused():
    async def talk():
        engine = EngineConfig(block_size=16, num_gpu_blocks=256, dp_size=2)
        async with running(engine=engine, api=DETAILED, ranks=RanksConfig(size=2)) as client:

            async def ask(rank):
                body = {"model": "tiny", "prompt": "x" * 64, "max_tokens": 1}
                return await client.post("/v1/completions", json=body, headers={"X-data-parallel-rank": str(rank)})

            cached = [(await ask(1)).json()["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
            assert cached == [0, 48]
            refused = await ask(2)
            assert refused.status_code == 400
            assert "data_parallel_rank 2 is out of range [0, 2)." in refused.text

    asyncio.run(talk())


def test_ranks_are_followed_while_they_have_something_to_do():
    async def talk():
        async with of_ranks(2) as (workers, client):
            assert not workers.is_following
            answers = asyncio.create_task(asked_of(client))
            await until_async(lambda: workers.is_following)
            await answers
            await until_async(lambda: not workers.is_following)

    asyncio.run(talk())


def test_a_lone_rank_is_never_followed():
    async def talk():
        async with of_ranks(1) as (workers, client):
            answers = asyncio.create_task(asked_of(client))
            await until_async(lambda: workers.calls.num_streams)
            assert not workers.is_following
            await answers
            assert not workers.is_following

    asyncio.run(talk())


@contextlib.asynccontextmanager
async def of_ranks(num_ranks):
    """Run a stand-in; yield what chooses between its ranks, and a client."""
    engine = EngineConfig(block_size=16, num_gpu_blocks=256, dp_size=num_ranks)
    config = StandInConfig(model="tiny", engine=engine, ranks=RanksConfig(size=num_ranks))
    async with stand_in(config) as server, client_of(server) as client:
        yield server.models.model.workers, client


async def asked_of(client):
    asked = {"model": "tiny", "prompt": "x" * 64, "max_tokens": 40}
    return await asyncio.gather(*(client.post("/v1/completions", json=asked) for _ in range(6)))
