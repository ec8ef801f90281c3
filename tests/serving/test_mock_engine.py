"""The mocker as a live engine: what it says, what it refuses, and how it waits for slow readers."""

import asyncio

import msgspec
import numpy as np
import pytest
import uvloop

from mocker import EngineConfig, SglangConfig, TrtllmConfig
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from serving.engines.mock.answers.made_up import answer_length, answer_tokens
from serving.engines.mock.engine import MockEngine, Mocker
from serving.engines.mock.events import RouterSink
from serving.engines.mock.stepping import step_together
from serving.model.files import ModelFiles
from serving.model.tokenizer import ByteTokenizer
from serving.router import PromptBlocks
from serving.router.follower import KvFollower
from serving.router.hashing import block_hashes, sequence_hashes
from serving.router.index import PrefixIndex
from serving.runtime.messages import pack_u32
from serving.runtime.server import AnswerStream
from serving.runtime.world import world
from serving.worker.config import WorkerConfig
from serving.worker.protocol import PreprocessedRequest, StopConditions
from tests.support.waiting import in_time, until_async


class Reader:
    """A client session that only notes what it is sent."""

    def __init__(self):
        self.is_full = False
        self.items = {}
        self.ends = {}

    def push(self, id, item):
        self.items.setdefault(id, []).append(item)

    def finish(self, id, end):
        self.ends[id] = end

    def tokens(self, id):
        tokens = []
        for item in self.items.get(id, []):
            tokens += item["token_ids"] if isinstance(item, dict) else [item] if isinstance(item, int) else item
        return tokens


def request(prompt, max_tokens, **more):
    conditions = StopConditions(max_tokens=max_tokens)
    return PreprocessedRequest(token_ids=pack_u32(np.array(prompt, np.uint32)), stop_conditions=conditions, **more)


class Heard:
    """A publisher whose events a router hears at once."""

    def __init__(self):
        self.index = PrefixIndex()
        self._follower = KvFollower(self.index)
        self._number = 0

    def publish(self, events):
        assert not self._follower.on_events(0, 1, self._number, events)
        self._number += 1


def with_engine(talk, max_waiting=100, publisher=None, config=None, **settings):
    async def main():
        engine_config = config or EngineConfig(**({"block_size": 4, "num_gpu_blocks": 100} | settings))
        fast = TimingConfig(timing="constant", speedup_ratio=20.0)
        events = None if publisher is None else RouterSink(publisher)
        engine = MockEngine(resolve(engine_config, fast), max_waiting=max_waiting, events=events)
        running = asyncio.create_task(step_together([engine]))
        async with in_time():
            await talk(engine, Reader())
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    uvloop.run(main())


async def ended(reader, *ids):
    await until_async(lambda: all(id in reader.ends for id in ids))


def test_an_answer_that_goes_on_elsewhere_is_the_same_answer():
    prompt = np.array([1, 2, 3, 4, 5], np.uint32)
    whole = answer_tokens(prompt, 7, 0, 20, ByteTokenizer().speakable())

    async def talk(engine, reader):
        engine.submit(request(prompt, 20, sampling_options={"seed": 7}), AnswerStream(reader, 1))
        so_far = [*prompt.tolist(), *whole[:13]]
        engine.submit(request(so_far, 7, sampling_options={"seed": 7}, num_generated=13), AnswerStream(reader, 2))
        await ended(reader, 1, 2)
        assert reader.tokens(1) == whole
        assert reader.tokens(2) == whole[13:]
        assert reader.items[1][-1]["finish_reason"] == "length"

    with_engine(talk)


def test_tokens_that_a_step_brings_together_come_in_one_frame():
    config = EngineConfig(
        block_size=4, num_gpu_blocks=100, num_speculative_tokens=3, acceptance_rates="1,1,1", drafting_ms=1
    )

    async def talk(engine, reader):
        engine.submit(request([1, 2], 30), AnswerStream(reader, 1))
        engine.submit(request([3, 4], 1), AnswerStream(reader, 2))
        await ended(reader, 1, 2)
        assert reader.tokens(1) == answer_tokens(np.array([1, 2], np.uint32), 0, 0, 30, ByteTokenizer().speakable())
        sizes = [
            len(item["token_ids"]) if isinstance(item, dict) else len(item) if isinstance(item, list) else 1
            for item in reader.items[1]
        ]
        assert sizes == [1, 4, 4, 4, 4, 4, 4, 4, 1]
        assert len(reader.tokens(2)) == 1
        assert sum(engine.take_gaps().counts) == 29

    with_engine(talk, config=config)


