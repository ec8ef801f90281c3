"""vLLM as prefill and decode workers: the KV travels between real engines, and the answers are those of one that does it all."""

import asyncio
import contextlib
import os
import random
import signal
import threading
from pathlib import Path

import pytest
import uvloop

from serving.model.files import ModelFiles
from serving.runtime.messages import CallError
from serving.worker.config import ModelRunConfig, WorkerConfig
from serving.worker.make import make_engine
from tests.real_engines.serving_vllm import VLLM_FLAGS
from tests.real_engines.test_vllm import descendants, tokens
from tests.support.waiting import PATIENCE_S, in_time

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]  # vLLM warns as it is imported
BLOCK = 32
BYTES_PER_TOKEN = 2 * 2 * 2 * 32 * 4  # K and V of 2 layers, 2 heads of 32 floats
START_S = 600
"""Each engine keeps a thread of NIXL's busy, so the third starts with what two leave of two cores."""
LONG_LEASE_S, SHORT_LEASE_S = 100_000, 6
"""The first prefill engine's are never over within a test: what it frees was read, or given up."""


class Engines:
    """A prefill engine and a decode engine, in an event loop of their own."""

    def __init__(self, folder):
        self._folder = folder
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._started = []

    def do(self, coroutine, patience_s=PATIENCE_S):
        async def timed():
            async with in_time(patience_s):
                return await coroutine

        return asyncio.run_coroutine_threadsafe(timed(), self._loop).result()

    def start(self, role, *flags, **config):
        flags = [*VLLM_FLAGS, *flags]
        if config:
            flags.append(f"--kv-transfer-config={ {'kv_connector_extra_config': config} }")
        engine = make_engine("vllm", WorkerConfig(model_path=str(self._folder), role=role), ModelRunConfig(), flags)
        self._started.append(engine)
        before = descendants(os.getpid())
        self.do(engine.start(ModelFiles.read(str(self._folder))), START_S)
        self.processes = set(descendants(os.getpid())) - set(before)
        return engine

    def close(self):
        for engine in self._started:
            self.do(engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def engines(folder):
    made = Engines(folder)
    try:
        made.prefill = made.start("prefill", kv_lease_duration=LONG_LEASE_S)
        made.decode = made.start("decode")
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def second(engines):
    """Another prefill engine, whose leases end soon; started late, as each engine keeps a thread of NIXL's busy."""
    return engines.start("prefill", kv_lease_duration=SHORT_LEASE_S)


def request(prompt, max_tokens=8, options=None, **more):
    conditions = {"max_tokens": max_tokens, "min_tokens": 0, "ignore_eos": True, "stop": None}
    return {
        "request_id": "r",
        "token_ids": list(prompt),
        "dp_rank": 0,
        "sampling_options": {"temperature": 0} | (options or {}),
        "eos_token_ids": [],
        "annotations": [],
        "stop_conditions": conditions | more.pop("stop_conditions", {}),
    } | more


async def items_of(engine, asked):
    return [item if isinstance(item, dict) else {"token_ids": item} async for item in engine.generate(asked)]


async def prefilled(engine, asked):
    """Return the hand-off of a prefill engine."""
    [item] = await items_of(engine, asked)
    assert item["token_ids"] == []
    return item


async def apart(prefill, decode, asked):
    """Return the items of an answer that two engines gave."""
    first = await prefilled(prefill, asked)
    return await items_of(decode, asked | {"kv_transfer_params": first["kv_transfer_params"]})


def said(items):
    return [token for item in items for token in item["token_ids"]]


def numbers(items, name):
    return [value for item in items for value in item.get(name, ()) if value is not None]


def assert_likeliest(reference, prompt, items):
    """Each of 8 tokens is the likeliest after those before it."""
    answer = said(items)
    assert len(answer) == 8
    assert answer == list(reference.logits([*prompt, *answer])[len(prompt) - 1 : -1].argmax(-1)), len(prompt)


async def forgotten(*engines):
    """Let engines forget their prefixes, so that they must compute or read what they are asked for."""
    for engine in engines:
        await engine.released()
        assert await engine._llm.reset_prefix_cache()


LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 1000)


