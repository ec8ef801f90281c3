"""etcd or NATS is away: it is noticed, calls do not wait forever, and what still answers stays in use."""

import asyncio
import contextlib
import logging
import os
import signal
from base64 import b64encode

import aiohttp
import httpx
import pytest
import uvloop

from serving.runtime.address import EndpointAddress
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.etcd import EtcdDiscovery
from serving.runtime.messages import CallError
from serving.runtime.server import GeneratorService
from tests.support.servers import Etcd, Nats, Proxy
from tests.support.waiting import in_time, until_async

ADDRESS = EndpointAddress("away", "backend", "generate")
SERVERS = {"etcd": Etcd, "nats": Nats}


def settings(tmp_path, server, **more):
    named = {"etcd_endpoints": server.url} if isinstance(server, Etcd) else {"nats_server": server.url}
    return RuntimeConfig(
        **{"etcd_endpoints": "", "nats_server": "", "discovery_dir": str(tmp_path / "d"), "lease_ttl_s": 2.0}
        | named
        | more
    )


@contextlib.asynccontextmanager
async def answering(config, count=1):
    """Join with some processes that count, and one that calls them; give that one, its client and the others.

    They say 1, wait for an event if the request names one, and say 2.
    """
    events = {name: asyncio.Event() for name in ("goes on", "never")}

    async def numbers(request):
        yield 1
        if request:
            await events[request].wait()
        yield 2

    async with in_time(), contextlib.AsyncExitStack() as stack:
        caller, *others = [
            await stack.enter_async_context(await DistributedRuntime.connect(config)) for _ in range(count + 1)
        ]
        for other in others:
            await other.serve(ADDRESS, GeneratorService(numbers))
        client = await caller.client(ADDRESS)
        await client.wait_for_instances(count)
        yield caller, client, others, events


async def all_of(stream):
    return [item async for item in stream]


@pytest.mark.parametrize("way", ["stopped", "hangs"])
@pytest.mark.parametrize("which", SERVERS)
def test_an_outage_is_noticed_logged_once_and_over_with_the_next_answer(tmp_path, caplog, which, way):
    caplog.set_level(logging.INFO, "serving.runtime.outages")

    def leave(server):
        server.stop() if way == "stopped" else os.kill(server.process.pid, signal.SIGSTOP)

    def come_back(server):
        server.start() if way == "stopped" else os.kill(server.process.pid, signal.SIGCONT)

    async def main(server):
        async with in_time(), await DistributedRuntime.connect(settings(tmp_path, server)) as runtime:
            (outages,) = runtime.outages
            assert (outages.name, outages.carries_requests, outages.is_away) == (which, which == "nats", False)
            await asyncio.to_thread(leave, server)
            await until_async(lambda: outages.is_away)
            assert "has not answered for" in str(outages)
            await until_async(lambda: outages.seconds > 1)
            await asyncio.to_thread(come_back, server)
            await until_async(lambda: not outages.is_away)
            assert (str(outages), outages.seconds, outages.num_outages) == ("", 0.0, 1)

    with SERVERS[which]() as server:
        uvloop.run(main(server))
    said = [(record.levelname, record.getMessage().replace(server.url, "URL")) for record in caplog.records]
    assert [level for level, _ in said] == ["WARNING", "INFO"]
    name = {"etcd": "etcd", "nats": "NATS"}[which]
    assert said[0][1].startswith(f"{name} at URL does not answer (")
    assert said[1][1].startswith(f"{name} at URL answers again, after ")


