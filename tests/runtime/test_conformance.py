"""What every back end of the runtime must do."""

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from contextlib import AsyncExitStack
from dataclasses import asdict

import msgspec
import pytest
import uvloop

from serving.runtime.address import EndpointAddress
from serving.runtime.distributed import CallError, DistributedRuntime
from tests.support.waiting import in_time, until_async


def run(main):
    """Run a test's coroutine; a hang fails it."""

    async def limited():
        async with in_time():
            return await main

    return uvloop.run(limited())


def somewhere():
    return EndpointAddress(f"ns{uuid.uuid4().hex[:8]}", "backend", "generate")


class Network:
    """Runtimes that are closed at the end."""

    def __init__(self, config, stack):
        self._config = config
        self._stack = stack

    async def join(self, **options):
        return await self._stack.enter_async_context(await DistributedRuntime.connect(self._config, **options))

    async def serve(self, address, handler, **options):
        runtime = await self.join(**options)
        serving = asyncio.create_task(runtime.endpoint(address).serve_endpoint(handler))
        self._stack.callback(serving.cancel)
        return runtime, serving


def network(config, talk):
    async def main():
        async with AsyncExitStack() as stack:
            await talk(Network(config, stack))

    run(main())


async def count(request):
    for number in range(request["up_to"]):
        yield number


class Gate:
    """A handler that yields one thing, waits until it may go on if asked to, and yields another."""

    def __init__(self):
        self.goes_on = asyncio.Event()

    async def __call__(self, request):
        yield 1
        if request == "wait":
            await self.goes_on.wait()
        yield 2


def test_a_client_streams_what_an_async_generator_yields(config):
    async def talk(net):
        address = somewhere()
        await net.serve(address, count)
        client = await (await net.join()).client(address)
        await client.wait_for_instances()
        assert [item async for item in client.generate({"up_to": 500})] == list(range(500))

    network(config, talk)


def test_many_streams_share_a_connection_without_mixing(config):
    async def echo(request):
        for item in request:
            yield item
            await asyncio.sleep(0)

    async def talk(net):
        address = somewhere()
        await net.serve(address, echo)
        client = await (await net.join()).client(address)
        await client.wait_for_instances()
        asked = [[f"{number}-{item}" for item in range(number)] for number in range(60)]

        async def collect(request):
            return [item async for item in client.generate(request)]

        assert await asyncio.gather(*map(collect, asked)) == asked

    network(config, talk)


def test_large_requests_and_items_travel_whole(config):
    async def reverse(request):
        yield request[::-1]

    async def talk(net):
        address = somewhere()
        await net.serve(address, reverse)
        client = await (await net.join()).client(address)
        await client.wait_for_instances()
        blob = os.urandom(5_000_000)
        assert [item async for item in client.generate(blob)] == [blob[::-1]]

    network(config, talk)


def test_instances_are_found_addressed_and_taken_in_turn(config):
    def named(name):
        async def handler(request):
            yield name

        return handler

    async def talk(net):
        address = somewhere()
        client = await (await net.join()).client(address)
        with pytest.raises(CallError, match="no instance of dyn://"):
            client.generate(None)
        names = {(await net.serve(address, named(name)))[0].instance_id: name for name in ("a", "b", "c")}
        assert await client.wait_for_instances(3) == sorted(names)
        for id, name in names.items():
            assert [item async for item in client.direct(None, id)] == [name]
        turns = [item for _ in range(6) async for item in client.round_robin(None)]
        assert sorted(turns) == ["a", "a", "b", "b", "c", "c"]
        assert turns[:3] == turns[3:]

    network(config, talk)


def test_an_instance_that_leaves_finishes_its_streams_and_gets_no_more(config):
    async def talk(net):
        address = somewhere()
        gate = Gate()
        runtime, serving = await net.serve(address, gate)
        client = await (await net.join()).client(address)
        await client.wait_for_instances()
        stream = client.generate("wait")
        assert await stream.take() == [1]
        runtime.stopping.set()
        await until_async(lambda: not client.instance_ids())
        gate.goes_on.set()
        assert [item async for item in stream] == [2]
        await serving

    network(config, talk)


