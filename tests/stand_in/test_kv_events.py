"""A subscriber written for vLLM's KV events hears of a stand-in's cache."""

import asyncio
import contextlib
import time

import msgspec
import numpy as np
import pytest

from mocker.timing.choose import resolve
from serving.engines.block_hashes import HashTranslator
from serving.engines.mock.answers.made_up import answer_tokens
from serving.engines.mock.engine import EngineConfig, MockEngine, TimingConfig
from serving.engines.mock.stepping import step_together
from serving.model.tokenizer import ByteTokenizer
from serving.router.events import BlocksCleared, BlocksStored
from serving.router.hashing import block_hashes, sequence_hashes
from serving.runtime.messages import pack_u32
from serving.runtime.server import AnswerStream
from serving.stand_in.config import KvEventsConfig, RanksConfig, StandInConfig
from serving.stand_in.vllm.kv_events.endpoints import PublisherError, endpoint_of
from serving.stand_in.vllm.kv_events.hashes import BlockHasher
from serving.stand_in.vllm.kv_events.messages import AllBlocksCleared as Cleared
from serving.stand_in.vllm.kv_events.messages import EventBatch
from serving.stand_in.vllm.kv_events.publisher import Publisher
from serving.stand_in.vllm.kv_events.ranks import sinks_of
from serving.worker.protocol import CacheScope, PreprocessedRequest, StopConditions
from tests.stand_in.kv_subscriber import AllBlocksCleared, BlockRemoved, BlockStored, Subscriber
from tests.stand_in.support import running
from tests.support.servers import free_port
from tests.support.waiting import in_time, until_async

SIZE = 4
FAST = TimingConfig(timing="constant", speedup_ratio=50.0)
ENGINE = {"block_size": SIZE, "num_gpu_blocks": 40}


@pytest.fixture
def events(tmp_path):
    """KV events at two sockets of this host."""
    return {"endpoint": f"ipc://{tmp_path}/e", "replay_endpoint": f"ipc://{tmp_path}/r", "topic": "kv@pod@tiny"}


class Answered:
    """Notes what comes of streams, and that they have ended."""

    is_full = False

    def __init__(self):
        self.num_items = 0
        self.ends = {}

    def push(self, id, item):
        self.num_items += 1

    def finish(self, id, end):
        assert not end.error, end.error
        self.ends[id] = end


class World:
    """One rank with its sockets, and a subscriber."""

    def __init__(self, engine, subscriber):
        self.engine = engine
        self.subscriber = subscriber
        self._answered = Answered()
        self._num_asked = 0

    def start(self, prompt, max_tokens=1, **more):
        self._num_asked += 1
        stream = AnswerStream(self._answered, self._num_asked)
        conditions = StopConditions(max_tokens=max_tokens)
        tokens = pack_u32(np.array(prompt, np.uint32))
        self.engine.submit(PreprocessedRequest(token_ids=tokens, stop_conditions=conditions, **more), stream)
        return stream

    async def ask(self, prompt, max_tokens=1, **more):
        stream = self.start(prompt, max_tokens, **more)
        await until_async(lambda: stream.id in self._answered.ends)

    @property
    def num_items(self):
        return self._answered.num_items

    async def events(self):
        return await self.subscriber.events()


@contextlib.asynccontextmanager
async def world(events, **settings):
    config = StandInConfig(engine=EngineConfig(**(ENGINE | settings)), timing=FAST, kv_events=KvEventsConfig(**events))
    async with in_time(), sinks_of(config) as [sink]:
        engine = MockEngine(resolve(config.engine, config.timing), events=sink)
        running = asyncio.create_task(step_together([engine]))
        subscriber = Subscriber(events["endpoint"], events.get("replay_endpoint"), events.get("topic", ""))
        try:
            yield World(engine, subscriber)
        finally:
            subscriber.close()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def names_of(tokens, scope=None):
    """Name the full blocks of a prompt that is plain, or whose salt is in its first block."""
    hasher, name, found = BlockHasher(KvEventsConfig()), None, []
    for start in range(0, len(tokens) - SIZE + 1, SIZE):
        salt = (("cache_salt", scope),) if scope and not start else None
        name = hasher.name(name, tokens[start : start + SIZE], salt)
        found.append(hasher.external(name))
    return found