def test_calls_without_an_answer_are_given_up_while_nats_is_away_and_answers_that_have_begun_go_on(tmp_path):
    async def main(server):
        config = settings(tmp_path, server, nats_timeout_s=0.5)
        async with answering(config) as (caller, client, (worker,), events):
            begun = client.direct("goes on", worker.instance_id)
            assert await begun.take() == [1]
            await asyncio.to_thread(server.stop)
            before = client.direct(None, worker.instance_id)  # perhaps before the outage is noticed
            with pytest.raises(CallError, match=r"NATS at nats://.* has not answered for") as failed:
                await all_of(before)
            assert failed.value.kind == "unavailable"
            at_once = client.direct(None, worker.instance_id)
            assert at_once.end.kind == "unavailable"
            assert caller.requests.outages.num_given_up == 2
            await asyncio.to_thread(server.start)
            events["goes on"].set()
            assert await all_of(begun) == [2]
            await until_async(lambda: not caller.requests.outages.is_away)
            assert await all_of(client.direct(None, worker.instance_id)) == [1, 2]

    with Nats() as server:
        uvloop.run(main(server))


async def leases(etcd):
    async with httpx.AsyncClient(base_url=etcd.url) as http:
        return [lease["ID"] for lease in (await http.post("/v3/lease/leases", json={})).json().get("leases", [])]


async def revoke_all(etcd):
    async with httpx.AsyncClient(base_url=etcd.url) as http:
        for lease in await leases(etcd):
            (await http.post("/v3/lease/revoke", json={"ID": lease})).raise_for_status()


def keeps_off_etcd(worker):
    """Keep a worker from registering again, as if it were cut off from etcd alone; return how to let it."""
    real, worker.discovery._grant = worker.discovery._grant, lambda: asyncio.sleep(0)
    return lambda: setattr(worker.discovery, "_grant", real)


def test_workers_that_answer_are_called_although_etcd_has_lost_all_leases(tmp_path):
    async def main(etcd):
        async with answering(settings(tmp_path, etcd), 2) as (caller, client, workers, _):
            ids, gone = client.instance_ids(), []
            await caller.discovery.watch("v1/instances/", lambda key, value: value is None and gone.append(key))
            back = [keeps_off_etcd(worker) for worker in workers]
            await revoke_all(etcd)
            (watch,) = [each for each in caller.discovery._watches if each.prefix == ADDRESS.prefix]
            await until_async(lambda: not watch.known)  # all of this has arrived
            async with asyncio.timeout(30):
                for _ in range(20):  # for longer than a lease
                    assert client.instance_ids() == ids
                    assert [await all_of(client.direct(None, id)) for id in ids] == [[1, 2], [1, 2]]
                    await asyncio.sleep(0.15)
            for come in back:
                come()
            await until_async(lambda: len(watch.known) == 2)
            assert (client.instance_ids(), gone) == (ids, [])

    with Etcd() as etcd:
        uvloop.run(main(etcd))


def test_a_worker_without_a_lease_is_gone_once_it_hangs_up(tmp_path):
    async def main(etcd):
        async with answering(settings(tmp_path, etcd)) as (caller, client, (worker,), _):
            gone = []
            await caller.discovery.watch("v1/instances/", lambda key, value: value is None and gone.append(key))
            keeps_off_etcd(worker)
            await revoke_all(etcd)
            (watch,) = [each for each in caller.discovery._watches if each.prefix == ADDRESS.prefix]
            await until_async(lambda: not watch.known)
            await worker.requests.close()
            await until_async(lambda: gone)
            assert client.instance_ids() == []

    with Etcd() as etcd:
        uvloop.run(main(etcd))


@pytest.mark.parametrize("has_lease", [True, False])
def test_a_worker_that_withdraws_is_gone_at_once_although_it_answers(tmp_path, has_lease):
    async def main(etcd):
        async with answering(settings(tmp_path, etcd)) as (_, client, (worker,), _):
            stream = client.direct("never", worker.instance_id)
            assert await stream.take() == [1]
            if not has_lease:
                keeps_off_etcd(worker)
                await revoke_all(etcd)
            draining = asyncio.create_task(worker.drain())
            await until_async(lambda: client.instance_ids() == [])
            assert stream.end is None  # it answers what it has
            draining.cancel()

    with Etcd() as etcd:
        uvloop.run(main(etcd))