def test_a_slow_reader_misses_nothing_and_holds_up_nobody():
    async def talk(engine, reader):
        slow, fast = AnswerStream(reader, 1), AnswerStream(reader, 2)
        slow.pause()
        engine.submit(request([1, 2], 30), slow)
        engine.submit(request([3, 4], 30), fast)
        await ended(reader, 2)
        assert len(reader.tokens(2)) == 30
        assert reader.tokens(1) == []
        assert engine.load().num_running == 0  # the engine is done; only the sending waits
        slow.resume()
        await ended(reader, 1)
        assert reader.tokens(1) == answer_tokens(np.array([1, 2], np.uint32), 0, 0, 30, ByteTokenizer().speakable())

    with_engine(talk)


def test_a_full_queue_refuses_and_a_request_that_never_fits_is_invalid():
    async def talk(engine, reader):
        for id in range(3):
            engine.submit(request([1], 5), AnswerStream(reader, id))
        assert reader.ends[2].kind == "overloaded"
        engine.submit(request([1] * 500, 5), AnswerStream(reader, 9))
        await ended(reader, 0, 1)

    async def too_long(engine, reader):
        engine.submit(request([1] * 500, 5), AnswerStream(reader, 9))
        assert reader.ends[9].kind == "invalid"
        assert "KV blocks" in reader.ends[9].error

    with_engine(talk, max_waiting=2)
    with_engine(too_long)


def test_a_cancelled_request_gives_its_blocks_back_within_a_step():
    async def talk(engine, reader):
        stream = AnswerStream(reader, 1)
        engine.submit(request([1] * 40, 300), stream)
        await until_async(lambda: reader.tokens(1))
        before = len(reader.tokens(1))
        stream.cancel()
        await until_async(lambda: engine.load().kv_active_blocks == 0)
        assert len(reader.tokens(1)) <= before + 1

    with_engine(talk)


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_a_router_hears_of_host_memory_block_by_block(blocks_per_chunk):
    heard, prompts = Heard(), [[number] * 18 for number in range(4)]

    async def talk(engine, reader):
        for number, prompt in enumerate(prompts):
            engine.submit(request(prompt, 3), AnswerStream(reader, number))
            await ended(reader, number)

    with_engine(talk, publisher=heard, num_gpu_blocks=8, kv_offloading_size=1.0, blocks_per_chunk=blocks_per_chunk)
    hashes = PromptBlocks.of(sequence_hashes(block_hashes(prompts[0], 4)))
    assert hashes.num_blocks == 4
    assert heard.index.overlaps(hashes) == {}  # others have taken its blocks on the GPU
    assert heard.index.tiers.runs(hashes, {}, [0]) == {0: (4, 0, 0)}


def test_ranks_are_engines_of_their_own():
    async def main():
        mocker = Mocker(WorkerConfig(), EngineConfig(block_size=4, num_gpu_blocks=100, dp_size=2))
        await mocker.start(ModelFiles({}))
        mocker.publish_to([])
        reader, encode = Reader(), msgspec.msgpack.encode
        mocker.service(msgspec.Raw(encode(request([1], 3, dp_rank=1))), AnswerStream(reader, 1))
        assert (mocker.load(0).num_waiting, mocker.load(1).num_waiting) == (0, 1)
        mocker.service(msgspec.Raw(encode(request([1], 3, dp_rank=2))), AnswerStream(reader, 2))
        assert reader.ends[2].kind == "invalid"
        await mocker.close()

    uvloop.run(main())


def test_the_timer_never_fires_early():
    async def main():
        timer, now = world().step_timer(), world().now
        try:
            for delay in (0.0, 0.0003, 0.002, 0.0071):
                when = now() + delay
                await timer.until(when)
                assert now() >= when
        finally:
            timer.close()

    uvloop.run(main())


@pytest.mark.parametrize("count", [1, 1000])
def test_answers_are_spelled_in_the_vocabulary(count):
    words = np.array([5, 9], np.uint32)
    assert set(answer_tokens(np.array([1], np.uint32), 0, 0, count, words)) <= {5, 9}


def speaks(prompt, *, seed=0, **conditions):
    """Return what the mocker says to a request, and why it ends."""

    async def talk(engine, reader):
        asked = PreprocessedRequest(
            token_ids=pack_u32(np.array(prompt, np.uint32)),
            stop_conditions=StopConditions(**conditions),
            sampling_options={"seed": seed},
        )
        engine.submit(asked, AnswerStream(reader, 1))
        await ended(reader, 1)
        found.append((reader.tokens(1), reader.items[1][-1]["finish_reason"]))

    found = []
    with_engine(talk)
    return found[0]