def stored(names, tokens, parent=None, **more):
    fields = {"lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [None] * len(names), "group_idx": 0}
    fields |= {"kv_cache_spec_kind": "full_attention", "block_size": SIZE}
    return BlockStored(block_hashes=names, parent_block_hash=parent, token_ids=tokens, **(fields | more))


def test_a_prompt_is_announced_with_its_tokens_and_later_only_what_it_adds(events):
    prompt = list(range(100, 113))
    names = names_of([*prompt, 7, 7, 7])

    async def talk():
        async with world(events) as w:
            before = time.time()
            await w.ask(prompt)
            await w.ask([*prompt, 7, 7, 7, 7])
            return before, await w.subscriber.missed(0)

    before, ((topic, zero, first), (_, one, second)) = asyncio.run(talk())
    assert (topic, zero, one) == ("kv@pod@tiny", 0, 1)
    assert before <= first.ts <= second.ts <= time.time()
    assert (first.data_parallel_rank, second.data_parallel_rank) == (0, 0)
    assert first.events == [stored(names[:3], prompt[:12])]
    assert second.events == [stored(names[3:], [112, 7, 7, 7], parent=names[2])]


def test_the_blocks_of_an_answer_are_announced_as_it_fills_them(events):
    async def talk():
        async with world(events) as w:
            await w.ask(list(range(6)), max_tokens=8)  # the last token is never computed
            return await w.events()

    first, second, third = asyncio.run(talk())
    assert first.token_ids == [0, 1, 2, 3]
    assert second.token_ids[:2] == [4, 5]
    assert third.block_hashes == names_of([*range(4), *second.token_ids, *third.token_ids])[2:]
    assert third.parent_block_hash == second.block_hashes[0]


def test_what_is_evicted_is_removed_block_by_block_the_last_first(events):
    prompts = [list(range(start, start + 41)) for start in (0, 100, 200, 300)]

    async def talk():
        async with world(events) as w:  # 39 blocks, of which a prompt takes eleven
            for prompt in prompts:
                await w.ask(prompt)
            return await w.events()

    found = asyncio.run(talk())
    assert [type(event) for event in found] == [BlockStored] * 3 + [BlockRemoved] * 2 + [BlockStored]
    expected = [[name] for name in reversed(names_of(prompts[0])[-2:])]
    assert [event.block_hashes for event in found[3:5]] == expected
    assert found[3] == BlockRemoved(block_hashes=expected[0], medium="GPU", group_idx=0)


def test_a_salt_and_an_adapter_keep_prompts_apart_and_are_in_the_events(events):
    prompt = list(range(9))
    adapter = CacheScope(lora_name="sql", lora_id=2, lora_path="/sql")

    async def talk():
        async with world(events) as w:
            await w.ask(prompt)
            await w.ask(prompt, cache_scope=CacheScope(salt="mine"), session_id="s1")
            await w.ask(prompt, cache_scope=adapter)
            await w.ask(prompt, cache_scope=adapter)
            return await w.events()

    plain, salted, adapted = asyncio.run(talk())
    assert salted == stored(names_of(prompt, "mine"), prompt[:8], extra_keys=[("mine",), None], session_id="s1")
    assert (adapted.lora_id, adapted.lora_name, adapted.extra_keys) == (2, "sql", [("sql",), ("sql",)])
    assert not {*plain.block_hashes} & {*salted.block_hashes, *adapted.block_hashes}


def test_a_reset_is_announced_with_the_next_step_and_refused_while_blocks_are_in_use(events):
    async def talk():
        async with world(events) as w:
            w.start(list(range(9)), max_tokens=100)
            await until_async(lambda: w.engine.load().num_running)
            is_refused = not await w.engine.control.reset_prefix_cache()
            await until_async(lambda: not w.engine.load().num_running)
            num_before = len(await w.subscriber.missed(0))
            is_reset = await w.engine.control.reset_prefix_cache()
            num_idle = len(await w.subscriber.missed(0))
            await w.ask(list(range(9)))
            return is_refused, is_reset, num_idle - num_before, (await w.subscriber.missed(num_before))

    is_refused, is_reset, num_at_once, ((_, _, batch),) = asyncio.run(talk())
    assert (is_refused, is_reset, num_at_once) == (True, True, 0)
    assert batch.events == [AllBlocksCleared(), stored(names_of(list(range(9))), list(range(8)))]


def test_a_reset_may_preempt_what_runs_and_the_answer_stays_the_same(events):
    prompt = list(range(9))

    async def talk():
        async with world(events) as w:
            w.start(prompt, max_tokens=40)
            while w.num_items < 9:
                await asyncio.sleep(0)
            assert await w.engine.control.reset_prefix_cache(preempts_running=True)
            await until_async(lambda: not w.engine.load().num_running)
            return await w.events()

    found = asyncio.run(talk())
    cleared = found.index(AllBlocksCleared())
    computed = [*prompt, *answer_tokens(np.array(prompt, np.uint32), 0, 0, 40, ByteTokenizer().speakable())[:39]]
    before, after = (
        [token for event in part for token in event.token_ids] for part in (found[:cleared], found[cleared + 1 :])
    )
    assert before == computed[: len(before)]
    assert len(before) < len(after)
    assert after == computed


def test_our_own_reader_of_vllms_events_knows_the_blocks(events):
    prompt = list(range(12))

    async def talk():
        async with world(events) as w:
            await w.ask(prompt)
            await w.engine.control.reset_prefix_cache()
            await w.ask(prompt)
            return [batch for *_, batch in await w.subscriber.missed(0)]

    translator = HashTranslator(SIZE)
    ours = sequence_hashes(block_hashes(np.array(prompt, np.uint32), SIZE))
    first, second = asyncio.run(talk())
    events = [*first.events, *second.events]
    assert translator.translate([msgspec.to_builtins(event) for event in events]) == [
        BlocksStored(ours, None),
        BlocksCleared(),
        BlocksStored(ours, None),
    ]


def test_a_stand_in_publishes_what_its_server_is_asked_and_each_rank_at_its_own_port():
    port = free_port()

    async def talk():
        engine = EngineConfig(block_size=16, num_gpu_blocks=64, dp_size=2)
        events = KvEventsConfig(endpoint=f"tcp://127.0.0.1:{port}", replay_endpoint=f"tcp://127.0.0.1:{port + 2}")
        async with running(engine=engine, ranks=RanksConfig(size=5, first=3), kv_events=events) as client:
            asked = {"model": "tiny", "prompt": "x" * 33, "max_tokens": 100}
            await asyncio.gather(*(client.post("/v1/completions", json=asked) for _ in range(2)))
            found = []
            for rank in (3, 4):
                subscriber = Subscriber(f"tcp://127.0.0.1:{port + rank}", f"tcp://127.0.0.1:{port + 2 + rank}")
                found.append(await subscriber.missed(0))
                subscriber.close()
            return found

    third, fourth = asyncio.run(talk())
    assert {batch.data_parallel_rank for *_, batch in third} == {3}
    assert {batch.data_parallel_rank for *_, batch in fourth} == {4}
    assert third[0][2].events[0].token_ids == list(b"x" * 32) == fourth[0][2].events[0].token_ids


def test_the_session_of_a_request_is_in_the_events_of_its_blocks(events):
    async def talk():
        async with running(kv_events=KvEventsConfig(**events)) as client:
            asked = {"model": "tiny", "prompt": "x" * 33, "max_tokens": 1, "session_id": "s"}
            assert (await client.post("/v1/completions", json=asked)).status_code == 200
            subscriber = Subscriber(events["endpoint"], events["replay_endpoint"])
            found = await subscriber.events()
            subscriber.close()
            return found

    [stored] = asyncio.run(talk())
    assert stored.session_id == "s"


# The sockets


def batch(number):
    return EventBatch(float(number), [Cleared()], 0)


@contextlib.asynccontextmanager
async def publishing(events, rank=0, **more):
    publisher = Publisher(KvEventsConfig(**(events | more)), rank)
    try:
        yield publisher
    finally:
        await publisher.close()


async def joined(publisher, subscriber):
    """Publish until the subscriber hears of it; return the number."""
    while True:
        publisher.send(batch(0))
        with contextlib.suppress(TimeoutError):
            return (await asyncio.wait_for(subscriber.next(), 0.1))[1]


def test_a_subscriber_gets_every_message_once_in_order_and_asks_for_those_before_it_came(events):
    async def talk():
        async with in_time(), publishing(events) as publisher:
            for number in range(3):
                publisher.send(batch(number))
            subscriber = Subscriber(events["endpoint"], events["replay_endpoint"], "kv@")
            first = await joined(publisher, subscriber)
            for number in range(5):
                publisher.send(batch(number))
            heard = [await subscriber.next() for _ in range(5)]
            missed = await subscriber.missed(0)
            subscriber.close()
            return first, heard, missed

    first, heard, missed = asyncio.run(talk())
    assert [number for _, number, _ in heard] == list(range(first + 1, first + 6))
    assert [number for _, number, _ in missed] == list(range(first + 6))
    assert [each.ts for _, _, each in missed[:3]] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(("first", "expected"), [(0, [5, 6, 7]), (6, [6, 7]), (8, []), (100, [])])
def test_only_the_latest_are_kept_and_every_replay_has_an_end(events, first, expected):
    async def talk():
        async with in_time(), publishing(events, buffer_steps=3) as publisher:
            for number in range(8):
                publisher.send(batch(number))
            subscriber = Subscriber(events["endpoint"], events["replay_endpoint"])
            found = [number for _, number, _ in await subscriber.missed(first)]
            subscriber.close()
            return found

    assert asyncio.run(talk()) == expected


def test_a_replay_of_all_that_is_kept_is_complete_and_lets_others_go_on(events):
    turns = []

    async def tick():
        while True:
            turns.append(None)
            await asyncio.sleep(0)

    async def talk():
        async with in_time(), publishing(events) as publisher:
            for number in range(10_000):
                publisher.send(batch(number))
            subscriber = Subscriber(events["endpoint"], events["replay_endpoint"])
            ticking = asyncio.create_task(tick())
            found = await subscriber.missed(0)
            ticking.cancel()
            subscriber.close()
            return [number for _, number, _ in found]

    assert asyncio.run(talk()) == list(range(10_000))
    assert len(turns) > 100


def test_who_asks_nonsense_gets_nothing_and_others_are_still_served(events, caplog):
    async def talk():
        async with in_time(), publishing(events) as publisher:
            publisher.send(batch(0))
            subscriber = Subscriber(events["endpoint"], events["replay_endpoint"])
            await subscriber._replay.send_multipart([b"", b"1", b"2"])
            found = await subscriber.missed(0)
            subscriber.close()
            return len(found)

    assert asyncio.run(talk()) == 1
    assert "ignored a request for KV events of 4 frames" in caplog.text


def test_a_subscriber_that_does_not_read_holds_up_nobody(events):
    async def talk():
        async with in_time(), publishing(events, hwm=2) as publisher:
            idle = Subscriber(events["endpoint"], events["replay_endpoint"])
            await joined(publisher, idle)
            payload = EventBatch(0.0, [Cleared()] * 1000, 0)
            for _ in range(5000):
                publisher.send(payload)  # more than the sockets have room for
            idle.close()

    asyncio.run(talk())


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
        ("tcp://*:0", 2, "tcp://*:0"),
        ("inproc://cache", 0, "inproc://cache"),
        ("inproc://cache", 2, "inproc://cache_dp2"),
        ("ipc:///tmp/e", 0, "ipc:///tmp/e"),
    ],
)
def test_every_rank_has_an_endpoint_of_its_own(endpoint, rank, expected):
    assert endpoint_of(endpoint, rank) == expected