def test_greedy_answers_are_what_the_weights_say(engines, reference):
    async def main():
        await forgotten(engines.prefill, engines.decode)
        for length in LENGTHS:
            prompt = tokens(f"greedy {length}", length)
            items = await apart(engines.prefill, engines.decode, request(prompt))
            assert_likeliest(reference, prompt, items)
            assert items[-1]["finish_reason"] == "length"
        await engines.prefill.released()

    engines.do(main())


def test_sampled_answers_are_those_of_one_engine(engines):
    async def main():
        for seed, options in enumerate(({"temperature": 1.0}, {"temperature": 0.7, "top_k": 20}, {"top_p": 0.8})):
            await forgotten(engines.prefill, engines.decode)
            asked = request(tokens(f"seeded {seed}", 200 + seed), 20, {"temperature": 1.3, "seed": seed} | options)
            together = await items_of(engines.decode, asked)
            await forgotten(engines.decode)
            assert said(await apart(engines.prefill, engines.decode, asked)) == said(together)

    engines.do(main())


def test_ends_and_log_probabilities_are_those_of_one_engine(engines):
    async def main():
        prompt = tokens("ends", 150)
        plain = said(await items_of(engines.decode, request(prompt)))
        ends = {"stop_conditions": {"ignore_eos": False}, "eos_token_ids": [plain[0]]}
        limit = {"stop_conditions": {"ignore_eos": False, "min_tokens": 4}, "eos_token_ids": [plain[2], plain[5]]}
        for more in (ends, limit, {"options": {"logprobs": 3, "prompt_logprobs": 0}}):
            asked = request(prompt, **more)
            await forgotten(engines.decode)
            together = await items_of(engines.decode, asked)
            await forgotten(engines.prefill, engines.decode)
            items = await apart(engines.prefill, engines.decode, asked)
            assert said(items) == said(together)
            assert items[-1]["finish_reason"] == together[-1]["finish_reason"]
            for name in ("log_probs", "prompt_log_probs"):
                assert numbers(items, name) == pytest.approx(numbers(together, name), abs=1e-4)

    engines.do(main())


def test_a_prompt_is_held_until_it_was_read_and_no_longer(engines):
    async def main():
        await forgotten(engines.prefill, engines.decode)
        asked = request(tokens("held", 10 * BLOCK))
        first = await prefilled(engines.prefill, asked)
        assert first["cached_tokens"] == 0
        assert engines.prefill.load(0).kv_active_blocks == 10
        waiting = asyncio.create_task(engines.prefill.released())
        await items_of(engines.decode, request([5]))  # time passes
        assert not waiting.done()
        await items_of(engines.decode, asked | {"kv_transfer_params": first["kv_transfer_params"]})
        await waiting
        assert engines.prefill.load(0).kv_active_blocks == 0
        assert engines.prefill.load(0).kv_transfers.num_offered > 0
        moved = engines.decode.load(0).kv_transfers
        assert moved.num_read > 0
        assert moved.num_bytes >= 10 * BLOCK * BYTES_PER_TOKEN
        await engines.decode.released()

    engines.do(main())


def test_the_cached_tokens_are_the_prefill_engines(engines):
    async def main():
        await forgotten(engines.prefill, engines.decode)
        prompt = tokens("cached", 8 * BLOCK)
        first = await apart(engines.prefill, engines.decode, request(prompt))
        assert first[0]["cached_tokens"] == 0  # not what was transferred
        again = await apart(engines.prefill, engines.decode, request(prompt[: 6 * BLOCK] + tokens("other", 50)))
        assert again[0]["cached_tokens"] == 6 * BLOCK

    engines.do(main())


def test_a_decode_engine_keeps_what_it_read_and_reads_only_the_rest(engines, reference):
    async def main():
        await forgotten(engines.prefill, engines.decode)
        turn = tokens("turn 1", 8 * BLOCK)
        await apart(engines.prefill, engines.decode, request(turn))
        whole = await items_of(engines.decode, request([*turn, 7]))
        assert whole[0]["cached_tokens"] == 8 * BLOCK
        longer = turn + tokens("turn 2", 3 * BLOCK)
        assert_likeliest(reference, longer, await apart(engines.prefill, engines.decode, request(longer)))
        # Nothing is left to read: the prefill engine is told all the same.
        assert_likeliest(reference, longer, await apart(engines.prefill, engines.decode, request(longer)))
        await engines.prefill.released()

    engines.do(main())


