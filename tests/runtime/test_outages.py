"""A server that is away when something happens: it happens when the server is back."""

import asyncio
import contextlib
import os
import re
import signal
from base64 import b64encode

import httpx
import msgspec
import pytest
import uvloop

from serving.router.events import BlocksRemoved, BlocksStored
from serving.runtime import connection as calling
from serving.runtime import nats_connection
from serving.runtime.address import EndpointAddress, Instance
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.messages import Frame, frame
from serving.worker.kv_events import KvEventPublisher, KvEvents, decode_kv_event
from tests.support.servers import Etcd, Nats, Proxy
from tests.support.waiting import until_async

ADDRESS = EndpointAddress("outages", "backend", "generate")


def test_keys_and_watches_made_while_etcd_is_away_count_once_it_is_back(tmp_path):
    async def main(etcd):
        config = RuntimeConfig(etcd_endpoints=etcd.url, nats_server="", lease_ttl_s=2.0)
        async with await DistributedRuntime.connect(config) as one, await DistributedRuntime.connect(config) as two:
            seen = {}

            def on_change(key, value):
                if value is None:
                    seen.pop(key, None)
                else:
                    seen[key] = value

            await one.discovery.put("test/before", b"1")
            await two.discovery.watch("test/", on_change)
            assert seen == {"test/before": b"1"}
            await asyncio.to_thread(etcd.stop)
            await one.discovery.put("test/during", b"2")
            late = {}
            await two.discovery.watch("test/", late.__setitem__)
            assert late == {}
            assert seen == {"test/before": b"1"}  # what was known stands
            await asyncio.to_thread(etcd.start)
            await until_async(lambda: seen == late == {"test/before": b"1", "test/during": b"2"})
        async with await DistributedRuntime.connect(config) as three:
            left = {}
            await three.discovery.watch("test/", left.__setitem__)
            assert left == {}  # leases were revoked

    with Etcd() as etcd:
        uvloop.run(main(etcd))


def test_the_next_etcd_server_is_asked_when_the_first_is_away():
    async def main(etcd):
        config = RuntimeConfig(etcd_endpoints=f"127.0.0.1:1,{etcd.url}", nats_server="", lease_ttl_s=2.0)
        async with await DistributedRuntime.connect(config) as one:
            seen = {}
            await one.discovery.watch("test/", seen.__setitem__)
            await one.discovery.put("test/x", b"1")
            await until_async(lambda: seen == {"test/x": b"1"})

    with Etcd() as etcd:
        uvloop.run(main(etcd))


def test_a_watch_whose_connection_died_unseen_starts_again():
    async def main(etcd):
        async with Proxy(etcd.port) as proxy:
            config = {"nats_server": "", "lease_ttl_s": 2.0}
            direct = RuntimeConfig(etcd_endpoints=etcd.url, **config)
            through = RuntimeConfig(etcd_endpoints=f"127.0.0.1:{proxy.port}", **config)
            async with (
                await DistributedRuntime.connect(direct) as one,
                await DistributedRuntime.connect(through) as two,
            ):
                seen = {}

                def on_change(key, value):
                    if value is None:
                        del seen[key]
                    else:
                        seen[key] = value

                await one.discovery.put("test/before", b"1")
                await two.discovery.watch("test/", on_change)
                await one.discovery.put("test/stays", b"2")
                await until_async(lambda: seen == {"test/before": b"1", "test/stays": b"2"})
                proxy.forget()
                await one.discovery.put("test/after", b"3")
                await one.discovery.delete("test/before")
                await until_async(lambda: seen == {"test/stays": b"2", "test/after": b"3"})

    with Etcd() as etcd:
        uvloop.run(main(etcd))


def test_any_number_of_watches_leaves_room_for_everything_else():
    async def main(etcd):
        config = RuntimeConfig(etcd_endpoints=etcd.url, nats_server="", lease_ttl_s=2.0)
        async with await DistributedRuntime.connect(config) as one:
            seen = []
            for number in range(120):
                await one.discovery.watch(f"test/{number}/", lambda key, value: seen.append(key))
            await one.discovery.put("test/119/x", b"1")
            await until_async(lambda: seen == ["test/119/x"])

    with Etcd() as etcd:
        uvloop.run(main(etcd))


class Impostor(Proxy):
    """Answers in etcd's place while it has a body to send, as a proxy does that says it is being mended."""

    body = None

    async def _pass_on(self, reader, writer):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(re.search(rb"content-length: (\d+)", head, re.IGNORECASE)[1])
            request = head.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n") + await reader.readexactly(length)
            if self.body is not None:
                writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(self.body))
                writer.write(self.body)
            else:
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
                far_writer.write(request)
                while (data := await far_reader.read(1 << 16)) and self.body is None:
                    writer.write(data)
                far_writer.close()
        writer.close()


