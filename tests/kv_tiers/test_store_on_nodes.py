"""A KV store and its workers as nodes of a memory network, in virtual time."""

import asyncio
import random
from contextlib import asynccontextmanager

import pytest

from dynabench.rehearsal.virtual_time.loop import run
from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from serving.engines.mock.engine import Mocker
from serving.kv_tiers.config import KvStoreServiceConfig
from serving.kv_tiers.store import serve_store
from serving.kv_tiers.store_client import LOOK_UP_S, StoreTier
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.memory.network import Network
from serving.transfer.config import TransferRunConfig
from serving.worker.config import WorkerConfig
from serving.worker.loop import run_worker
from tests.engines.kv_world import expected
from tests.engines.test_mocker_roles import asked, collect
from tests.kv_tiers.world import FORMAT, TOKEN, read, write
from tests.support.nodes import on

PORT = 7600
CONFIG = RuntimeConfig(discovery_backend="memory", etcd_endpoints="", nats_server="")
CHUNK = 4 * 131_072
CHUNK_GIB = CHUNK / (1 << 30)


def now():
    return asyncio.get_running_loop().time()


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


class Site:
    """A store, and workers that use it, each on its node."""

    def __init__(self):
        self.network = Network(random.Random(7), delay=lambda sender, receiver, rng: 0.001 * rng.random())

    def start_store(self, token=lambda: TOKEN):
        config, stopping = KvStoreServiceConfig(kv_store_size=0.01, port=PORT), asyncio.Event()
        on(self.network.node("store"), serve_store(config, token, stopping, on_ready=lambda: None))

    def kill_store(self):
        self.network.kill(self.network.nodes["store"])

    @asynccontextmanager
    async def user(self, name):
        """Yield a worker's side, which is used as its node."""
        node = self.network.node(name)

        async def new():
            tier = StoreTier(f"store:{PORT}", FORMAT, lambda: TOKEN)
            await tier.start()
            return tier

        tier = await on(node, new())
        yield tier, lambda work: on(node, work)
        await on(node, tier.close())


def on_site(talk):
    async def main():
        site = Site()
        site.start_store()
        await asyncio.sleep(0.01)
        async with site.user("one") as one, site.user("other") as other:
            return await talk(site, *one, *other)

    return run(main(), max_s=1000.0)


def test_nodes_share_what_they_keep():
    async def talk(site, one, as_one, other, as_other):
        assert await as_one(write(one, [1, 2])) == 2
        assert await as_other(read(other, [1, 2, 3])) == 2
        assert await as_other(write(other, [1, 2, 3])) == 3
        assert other.counts.num_written == 1
        assert await as_one(read(one, [1, 2, 3])) == 3

    on_site(talk)


def test_a_store_that_is_killed_in_the_middle_is_a_miss_and_is_used_again_once_it_is_back():
    async def talk(site, one, as_one, other, as_other):
        assert await as_one(write(one, range(300))) == 300
        reading = as_other(read(other, range(300)))
        await asyncio.sleep(0.002)
        site.kill_store()
        assert await reading < 300
        assert not other.is_up
        begun = now()
        assert await as_other(read(other, [1])) == await as_other(other.look_up([1])) == 0
        assert now() == begun
        assert await as_one(one.look_up([1])) == 0  # it notices now
        site.start_store()
        await until(lambda: one.is_up and other.is_up)
        assert await as_other(read(other, [1])) == 0  # its memory was lost
        assert await as_one(write(one, [1])) == await as_other(read(other, [1])) == 1

    on_site(talk)


@pytest.mark.parametrize("fault", ["paused", "cut off"])
def test_a_store_that_is_silent_is_a_miss_after_a_while_and_at_once_from_then_on(fault):
    async def talk(site, one, as_one, other, as_other):
        assert await as_one(write(one, [1])) == 1
        if fault == "paused":
            site.network.pause(site.network.nodes["store"])
        else:
            site.network.partition(["one", "other"], ["store"])
        begun = now()
        assert await as_one(one.look_up([1])) == 0
        assert now() - begun == pytest.approx(LOOK_UP_S)
        begun = now()
        assert await as_one(one.look_up([1])) == 0
        assert now() == begun
        site.network.resume(site.network.nodes["store"])
        site.network.heal()
        await until(lambda: one.is_up)
        assert await as_one(read(one, [1])) == 1

    on_site(talk)


def test_a_mocker_finds_the_prompts_of_another_in_the_store():
    def settings(name):
        engine = EngineConfig(block_size=4, num_gpu_blocks=30, kv_offloading_size=16 * CHUNK_GIB)
        worker = WorkerConfig(model_name="m", endpoint=f"dyn://ns.{name}.generate", drain_s=1.0)
        transfer = TransferRunConfig(kv_store=f"store:{PORT}")
        return worker, Mocker(worker, engine, TimingConfig(timing="constant"), transfer=transfer)

    async def main():
        site, mockers = Site(), {}
        caller = site.network.node("caller")
        runtime = await on(caller, DistributedRuntime.connect(CONFIG))
        site.start_store(await on(caller, runtime.cluster_token()))
        for name in ("one", "other"):
            worker, mockers[name] = settings(name)
            on(site.network.node(name), run_worker(CONFIG, worker, mockers[name], asyncio.Event()))

        async def ask(name, prompt):
            client = await runtime.client(settings(name)[0].address)
            await client.wait_for_instances()
            return (await collect(client.generate(asked(prompt, 3, None))))[0]

        prompt = list(range(1, 42))
        assert await on(caller, ask("one", prompt)) == expected(prompt, 3)
        await until(lambda: mockers["one"].load(0).kv_tiers[-1].num_writes)
        assert await on(caller, ask("other", prompt)) == expected(prompt, 3)
        return mockers["other"].load(0).kv_tiers[-1]

    found = run(main(), max_s=100.0)
    assert (found.name, found.num_hits, found.read_bytes) == ("store", 10, 10 * CHUNK)