def test_two_prefill_engines_feed_one(engines, second, reference):
    async def main():
        rng = random.Random(3)
        prompts = [tokens(f"many {number}", rng.randrange(20, 400)) for number in range(16)]
        owners = [rng.choice([engines.prefill, second]) for _ in prompts]
        answers = await asyncio.gather(
            *(apart(owner, engines.decode, request(prompt)) for owner, prompt in zip(owners, prompts, strict=True))
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            assert_likeliest(reference, prompt, answer)
        for engine in (engines.prefill, second, engines.decode):
            await engine.released()

    engines.do(main())


def test_nothing_is_left_of_requests_that_are_given_up_at_any_time(engines, second, reference):
    async def main():
        rng = random.Random(4)

        async def given_up(number):
            asked = request(tokens(f"given up {number}", rng.randrange(100, 900)), 200)
            work = asyncio.create_task(apart(second, engines.decode, asked))
            await asyncio.wait([work], timeout=rng.uniform(0, 1.5))
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

        await asyncio.gather(*map(given_up, range(12)))
        for engine in (second, engines.decode):
            await engine.released()  # at last with the lease of those that nobody took over
        prompt = tokens("after", 300)
        assert_likeliest(reference, prompt, await apart(second, engines.decode, request(prompt)))

    engines.do(main())


def test_a_hand_off_that_comes_too_late_is_computed_and_not_read(engines, second, reference):
    async def main():
        await forgotten(second, engines.decode)
        asked = request(tokens("late", 10 * BLOCK))
        first = await prefilled(second, asked)
        await second.released()
        await asyncio.gather(  # what lay there is overwritten
            *(prefilled(second, request(tokens(f"over {number}", 99 * BLOCK))) for number in range(2))
        )
        items = await items_of(engines.decode, asked | {"kv_transfer_params": first["kv_transfer_params"]})
        assert_likeliest(reference, asked["token_ids"], items)

    engines.do(main())


def test_a_hand_off_that_is_none_harms_nobody_else(engines, second, reference):
    async def main():
        asked = request(tokens("malformed", 40))
        first = (await prefilled(second, asked))["kv_transfer_params"]
        with pytest.raises(CallError, match="remote_port") as refused:
            await items_of(engines.decode, asked | {"kv_transfer_params": first | {"remote_port": "80"}})
        assert refused.value.kind == "invalid"
        beyond = first | {"remote_block_ids": [[10_000, 10_001]]}  # which only the owner can know
        assert_likeliest(
            reference, asked["token_ids"], await items_of(engines.decode, asked | {"kv_transfer_params": beyond})
        )
        assert_likeliest(reference, asked["token_ids"], await apart(second, engines.decode, asked))

    engines.do(main())


def test_they_listen_on_the_loopback_interface_only(engines):
    processes = [os.getpid(), *descendants(os.getpid())]
    sockets = {link for pid in processes for link in links(pid)}
    listening = {
        fields[1].partition(":")[0]
        for file in ("tcp", "tcp6")
        for fields in map(str.split, Path(f"/proc/net/{file}").read_text().splitlines()[1:])
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets
    }
    assert listening == {"0100007F"}  # 127.0.0.1


def name_of(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text()
    return ""


def links(pid):
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            yield str(file.readlink())


def test_a_prompt_whose_owner_is_gone_is_computed(engines, second, reference):
    """The last of all: it takes one of the engines away."""

    async def main():
        asked = request(tokens("orphan", 10 * BLOCK))
        first = await prefilled(second, asked)
        # Of the engine that was started last; the others of its processes follow.
        [core] = [pid for pid in engines.processes if "EngineCor" in name_of(pid)]
        os.kill(core, signal.SIGKILL)
        items = await items_of(engines.decode, asked | {"kv_transfer_params": first["kv_transfer_params"]})
        assert_likeliest(reference, asked["token_ids"], items)
        await engines.decode.released()

    engines.do(main())