def test_a_draining_instance_refuses_calls(config):
    async def talk(net):
        address = somewhere()
        gate = Gate()
        runtime, _ = await net.serve(address, gate)
        client = await (await net.join()).client(address)
        (id,) = await client.wait_for_instances()
        held = client.generate("wait")
        assert await held.take() == [1]
        runtime.stopping.set()
        late = client.direct(None, id)
        await asyncio.sleep(0)
        with pytest.raises(CallError) as refused:
            while True:
                assert [item async for item in late] == [1, 2]
                late = client.direct(None, id)
        assert refused.value.kind in ("draining", "lost")
        gate.goes_on.set()
        assert [item async for item in held] == [2]

    network(config, talk)


def test_a_handlers_error_is_the_streams_end(config):
    async def fail(request):
        yield 1
        raise RuntimeError("out of cheese")

    async def talk(net):
        address = somewhere()
        await net.serve(address, fail)
        client = await (await net.join()).client(address)
        await client.wait_for_instances()
        stream, got = client.generate(None), []
        with pytest.raises(CallError, match="out of cheese") as failed:
            async for item in stream:
                got += [item]
        assert (got, failed.value.kind) == ([1], "engine")

    network(config, talk)


def test_a_service_that_raises_ends_its_own_call_and_no_other(config):
    open_streams = {}

    def service(request, stream):
        wanted = msgspec.msgpack.decode(request)
        open_streams[wanted] = stream
        if wanted == "raises":
            raise TypeError("unhashable type: 'list'")
        if wanted == "raises at its end":
            stream.on_cancel = {}.popitem
        stream.send(1)

    async def talk(net):
        address = somewhere()
        await (await net.join()).serve(address, service)
        client = await (await net.join()).client(address)
        await client.wait_for_instances()
        innocent, cancelled = client.generate("innocent"), client.generate("raises at its end")
        assert await innocent.take() == await cancelled.take() == [1]
        with pytest.raises(CallError, match="TypeError: unhashable type") as failed:
            assert [item async for item in client.generate("raises")] == []
        assert failed.value.kind == "engine"
        cancelled.cancel()
        await until_async(lambda: open_streams["raises at its end"].is_over)
        open_streams["innocent"].send(2)
        assert await innocent.take() == [2]

    network(config, talk)


def test_cancelling_a_stream_cancels_its_handler(config):
    stopped = []

    async def endless(request):
        try:
            while True:
                yield 0
                await asyncio.sleep(0.001)
        finally:
            stopped.append(request)

    async def talk(net):
        address = somewhere()
        await net.serve(address, endless)
        client = await (await net.join()).client(address)
        await client.wait_for_instances()
        stream = client.generate("mine")
        await stream.take()
        stream.cancel()
        await until_async(lambda: stopped == ["mine"])

    network(config, talk)


def test_a_slow_reader_holds_up_its_producer_and_nobody_else(config):
    produced = {"slow": 0, "fast": 0}

    async def flood(request):
        for number in range(request["up_to"]):
            produced[request["who"]] += 1
            yield number
            if number % 50 == 0:
                await asyncio.sleep(0)

    async def talk(net):
        address = somewhere()
        await net.serve(address, flood)
        client = await (await net.join()).client(address)
        await client.wait_for_instances()
        slow = client.generate({"up_to": 200_000, "who": "slow"})
        await until_async(lambda: len(slow.items) > 1000)
        fast = [item async for item in client.generate({"up_to": 20_000, "who": "fast"})]
        assert fast == list(range(20_000))
        held = -1
        while held != produced["slow"]:
            held = produced["slow"]
            await asyncio.sleep(0.2)
        assert held < 100_000
        assert [item async for item in slow] == list(range(200_000))

    network(config, talk)


def test_events_reach_every_subscriber_and_only_of_the_subject(config):
    async def talk(net):
        speaker, one, two = await net.join(), await net.join(), await net.join()
        subject, heard = f"s{uuid.uuid4().hex}.kv_events", {"one": [], "two": []}
        await one.events.subscribe(subject, heard["one"].append, durable=True)
        await two.events.subscribe(subject, heard["two"].append, durable=True)
        number = 0
        while not (heard["one"] and heard["two"]):  # a ZeroMQ subscriber needs a moment to connect
            await speaker.events.publish(subject, str(number).encode(), durable=True)
            await speaker.events.publish(subject + ".other", b"not this", durable=True)
            number += 1
            await asyncio.sleep(0.02)
        last = str(number).encode()
        await speaker.events.publish(subject, last, durable=True)
        await until_async(lambda: heard["one"][-1] == last and heard["two"][-1] == last)
        for messages in heard.values():
            numbers = [int(message) for message in messages]
            assert numbers == list(range(numbers[0], number + 1))

    network(config, talk)