@pytest.mark.parametrize("body", [b'{"status":"maintenance"}', b"[]", b"{}", b'{"result":{}}', b"null"])
def test_what_is_no_etcd_and_answers_in_its_place_changes_nothing_for_long(body):
    async def main(etcd):
        async with Impostor(etcd.port) as proxy:
            config = {"nats_server": "", "lease_ttl_s": 2.0}
            through = RuntimeConfig(etcd_endpoints=f"127.0.0.1:{proxy.port}", **config)
            direct = RuntimeConfig(etcd_endpoints=etcd.url, **config)
            async with (
                await DistributedRuntime.connect(through) as one,
                await DistributedRuntime.connect(direct) as two,
            ):
                ours, theirs = {}, {}
                await one.discovery.put("test/ours", b"1")
                await two.discovery.watch("test/ours", theirs.__setitem__)
                await one.discovery.watch("test/theirs", ours.__setitem__)
                proxy.body = body
                await until_async(lambda: theirs == {"test/ours": None})  # its lease ran out
                await two.discovery.put("test/theirs", b"2")
                proxy.body = None
                await until_async(lambda: theirs == {"test/ours": b"1"} and ours == {"test/theirs": b"2"})

    with Etcd() as etcd:
        uvloop.run(main(etcd))


def test_keys_that_are_no_text_start_no_watch_again(caplog):
    caplog.set_level("INFO")

    async def main(etcd):
        config = RuntimeConfig(etcd_endpoints=etcd.url, nats_server="", lease_ttl_s=2.0)
        async with await DistributedRuntime.connect(config) as one, httpx.AsyncClient() as client:
            for key in (b"test/\xff", b"test/\xfe"):
                body = {"key": b64encode(key).decode(), "value": ""}
                (await client.post(f"{etcd.url}/v3/kv/put", json=body)).raise_for_status()
            seen = []
            await one.discovery.watch("test/", lambda key, value: seen.append(key))
            watch = next(watch for watch in one.discovery._watches if watch.prefix == "test/")
            for number in range(3):
                before = watch.revision
                await one.discovery.put("elsewhere", b"%d" % number)
                await until_async(lambda before=before: watch.revision > before)
            assert sorted(seen) == ["test/\\xfe", "test/\\xff"]

    with Etcd() as etcd:
        uvloop.run(main(etcd))
    assert "started again" not in caplog.text


def test_what_a_watcher_does_not_understand_ends_no_watch():
    async def main(etcd):
        config = RuntimeConfig(etcd_endpoints=etcd.url, nats_server="", lease_ttl_s=2.0)
        async with await DistributedRuntime.connect(config) as one:
            seen = []

            def on_change(key, value):
                seen.append(key)
                raise TypeError(f"{key} is not understood")

            await one.discovery.watch("test/", on_change)
            await one.discovery.put("test/x", b"1")
            await one.discovery.put("test/y", b"1")
            await until_async(lambda: seen == ["test/x", "test/y"])

    with Etcd() as etcd:
        uvloop.run(main(etcd))


def test_a_process_that_takes_connections_and_does_not_answer_is_no_instance_until_it_does(tmp_path):
    async def main():
        config = RuntimeConfig(etcd_endpoints="", nats_server="", discovery_dir=str(tmp_path / "d"))
        async with await DistributedRuntime.connect(config) as one, await DistributedRuntime.connect(config) as two:
            asked, goes_on = asyncio.Event(), asyncio.Event()

            async def answer(reader, writer):
                asked.set()
                await goes_on.wait()
                writer.write(frame(Frame([], [], [])))

            path = str(tmp_path / "s.sock")
            server = await asyncio.start_unix_server(answer, path)
            stopped = Instance(*ADDRESS, 7, f"unix:{path}")
            await one.register(stopped.key, msgspec.json.encode(stopped))
            client = await two.client(ADDRESS)
            await asked.wait()

            async def echo(request):
                yield request

            serving = asyncio.create_task(one.endpoint(ADDRESS).serve_endpoint(echo))
            assert await client.wait_for_instances() == [one.instance_id]
            goes_on.set()
            await until_async(lambda: client.instance_ids() == sorted([7, one.instance_id]))
            server.close()
            one.stopping.set()
            await serving

    uvloop.run(main())


def test_nats_may_be_away_for_longer_than_a_process_may_be_silent(monkeypatch, tmp_path):
    monkeypatch.setattr(calling, "SILENT_S", 0.8)
    monkeypatch.setattr(calling, "PING_S", 0.1)
    monkeypatch.setattr(nats_connection, "SETTLE_S", 0.5)

    async def main(nats):
        config = RuntimeConfig(etcd_endpoints="", nats_server=nats.url, discovery_dir=str(tmp_path / "d"))
        async with await DistributedRuntime.connect(config) as one, await DistributedRuntime.connect(config) as two:
            goes_on = asyncio.Event()

            async def slow(request):
                yield 1
                await goes_on.wait()
                yield 2

            serving = asyncio.create_task(one.endpoint(ADDRESS).serve_endpoint(slow))
            client = await two.client(ADDRESS)
            await client.wait_for_instances()
            stream = client.generate(None)
            assert await stream.take() == [1]
            await asyncio.to_thread(nats.stop)
            await asyncio.sleep(2)
            goes_on.set()
            during = client.generate(None)
            await asyncio.to_thread(nats.start)
            assert [item async for item in stream] == [2]
            assert [item async for item in during] == [1, 2]
            one.stopping.set()
            await serving

    with Nats() as nats:
        uvloop.run(main(nats))


