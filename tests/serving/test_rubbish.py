"""What nobody can read in discovery hides no worker from a frontend, and keeps none from starting."""

import json
import logging

import pytest
import uvloop

from serving.frontend.config import FrontendConfig
from serving.frontend.models import Models
from serving.model.card import ModelCard, ModelType
from serving.router import RouterConfig
from serving.runtime.address import EndpointAddress
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.server import GeneratorService
from serving.worker.kv_events import KvEventPublisher, serve_snapshots
from serving.worker.load_reports import LoadReport, LoadReporter
from serving.worker.registration import register_llm
from tests.support.servers import Etcd
from tests.support.waiting import in_time, until_async

ADDRESS = EndpointAddress("dynamo", "backend", "generate")
EVENTS = "v1/event_channels/namespace.dynamo.component.backend.kv_events/"
PLACE = {"namespace": "dynamo", "component": "backend", "endpoint": "generate"}


def instance(id, transport):
    return f"v1/instances/dynamo/backend/generate/{id:x}", json.dumps(
        {**PLACE, "instance_id": id, "transport": transport}
    )


def card(id, **options):
    made = {"name": "mock", "model_type": "backend", **PLACE, "instance_id": id}
    return f"v1/mdc/dynamo/backend/generate/{id:x}", json.dumps(made | options)


RUBBISH = {
    "an instance that is none": ("v1/instances/dynamo/backend/generate/1", "{}"),
    "an instance under another's key": (instance(2, "")[0], instance(3, "unix:/x")[1]),
    "a port that is no number": instance(2, "tcp:127.0.0.1:nope"),
    "a port that cannot be": instance(2, "tcp:127.0.0.1:99999999"),
    "a transport nobody knows": instance(2, "ftp:x"),
    "a path with a null": instance(2, "unix:/tmp/a\0b"),
    "a router without a number": ("v1/routers/dynamo/backend/generate/nothex", "{}"),
    "events from nowhere": (f"{EVENTS}8", "nonsense://x"),
    "events from a port without a key": (f"{EVENTS}8", "tcp://127.0.0.1:9"),
    "events from a port with half a key": (f"{EVENTS}8", "tcp://127.0.0.1:9 abc"),
    "a card that is none": ("v1/mdc/dynamo/backend/generate/2", '{"name": 1}'),
    "a card under another's key": (card(2)[0], card(3)[1]),
    "a card with a router mode that does not exist": card(2, router_mode="no-such-mode"),
    "a card with a router mode in a file": card(2, router_mode=f"{__file__}:Policy"),  # nor may it be run
    "a card with blocks of no tokens": card(2, kv_cache_block_size=0),
    "a card with a thousand million ranks": card(2, num_ranks=10**9),
    "a card that is nested deeply": (
        card(2)[0],
        card(2)[1][:-1] + ', "user_data": {"a":' + "[" * 9999 + "]" * 9999 + "}}",
    ),
}


async def work(config):
    """Be a worker."""
    runtime = await DistributedRuntime.connect(config)
    publisher = KvEventPublisher(runtime, ADDRESS)

    async def generate(request):
        yield 1

    def load(rank):
        return LoadReport(runtime.instance_id, rank, publisher.epoch, publisher.number, 0, 0, 0, 100, 8)

    await serve_snapshots(runtime, ADDRESS, [publisher])
    reports = LoadReporter(runtime, ADDRESS, load)
    await reports.start()
    await register_llm(ModelType.Backend, runtime.endpoint(ADDRESS), "", "mock", has_kv_events=True)
    await runtime.serve(ADDRESS, GeneratorService(generate))
    return runtime, reports


async def check(config, key, value):
    """Have two workers join, one leave, and frontends from before and after see it, all beside a planted key."""

    def sees(models, count):
        model = models.get("mock")
        return model is not None and model.workers.num_ranks == count

    async def watch():
        runtime = await DistributedRuntime.connect(config)
        models = Models(runtime, FrontendConfig(router_mode="kv"), RouterConfig())
        await models.start()
        return runtime, models

    async with in_time():
        planter = await DistributedRuntime.connect(config)
        await planter.discovery.put(key, value.encode())
        runtime, models = await watch()
        workers = [await work(config), await work(config)]
        await until_async(lambda: sees(models, 2))
        gone, reports = workers.pop()
        await reports.close()
        await gone.close()
        await until_async(lambda: sees(models, 1))
        late_runtime, late = await watch()
        await until_async(lambda: sees(late, 1))
        for known in (models, late):
            await known.close()
        for _, reports in workers:
            await reports.close()
        for joined in (runtime, late_runtime, planter, *(worker for worker, _ in workers)):
            await joined.close()


@pytest.mark.parametrize(("key", "value"), RUBBISH.values(), ids=RUBBISH)
def test_rubbish_in_a_folder_hides_no_worker_and_keeps_none_from_starting(tmp_path, caplog, key, value):
    config = RuntimeConfig(etcd_endpoints="", nats_server="", discovery_dir=str(tmp_path / "d"))
    caplog.set_level(logging.WARNING)
    uvloop.run(check(config, key, value))
    assert "Traceback" not in caplog.text
    assert key in caplog.text


def test_rubbish_in_etcd_hides_no_worker_and_keeps_none_from_starting(caplog):
    with Etcd() as etcd:
        config = RuntimeConfig(etcd_endpoints=etcd.url, nats_server="", lease_ttl_s=2.0)
        for key, value in RUBBISH.values():
            uvloop.run(check(config, key, value))
    assert "Traceback" not in caplog.text


def test_a_good_card_survives_the_round_trip():
    made = ModelCard(name="mock", model_type=ModelType.Backend, **PLACE, instance_id=2, router_mode="kv")
    assert ModelCard.parse(*[part.encode() if part[0] == "{" else part for part in card(2, router_mode="kv")]) == made