@pytest.mark.parametrize("which", SERVERS)
def test_a_process_that_is_stopped_while_a_server_is_away_leaves_in_peace(tmp_path, caplog, which):
    async def main(server):
        async with answering(settings(tmp_path, server)) as (_, _, (worker,), _):
            await asyncio.to_thread(server.stop)
            await until_async(lambda: worker.outages[0].is_away)
            await worker.drain()

    with SERVERS[which]() as server:
        uvloop.run(main(server))
    assert [record for record in caplog.records if record.levelno > logging.WARNING] == []


def test_what_could_not_be_sent_to_nats_does_not_keep_a_process_from_leaving(tmp_path):
    async def main(server):
        async with in_time(), await DistributedRuntime.connect(settings(tmp_path, server)) as runtime:
            await asyncio.to_thread(server.stop)
            await until_async(lambda: runtime.outages[0].is_away)
            await runtime.requests.connection.client.publish("dyn.anything", b"left over")

    with Nats() as server:
        uvloop.run(main(server))


class Endpoint(Proxy):
    """An endpoint of etcd that can hang: it takes connections, and answers nothing."""

    num_asking = 0
    is_hanging = False

    def hang(self):
        self.is_hanging = True
        for writer in self._writers:
            writer.close()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    async def _pass_on(self, reader, writer):
        if not self.is_hanging:
            return await super()._pass_on(reader, writer)
        self.num_asking += 1
        while await reader.read(1 << 16):
            pass
        self.num_asking -= 1
        return writer.close()


@contextlib.asynccontextmanager
async def three_endpoints(etcd):
    """Connect to etcd at three endpoints; give them and our discovery, which only looks whether they answer."""
    async with in_time(), contextlib.AsyncExitStack() as stack:
        endpoints = [await stack.enter_async_context(Endpoint(etcd.port)) for _ in range(3)]
        urls = ",".join(endpoint.url for endpoint in endpoints)
        discovery = EtcdDiscovery(RuntimeConfig(etcd_endpoints=urls, nats_server="", lease_ttl_s=600.0))
        await discovery.connect()
        yield endpoints, discovery
        await discovery.close()


def test_all_endpoints_have_the_same_time_to_answer_before_etcd_is_away():
    async def main(etcd):
        async with three_endpoints(etcd) as (endpoints, discovery):
            most = 0
            for endpoint in endpoints:
                endpoint.hang()

            def is_away():
                nonlocal most
                most = max(most, sum(endpoint.num_asking for endpoint in endpoints))
                return discovery.outages.is_away

            await until_async(is_away)
            assert most == 3

    with Etcd() as etcd:
        uvloop.run(main(etcd))


def test_an_endpoint_that_answers_is_asked_first_once_the_first_ones_hang():
    async def main(etcd):
        async with three_endpoints(etcd) as (endpoints, discovery):
            for endpoint in endpoints[:2]:
                endpoint.hang()
            await until_async(lambda: discovery._endpoints[0] == endpoints[2].url)
            assert len(discovery._endpoints) == 3

    with Etcd() as etcd:
        uvloop.run(main(etcd))


class Cut(Proxy):
    """Passes on everything but requests to delete, on which it hangs up."""

    async def _pump(self, reader, writer):
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if b"/v3/kv/deleterange" in data:
                    break
                writer.write(data)
        writer.close()


def test_a_withdrawal_that_is_cut_off_after_the_lease_ended_leaves_no_key_forever():
    async def main(etcd):
        async with in_time(), Cut(etcd.port) as cut, httpx.AsyncClient(base_url=etcd.url) as admin:
            config = RuntimeConfig(etcd_endpoints=f"127.0.0.1:{cut.port}", nats_server="", lease_ttl_s=60.0)
            discovery = EtcdDiscovery(config)
            await discovery.connect()
            await discovery.put("test/x", b"1")
            await revoke_all(etcd)
            with pytest.raises(aiohttp.ClientError):
                await discovery.delete("test/x")
            key = {"key": b64encode(b"test/x").decode()}
            (left,) = (await admin.post("/v3/kv/range", json=key)).json()["kvs"]
            assert int(left.get("lease", 0))  # so it is gone soon, whatever becomes of us
            await discovery.close()

    with Etcd() as etcd:
        uvloop.run(main(etcd))
