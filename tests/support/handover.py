"""Prefill and decode workers that keep to the protocol and to nothing else: their KV is a record of who computed what.

A worker that prefills says where its KV is; one that decodes finds it there, and that it is that of its own request, or fails.
All are in this process, on a real network.
"""

import asyncio
import itertools
from contextlib import AsyncExitStack

from serving.frontend.config import FrontendConfig
from serving.frontend.generation.attempt import Attempts
from serving.frontend.generation.call import ChoiceRequest
from serving.frontend.generation.kv_transfer import KvTransfer
from serving.frontend.models import Models
from serving.frontend.prepared import PreparedPrompt
from serving.life import DisaggregationConfig
from serving.life.terms import Terms
from serving.model.card import Bootstrap, ModelType
from serving.router import RouterConfig
from serving.routing.service import RouterService, RouterServiceConfig
from serving.runtime.address import EndpointAddress
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime, Endpoint
from serving.runtime.messages import CallError
from serving.runtime.server import GeneratorService
from serving.worker.protocol import StopConditions
from serving.worker.registration import register_llm
from tests.support.waiting import in_time, until_async

MODEL = "apart"
CACHED = 3
"""Tokens that a worker which prefills had cached, as it says."""


def answer(prompt, count, num_generated=0):
    """Return the model's answer: it depends on the prompt, and goes on where another worker left off."""
    said = len(prompt) - num_generated
    first = sum(prompt[:said])
    return [100 + (first + place) % 50 for place in range(num_generated, num_generated + count)]


class World:
    """Where KV is, and which rooms are waited in: what all workers share."""

    def __init__(self):
        self.kv = {}
        """By its id: the tokens it was computed for. Whoever reads it takes it away."""
        self.rooms = {}
        self.ids = itertools.count()

    def room(self, number):
        return self.rooms.setdefault(number, asyncio.get_running_loop().create_future())


class Worker:
    """One worker; what it was asked is in `asked`, and `gate` holds up what it does."""

    def __init__(self, world, runtime, role):
        self.world, self.runtime, self.role = world, runtime, role
        self.asked = []
        self.num_local = 0
        self.num_running = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.pause_after = None
        """Tokens after which it waits at the gate, once that is shut."""
        self.error = None
        self.says = {}
        """What it says in the place of the truth at the end of a prefill."""

    @property
    def id(self):
        return self.runtime.instance_id

    async def generate(self, request):
        self.asked.append(request)
        self.num_running += 1
        try:
            if self.pause_after is None:
                await self.gate.wait()
            if self.error is not None:
                raise self.error
            params = request.get("kv_transfer_params") or {}
            say = self._prefill if params.get("do_remote_decode") else self._decode
            async for item in say(request, params):
                yield item
        finally:
            self.num_running -= 1

    async def _prefill(self, request, params):
        assert not params["do_remote_prefill"]
        assert request["stop_conditions"]["max_tokens"] == 1
        room, id = params.get("bootstrap_room"), next(self.world.ids)
        yield {"token_ids": [7]}
        if room is not None:
            self.world.room(room).set_result(request["token_ids"])
            told = {}
        else:
            self.world.kv[id] = request["token_ids"]
            told = {"kv_transfer_params": {"do_remote_prefill": True, "do_remote_decode": False, "kv": id}}
        end = {"finish_reason": "length", "cached_tokens": CACHED, "times": {"admitted": 0.001, "prefill_end": 0.002}}
        yield {"token_ids": [], **end, **told, **self.says}
        while request["is_held"] and (told | self.says).get("kv_transfer_params") and id in self.world.kv:
            await asyncio.sleep(0.001)

    async def _decode(self, request, params):
        tokens = request["token_ids"]
        if not params:
            self.num_local += 1
        elif "bootstrap_room" in params:
            assert await self.world.room(params["bootstrap_room"]) == tokens
        elif (found := self.world.kv.pop(params["kv"], None)) != tokens:
            raise CallError(f"KV of {found} where that of {tokens} was expected", "engine")
        limit = request["stop_conditions"]["max_tokens"]
        for place, token in enumerate(answer(tokens, limit, request["num_generated"])):
            if place == self.pause_after:
                await self.gate.wait()
            yield {"token_ids": [token]}
        yield {"finish_reason": "length", "cached_tokens": 1000, "times": {"transfer_start": 0.1, "transfer_end": 0.2}}


