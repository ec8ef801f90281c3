"""Who does not know the cluster's token can neither call over TCP, nor be called, nor hear, nor stand in the way."""

import asyncio
import secrets
import shutil
from base64 import b64decode, b64encode
from dataclasses import replace

import httpx
import msgspec
import pytest
import uvloop
import zmq
import zmq.asyncio

from serving.runtime import sockets
from serving.runtime.address import EndpointAddress, Instance
from serving.runtime.cluster_token import KEY
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.messages import Call, frame
from serving.runtime.ports import RuntimeUnavailableError
from serving.runtime.proof import GREETING
from tests.support.servers import Etcd
from tests.support.waiting import in_time, until_async


@pytest.fixture
def etcd():
    with Etcd() as server:
        yield server


def settings(etcd):
    return RuntimeConfig(etcd_endpoints=etcd.url, nats_server="", lease_ttl_s=2.0)


def somewhere():
    return EndpointAddress(f"ns{secrets.token_hex(4)}", "backend", "generate")


async def double(request):
    yield request * 2


def keys(etcd):
    body = {"key": b64encode(b"v1/").decode(), "range_end": b64encode(b"v2").decode()}
    found = httpx.post(f"{etcd.url}/v3/kv/range", json=body).json().get("kvs", [])
    return {b64decode(entry["key"]).decode(): b64decode(entry["value"]) for entry in found}


def put(etcd, key, value):
    body = {"key": b64encode(key.encode()).decode(), "value": b64encode(value).decode()}
    httpx.post(f"{etcd.url}/v3/kv/put", json=body).raise_for_status()


def with_worker(etcd, talk, handler=double):
    """Let `talk(port, address)` do what it likes beside a worker; afterwards a caller of the cluster gets through."""

    async def main():
        address = somewhere()
        async with await DistributedRuntime.connect(settings(etcd)) as worker:
            serving = asyncio.create_task(worker.endpoint(address).serve_endpoint(handler))
            await until_async(lambda: worker._transport)
            await talk(int(worker._transport.rpartition(":")[2]), address)
            async with await DistributedRuntime.connect(settings(etcd)) as caller, in_time():
                client = await caller.client(address)
                await client.wait_for_instances()
                assert [item async for item in client.generate(21)] == [42]
            worker.stopping.set()
            await serving

    uvloop.run(main())


async def hear_all(reader):
    """Read until the other side hangs up, which it may do rudely."""
    heard = b""
    try:
        while data := await reader.read(1 << 16):
            heard += data
    except ConnectionResetError:
        pass
    return heard


def test_a_call_without_a_proof_is_not_served_and_is_mentioned_once(etcd, caplog):
    served = []

    async def handler(request):
        served.append(request)
        yield request * 2

    async def talk(port, address):
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            call = Call(0, ".".join(address), msgspec.Raw(msgspec.msgpack.encode("theirs")))
            writer.write(frame(call) + b"x" * 1000)
            async with in_time():
                heard = await hear_all(reader)
            assert heard.startswith(GREETING)
            assert len(heard) == len(GREETING) + 32
            writer.close()
        (said,) = [record.getMessage() for record in caplog.records]
        assert said == (
            f"a connection from 127.0.0.1 to tcp:127.0.0.1:{port} was refused: it does not know this cluster's token"
        )

    with_worker(etcd, talk, handler)
    assert served == [21]


def test_a_connection_that_proves_nothing_is_closed_in_time(etcd, monkeypatch):
    async def talk(port, address):
        with monkeypatch.context() as patch:
            patch.setattr(sockets, "PROOF_S", 0.1)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"x")
            async with in_time():
                assert len(await hear_all(reader)) == len(GREETING) + 32
            writer.close()

    with_worker(etcd, talk)


def test_strangers_that_hold_many_connections_keep_nobody_out(etcd, monkeypatch):
    monkeypatch.setattr(sockets, "MAX_UNPROVEN", 4)
    monkeypatch.setattr(sockets, "PROOF_S", 600)
    held = []

    async def talk(port, address):
        for _ in range(10):
            held.append(await asyncio.open_connection("127.0.0.1", port))  # noqa: PERF401 (one after the other)
        async with in_time():
            for reader, _ in held[:6]:
                await hear_all(reader)
            for reader, _ in held[6:]:
                await reader.readexactly(len(GREETING))

    with_worker(etcd, talk)
    for _, writer in held:
        writer.close()


@pytest.mark.parametrize("kind", ["silent", "without the token", "of another version"])
def test_a_stranger_that_discovery_names_gets_no_request(etcd, caplog, monkeypatch, kind):
    monkeypatch.setattr(sockets, "PROOF_S", 0.3)
    monkeypatch.setattr("serving.runtime.client.REDIAL_S", 0.05)
    heard = []

    async def stranger(reader, writer):
        if kind == "of another version":
            writer.write(frame(msgspec.msgpack.decode(b"\x93\x90\x90\x90")))
        elif kind == "without the token":
            writer.write(GREETING + bytes(32))
            heard.append(await reader.readexactly(64))
            writer.write(bytes(32))
        heard.append(await hear_all(reader))
        writer.close()

    async def main():
        address = somewhere()
        server = await asyncio.start_server(stranger, "127.0.0.1", 0)
        transport = f"tcp:127.0.0.1:{server.sockets[0].getsockname()[1]}"
        instance = Instance(*address, 5, transport)
        async with await DistributedRuntime.connect(settings(etcd)) as caller:
            await caller.discovery.put(instance.key, msgspec.json.encode(instance))
            client = await caller.client(address)
            await until_async(lambda: len(heard) >= 3)
            assert client.instance_ids() == []
        server.close()
        assert {len(said) for said in heard} <= {0, 64}
        assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["tcp"]

    uvloop.run(main())


