"""A server that is away when something happens: it happens when the server is back."""

import asyncio

import uvloop

from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from tests.servers import Etcd, Nats


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.02)


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
            await until(lambda: seen == late == {"test/before": b"1", "test/during": b"2"})
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
            await until(lambda: seen == {"test/x": b"1"})

    with Etcd() as etcd:
        uvloop.run(main(etcd))


def test_durable_events_published_while_a_subscriber_is_cut_off_reach_it(tmp_path):
    async def main(nats):
        config = RuntimeConfig(etcd_endpoints="", nats_server=nats.url, discovery_dir=str(tmp_path / "d"))
        async with await DistributedRuntime.connect(config) as one, await DistributedRuntime.connect(config) as two:
            heard = []
            await two.events.subscribe("s.kv_events", heard.append, durable=True)
            await one.events.publish("s.kv_events", b"1", durable=True)
            await until(lambda: heard == [b"1"])
            await asyncio.to_thread(nats.stop)
            pending = asyncio.create_task(one.events.publish("s.kv_events", b"2", durable=True))
            await asyncio.sleep(0.5)
            assert not pending.done()
            await asyncio.to_thread(nats.start)
            await pending
            await one.events.publish("s.kv_events", b"3", durable=True)
            await until(lambda: heard == [b"1", b"2", b"3"])

    with Nats() as nats:
        uvloop.run(main(nats))