def test_a_nats_server_that_hangs_is_noticed(monkeypatch, tmp_path):
    monkeypatch.setattr(nats_connection, "PING_S", 0.1)

    async def main(nats):
        config = RuntimeConfig(etcd_endpoints="", nats_server=nats.url, discovery_dir=str(tmp_path / "d"))
        async with await DistributedRuntime.connect(config) as one:
            os.kill(nats.process.pid, signal.SIGSTOP)
            try:
                await until_async(lambda: not one.requests.connection.is_settled)
            finally:
                os.kill(nats.process.pid, signal.SIGCONT)

    with Nats() as nats:
        uvloop.run(main(nats))


def test_hanging_up_is_not_cancelled_with_an_attempt_to_connect_again(tmp_path):
    """Whoever is cancelled while waiting for a connection to close takes along what all others wait for."""

    async def main(nats):
        config = RuntimeConfig(etcd_endpoints="", nats_server=nats.url, discovery_dir=str(tmp_path / "d"))
        async with await DistributedRuntime.connect(config) as one:
            attempt = asyncio.create_task(one.requests.connection.client._transport.wait_closed())
            await asyncio.sleep(0)
            attempt.cancel()

    with Nats() as nats:
        uvloop.run(main(nats))


def test_kv_events_of_any_size_come_through_nats_and_are_followed_by_others(tmp_path):
    async def main(nats):
        config = RuntimeConfig(etcd_endpoints="", nats_server=nats.url, discovery_dir=str(tmp_path / "d"))
        async with await DistributedRuntime.connect(config) as one, await DistributedRuntime.connect(config) as two:
            chain, numbers, removed = [], [], []

            def heard(data):
                message = msgspec.msgpack.decode(data, type=KvEvents)
                numbers.append(message.number)
                for event in map(decode_kv_event, message.events):
                    if isinstance(event, BlocksRemoved):
                        removed.extend(event.hashes)
                    else:
                        assert event.parent == (chain[-1] if chain else 5)
                        chain.extend(event.hashes)

            await two.events.subscribe(ADDRESS.subject("kv_events"), heard, durable=True)
            publisher = KvEventPublisher(one, ADDRESS)
            large = [(1 << 63) + number for number in range(200_000)]  # 1.8 MB as they travel
            publisher.publish([BlocksStored(large, 5), BlocksRemoved(large)])
            publisher.publish([BlocksStored([3], large[-1])])
            await until_async(lambda: chain == [*large, 3] and removed == large)
            assert numbers == list(range(len(numbers)))
            await publisher.close()

    with Nats() as nats:
        uvloop.run(main(nats))


def test_a_message_that_nats_does_not_take_is_told_and_holds_up_no_other(tmp_path, caplog):
    async def main(nats):
        config = RuntimeConfig(etcd_endpoints="", nats_server=nats.url, discovery_dir=str(tmp_path / "d"))
        async with await DistributedRuntime.connect(config) as one:
            heard = []
            for durable in (False, True):
                await one.events.subscribe(f"s.{durable}", heard.append, durable=durable)
                for data in (bytes(2 << 20), b"small"):
                    await one.events.publish(f"s.{durable}", data, durable=durable)
            await until_async(lambda: heard == [b"small", b"small"])

    with Nats() as nats:
        uvloop.run(main(nats))
    assert caplog.text.count("2097152 bytes on s.") == 2


def test_durable_events_published_while_a_subscriber_is_cut_off_reach_it(tmp_path):
    async def main(nats):
        config = RuntimeConfig(etcd_endpoints="", nats_server=nats.url, discovery_dir=str(tmp_path / "d"))
        async with await DistributedRuntime.connect(config) as one, await DistributedRuntime.connect(config) as two:
            heard = []
            await two.events.subscribe("s.kv_events", heard.append, durable=True)
            await one.events.publish("s.kv_events", b"1", durable=True)
            await until_async(lambda: heard == [b"1"])
            await asyncio.to_thread(nats.stop)
            pending = asyncio.create_task(one.events.publish("s.kv_events", b"2", durable=True))
            await asyncio.sleep(0.5)
            assert not pending.done()
            await asyncio.to_thread(nats.start)
            await pending
            await one.events.publish("s.kv_events", b"3", durable=True)
            await until_async(lambda: heard == [b"1", b"2", b"3"])

    with Nats() as nats:
        uvloop.run(main(nats))