def test_events_are_heard_only_with_the_publishers_key(etcd):
    async def main():
        async with (
            await DistributedRuntime.connect(settings(etcd)) as speaker,
            await DistributedRuntime.connect(settings(etcd)) as second,
            await DistributedRuntime.connect(settings(etcd)) as listener,
        ):
            heard, subject = set(), "subject"
            for runtime in (speaker, second):
                await runtime.events.announce(subject)
            place = keys(etcd)[f"v1/event_channels/{subject}/{speaker.instance_id:x}"].decode()
            address, _, key = place.partition(" ")
            context = zmq.asyncio.Context()
            strangers = [context.socket(zmq.SUB) for _ in range(2)]
            strangers[1].curve_publickey, strangers[1].curve_secretkey = zmq.curve_keypair()
            strangers[1].curve_serverkey, _ = zmq.curve_keypair()  # somebody else's key
            for stranger in strangers:
                stranger.setsockopt(zmq.LINGER, 0)
                stranger.subscribe(b"")
                stranger.connect(address)
            assert len(key) == 40
            await listener.events.subscribe(subject, heard.add)
            while len(heard) < 2:
                await speaker.events.publish(subject, b"news")
                await second.events.publish(subject, b"more")
                await asyncio.sleep(0.02)
            for stranger in strangers:
                with pytest.raises(zmq.Again):
                    await stranger.recv_multipart(zmq.NOBLOCK)
                stranger.close()
            context.term()

    uvloop.run(main())


def test_the_first_process_makes_up_a_token_and_leaves_it_for_the_next(etcd):
    async def join():
        async with await DistributedRuntime.connect(settings(etcd)):
            return keys(etcd)[KEY]

    first, second = uvloop.run(join()), uvloop.run(join())
    assert first == second
    assert len(first) == 64


@pytest.mark.parametrize("how", ["another token is put", "the token is deleted", "etcd lost everything"])
def test_processes_that_stay_and_those_that_come_agree_on_a_token(etcd, how, monkeypatch):
    monkeypatch.setattr("serving.runtime.client.REDIAL_S", 0.05)

    async def main():
        address = somewhere()
        async with (
            await DistributedRuntime.connect(settings(etcd)) as worker,
            await DistributedRuntime.connect(settings(etcd)) as held,
        ):
            serving = asyncio.create_task(worker.endpoint(address).serve_endpoint(double))
            before = keys(etcd)[KEY]
            old = await held.client(address)
            await old.wait_for_instances()
            if how == "another token is put":
                put(etcd, KEY, b"a token of the operator's own")
            elif how == "the token is deleted":
                httpx.post(f"{etcd.url}/v3/kv/deleterange", json={"key": b64encode(KEY.encode()).decode()})
            else:
                await asyncio.to_thread(etcd.stop)
                shutil.rmtree(etcd.folder / "data")
                await asyncio.to_thread(etcd.start)
            async with await DistributedRuntime.connect(settings(etcd)) as caller, in_time():
                client = await caller.client(address)
                await client.wait_for_instances()
                for known in (client, old):
                    assert [item async for item in known.generate(21)] == [42]
                await until_async(lambda: KEY in keys(etcd))
                if how == "another token is put":
                    assert keys(etcd)[KEY] == b"a token of the operator's own" != before
            worker.stopping.set()
            await serving

    uvloop.run(main())


def test_a_guessable_token_is_not_taken_for_one_that_was_lost(etcd, monkeypatch):
    async def main():
        async with await DistributedRuntime.connect(settings(etcd)) as process:
            token = process.requests._token
            before = token.value
            put(etcd, KEY, b"sesame")
            token._on_change(KEY, None)  # as if it had been deleted before that
            await token._putting_back
            assert token.value == before

    uvloop.run(main())


def test_where_there_is_no_token_nobody_is_called_over_tcp(tmp_path):
    async def main():
        config = RuntimeConfig(etcd_endpoints="", nats_server="", discovery_dir=str(tmp_path / "d"))
        async with await DistributedRuntime.connect(config) as process:
            with pytest.raises(OSError, match="needs etcd"):
                await process.requests.dial("tcp:127.0.0.1:9", lambda channel: None)

    uvloop.run(main())


def test_a_token_that_anyone_could_guess_is_refused(etcd):
    async def main():
        put(etcd, KEY, b"sesame")
        with pytest.raises(RuntimeUnavailableError, match="cluster_token in etcd holds 6 bytes; expected at least 16"):
            await DistributedRuntime.connect(settings(etcd))

    uvloop.run(main())


@pytest.mark.parametrize(("host", "is_told"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_who_opens_a_port_to_the_network_beside_an_open_etcd_is_told(etcd, caplog, host, is_told):
    async def main():
        async with await DistributedRuntime.connect(replace(settings(etcd), rpc_host=host)):
            pass

    uvloop.run(main())
    assert ("etcd requires no password or certificate" in caplog.text) == is_told


@pytest.mark.parametrize(
    "address", ["tcp:a..b:80", f"tcp:{'a' * 64}:80", "tcp:127.0.0.1:1", "unix:/nowhere", "unix:" + "a" * 200]
)
def test_where_nobody_can_be_nobody_answers(etcd, address):
    async def main():
        async with await DistributedRuntime.connect(settings(etcd)) as caller:
            with pytest.raises(OSError):
                await caller.requests.dial(address, lambda channel: None)

    uvloop.run(main())