@pytest.mark.parametrize("endpoint", ["ipc:///tmp/e", "tcp://*"])
def test_an_endpoint_without_a_port_cannot_be_shared_by_ranks(endpoint):
    with pytest.raises(PublisherError, match=r"of rank 0 only; expected tcp://HOST:PORT"):
        endpoint_of(endpoint, 1)


def test_any_port_is_one_at_this_hosts_own_address():
    async def talk():
        async with publishing(
            {"endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0", "host_ip": "127.0.0.1"}
        ) as publisher:
            return publisher.endpoint, publisher.replay_endpoint

    for endpoint in asyncio.run(talk()):
        host, port = endpoint.removeprefix("tcp://").split(":")
        assert host == "127.0.0.1"
        assert int(port) > 0


def test_an_address_that_is_taken_is_refused_by_name(events):
    port = free_port()
    taken = {"endpoint": f"tcp://*:{port}"}

    async def talk():
        async with publishing(taken):
            with pytest.raises(
                PublisherError, match=rf"KV events cannot be published at tcp://\*:{port}: Address already"
            ):
                Publisher(KvEventsConfig(endpoint=events["endpoint"], replay_endpoint=f"tcp://*:{port}"), 0)

    asyncio.run(talk())


def test_without_a_wildcard_the_publisher_connects_to_a_subscriber_that_listens():
    import zmq.asyncio

    async def talk():
        listening = zmq.asyncio.Context.instance().socket(zmq.SUB)
        listening.subscribe("kv")
        port = listening.bind_to_random_port("tcp://127.0.0.1")
        async with in_time(), publishing({"endpoint": f"tcp://127.0.0.1:{port}", "topic": "kv"}) as publisher:
            while not await listening.poll(50):
                publisher.send(batch(1))
            found = await listening.recv_multipart()
        listening.close(0)
        return found[0]

    assert asyncio.run(talk()) == b"kv"