class Site:
    """A network in a folder, with one frontend's models on it."""

    def __init__(self, folder, stack, **settings):
        self._config = RuntimeConfig(etcd_endpoints="", nats_server="", discovery_dir=str(folder))
        self._stack = stack
        self._settings = settings
        self.world = World()
        self.workers = []

    async def join(self):
        return await self._stack.enter_async_context(await DistributedRuntime.connect(self._config, drain_s=0.0))

    async def start(self):
        names = [name for name in ("router_mode", "namespace") if name in self._settings]
        config = FrontendConfig(**{"router_mode": "kv"} | {name: self._settings.pop(name) for name in names})
        self.models = Models(await self.join(), config, RouterConfig(), DisaggregationConfig(**self._settings))
        await self.models.start()
        self._stack.push_async_callback(self.models.close)
        return self

    async def worker(self, role, *, component=None, has_room=False, is_needed=False, **registered):
        """Start a worker; it is there once the frontend can route to it, perhaps only when another pool is there, too."""
        runtime = await self.join()
        made = Worker(self.world, runtime, role)
        self.workers.append(made)
        address = EndpointAddress("test", component or ("prefill" if role == "prefill" else "backend"))
        bootstrap = Bootstrap({"bootstrap_host": f"host-{runtime.instance_id}"}, is_needed) if has_room else None
        endpoint = Endpoint(runtime, address)
        await register_llm(
            ModelType.Backend,
            endpoint,
            "",
            MODEL,
            role=role,
            bootstrap=bootstrap,
            **{"kv_cache_block_size": 4} | registered,
        )
        await runtime.serve(address, GeneratorService(made.generate))
        return made

    async def router(self, component):
        """Start a router of its own in front of the workers of a component, in a namespace of its own."""
        runtime = await self.join()
        places = {"workers": f"dyn://test.{component}.generate", "endpoint": f"dyn://routers.{component}.generate"}
        running = asyncio.create_task(RouterService(runtime, RouterServiceConfig(**places), RouterConfig()).run())

        async def stop():
            runtime.stopping.set()
            await running

        self._stack.push_async_callback(stop)
        return runtime.instance_id

    @property
    def model(self):
        return self.models.get(MODEL)

    async def until_there(self, *workers):
        """Wait until the frontend can route to these workers."""
        ids = {f"{worker.id:x}" for worker in workers}
        await until_async(lambda: ids <= self.models.instances())

    def attempts(self, tokens, *, limit=0, instance_id=None, sampling=None, params=None, **conditions):
        request = ChoiceRequest(
            prompt=PreparedPrompt(tokens, 4),
            conditions=StopConditions(**{"max_tokens": 5} | conditions),
            sampling=sampling or {},
            eos_token_ids=[2],
            request_id="r",
            instance_id=instance_id,
            kv_transfer=None if params is None else KvTransfer.of(params),
        )
        stages, is_pinned = self.model.stages, instance_id is not None
        terms = Terms(limit, stages.config, is_pinned=is_pinned, is_whole=params is not None)
        return Attempts.begin(stages, request, terms)

    def num_booked(self):
        """Return what is left in the books of all routers."""
        books = [books for pool in self.models._pools.values() for _, books in pool.books()]
        return sum(book.num_requests + book.prefill_tokens + book.decode_blocks for book in books)


async def tokens_of(attempts):
    """Read an answer to its end; return its tokens and all that was said."""
    tokens, outputs = [], []
    try:
        while True:
            output = await attempts.take()
            tokens += output.tokens
            outputs.append(output)
            if output.finish_reason:
                return tokens, outputs
    finally:
        attempts.close()


def on_site(folder, talk, **settings):
    """Run a test on a network of its own; whatever it did, nothing stays booked or at work."""

    async def main():
        async with AsyncExitStack() as stack, in_time():
            site = await Site(folder, stack, **settings).start()
            await talk(site)
            await until_async(lambda: not site.num_booked())
            await until_async(lambda: not any(worker.num_running for worker in site.workers))

    asyncio.run(main())