WORDS = answer_tokens(np.array([1, 2, 3], np.uint32), 0, 0, 300, ByteTokenizer().speakable())


@pytest.mark.parametrize(
    ("conditions", "length", "reason"),
    [
        ({"max_tokens": 40, "stop_after": 9}, 9, "stop"),
        ({"max_tokens": 9, "stop_after": 9}, 9, "stop"),
        ({"max_tokens": 8, "stop_after": 9}, 8, "length"),
        ({"max_tokens": 40, "stop_after": 9, "min_tokens": 12}, 12, "stop"),
        ({"max_tokens": 40, "stop_after": 9, "ignore_eos": True}, 40, "length"),
        ({"max_tokens": 10_000, "stop_after": 9, "is_default_limit": True}, 9, "stop"),  # far more than its cache holds
    ],
)
def test_the_mocker_says_eos_as_the_token_that_the_request_names(conditions, length, reason):
    assert speaks([1, 2, 3], **conditions) == (WORDS[:length], reason)


@pytest.mark.parametrize("min_tokens", [0, 7, 20])
def test_the_mocker_ends_at_the_first_stop_token_behind_min_tokens(min_tokens):
    stop = WORDS[7]
    place = next(place for place, token in enumerate(WORDS, 1) if token == stop and place > min_tokens)
    asked = {"max_tokens": 200, "min_tokens": min_tokens, "stop_token_ids": [stop], "ignore_eos": True}
    assert speaks([1, 2, 3], **asked) == (WORDS[:place], "stop")


def test_a_stop_token_that_is_never_said_ends_nothing():
    assert speaks([1, 2, 3], max_tokens=12, stop_token_ids=[7]) == (WORDS[:12], "length")


def test_an_answer_without_a_limit_that_goes_on_elsewhere_has_its_least_number_of_tokens():
    prompt = np.array([1, 2, 3], np.uint32)
    whole = answer_length(prompt, 0)

    async def talk(engine, reader):
        asked = request([*prompt.tolist(), *WORDS[:whole]], None, num_generated=whole)
        asked.stop_conditions = StopConditions(max_tokens=300, is_default_limit=True, min_tokens=20)  # of 20 + whole
        engine.submit(asked, AnswerStream(reader, 1))
        await ended(reader, 1)
        assert len(reader.tokens(1)) == 20

    with_engine(talk, num_gpu_blocks=1000)


def test_a_request_that_sglang_refuses_ends_and_says_why():
    async def talk(engine, reader):
        for id in range(1, 7):
            engine.submit(request([id, 2, 3], 10), AnswerStream(reader, id))
        await ended(reader, *range(1, 7))
        refused = [end.error for end in reader.ends.values() if end.error]
        assert 0 < len(refused) < 6
        assert set(refused) == {"the request queue is full (max_queued_requests 1)"}
        assert engine.load().kv_active_blocks == engine.load().num_waiting == 0

    with_engine(talk, config=SglangConfig(max_total_tokens=400, max_running_requests=1, max_queued_requests=1))


def test_a_request_that_can_never_be_admitted_again_ends_and_the_others_go_on():
    """Preempted, it has more tokens than a step computes, and prompts are not computed in chunks."""

    async def talk(engine, reader):
        for id in (1, 2):
            engine.submit(request(range(150 * id, 150 * id + 150), 150), AnswerStream(reader, id))
        await ended(reader, 1, 2)
        engine.submit(request([1, 2], 5), AnswerStream(reader, 3))
        await ended(reader, 3)
        assert len(reader.tokens(1)) == 150 and not reader.ends[1].error
        assert 0 < len(reader.tokens(2)) < 150
        assert "can never be admitted" in reader.ends[2].error and reader.ends[2].kind == "engine"
        assert not reader.ends[3].error
        assert engine.load().kv_active_blocks == engine.load().num_waiting == 0

    with_engine(
        talk,
        block_size=16,
        num_gpu_blocks=23,
        max_num_batched_tokens=160,
        max_num_seqs=8,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
    )


@pytest.mark.parametrize(
    "config",
    [
        SglangConfig(disaggregation_mode="decode"),
        SglangConfig(disaggregation_mode="prefill"),
        TrtllmConfig(server_role="context"),
    ],
)
def test_an_engine_that_does_one_part_of_each_request_refuses_a_whole_one_as_unavailable(config):
    engine, reader = MockEngine(resolve(config, TimingConfig())), Reader()
    engine.submit(request([1, 2, 3], 4), AnswerStream(reader, 1))
    assert reader.ends[1].kind == "unavailable"
    assert "cannot serve a request without a" in reader.ends[1].error