WORKER = """
import asyncio, json, sys
from serving.runtime.address import EndpointAddress
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime

async def main():
    async def forever(request):
        number = 0
        while True:
            yield number
            number += 1
            await asyncio.sleep(0.01)
    runtime = await DistributedRuntime.connect(RuntimeConfig(**json.loads(sys.argv[1])))
    await runtime.endpoint(EndpointAddress.parse(sys.argv[2])).serve_endpoint(forever)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hanging"])
def test_a_process_that_dies_or_hangs_loses_its_streams_and_its_place(config_of_processes, number, monkeypatch):
    config = config_of_processes  # nodes in memory die in test_memory.py
    import json

    monkeypatch.setattr("serving.runtime.connection.PING_S", 0.1)

    async def talk(net):
        address = somewhere()
        process = subprocess.Popen([sys.executable, "-c", WORKER, json.dumps(asdict(config)), str(address)])
        try:
            client = await (await net.join()).client(address)
            await client.wait_for_instances()
            stream = client.generate(None)
            await stream.take()
            process.send_signal(number)
            monkeypatch.setattr("serving.runtime.connection.SILENT_S", 1.0)
            with pytest.raises(CallError) as lost:
                async for _ in stream:
                    pass
            assert lost.value.kind == "lost"
            await until_async(lambda: not client.instance_ids() and not client._known)
        finally:
            process.kill()
            process.wait()

    network(config, talk)


def test_all_processes_of_a_network_know_one_token(config):
    async def talk(net):
        tokens = [await runtime.cluster_token() for runtime in await asyncio.gather(*(net.join() for _ in range(3)))]
        assert len({token() for token in tokens}) == 1
        assert len(tokens[0]()) >= 16
        assert (await (await net.join()).cluster_token())() == tokens[0]()

    network(config, talk)


def test_who_abandons_its_callers_ends_their_calls_as_lost_and_is_chosen_by_none_of_them(config):
    async def talk(net):
        address = somewhere()
        runtime, _ = await net.serve(address, Gate(), drain_s=100.0)
        client = await (await net.join()).client(address)
        await client.wait_for_instances()
        stream = client.direct("wait", runtime.instance_id)
        assert await stream.take() == [1]
        chosen = []

        async def follow():
            """What a caller does after its call has ended: look at once for an instance to go on with."""
            while stream.end is None:
                await stream.take()
            chosen.extend(client.instance_ids())

        following = asyncio.create_task(follow())
        await runtime.abandon()
        await following
        assert (stream.end.kind, chosen) == ("lost", [])
        await runtime.close()

    network(config, talk)


@pytest.mark.parametrize("is_released", [True, False])
def test_who_drains_waits_for_what_others_may_still_ask_but_not_for_ever(config, is_released):
    async def talk(net):
        released, seen = asyncio.Event(), []

        async def wait():
            seen.append("waits")
            await released.wait()
            seen.append("released")

        runtime = await net.join(drain_s=100.0 if is_released else 0.05)
        draining = asyncio.create_task(runtime.drain(wait))
        await until_async(lambda: seen)
        if is_released:
            released.set()
        await draining
        assert seen == (["waits", "released"] if is_released else ["waits"])

    network(config, talk)


def test_a_claim_has_one_holder_until_that_leaves_and_each_has_a_higher_term(config):
    async def talk(net):
        first, second = (await net.join(), await net.join())
        name = f"planner-{uuid.uuid4().hex[:8]}"
        term = await first.discovery.claim(name)
        assert term is not None
        assert await first.discovery.claim(name) == term
        assert await second.discovery.claim(name) is None
        await first.close()
        later = await second.discovery.claim(name)
        assert later is not None and later > term

    network(config, talk)
