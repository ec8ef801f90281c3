"""A prefill and a decode worker for tests: real mockers and agents, in one process."""

import asyncio
import contextlib
import tempfile
from pathlib import Path

import numpy as np
import uvloop

from mocker import EngineConfig
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from mocker.timing.kv_size import kv_size_of
from serving.engines.kv.exchange import KvExchange
from serving.engines.mock.answers.made_up import answer_tokens
from serving.engines.mock.engine import MockEngine
from serving.engines.mock.kv.handover import hand_over
from serving.engines.mock.kv.passage import KvShape
from serving.engines.mock.stepping import step_together
from serving.life.lease import LeaseConfig
from serving.model.tokenizer import ByteTokenizer
from serving.role import KV_ROLES
from serving.runtime.messages import pack_u32
from serving.runtime.server import AnswerStream
from serving.transfer.config import TransferRunConfig
from serving.worker.protocol import PreprocessedRequest, StopConditions
from tests.support.waiting import in_time, until_async

TOKEN = b"a token that the whole cluster knows"
BLOCK = 4
FAST = TimingConfig(timing="constant", speedup_ratio=20.0)
FIRST = {"do_remote_decode": True, "do_remote_prefill": False}


class Client:
    """A session that only notes what it is sent."""

    def __init__(self):
        self.is_full = False
        self.calls = {}

    def push(self, id, item):
        self.calls[id].items.append(item)

    def finish(self, id, end):
        call = self.calls[id]
        assert call.end is None, "a call ended twice"
        call.end = end


class Call:
    """One call, and what came of it."""

    def __init__(self, client, worker, request):
        self.items, self.end = [], None
        id = len(client.calls)
        client.calls[id] = self
        self.stream = AnswerStream(client, id)
        worker.mocker.submit(request, self.stream)

    @property
    def tokens(self):
        tokens = []
        for item in self.items:
            tokens += item["token_ids"] if isinstance(item, dict) else [item] if isinstance(item, int) else item
        return tokens

    @property
    def is_over(self):
        """Whether it ended, or its client has left."""
        return self.stream.is_over

    def said(self, name):
        return next((item[name] for item in self.items if isinstance(item, dict) and name in item), None)

    async def over(self):
        await until_async(lambda: self.is_over)
        return self


class Worker:
    """One rank, its exchange, and what it takes to look inside."""

    def __init__(self, role, folder, transfer, lease, engine):
        settings = {"block_size": BLOCK, "num_gpu_blocks": 100, "kv_role": KV_ROLES[role]} | engine
        self.role, self.transfer, self.lease = role, transfer, lease
        self.simulated = resolve(EngineConfig(**settings), FAST)
        self.shape = KvShape(kv_size_of(FAST, block_size=BLOCK, kv_bytes_per_token=transfer.kv_bytes_per_token), 1)
        self.exchange = KvExchange(transfer, lambda: TOKEN, folder=folder)
        self.notices = []

    async def start(self):
        await self.exchange.start()
        self.handover = hand_over(self.role, self.exchange, self.shape, self.transfer, self.lease)
        heard = self.exchange.on_notice
        self.exchange.on_notice = lambda notice: (self.notices.append(notice), heard(notice))
        self.mocker = MockEngine(self.simulated, handover=self.handover)
        self._running = asyncio.create_task(step_together([self.mocker]))

    async def close(self):
        if self._running.cancelled():
            return
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self.handover.close()

    @property
    def is_full(self):
        """Whether all blocks are free, and nothing is held, read or waited for."""
        engine, transfers = self.mocker.engine, self.handover.transfers()
        idle = engine.is_idle and not engine.view().num_retained
        return idle and engine.num_free_blocks == engine.num_blocks and not any(transfers[:3])


class Pair:
    """Both workers."""

    def __init__(self, prefill, decode):
        self.prefill, self.decode = prefill, decode
        self.client = Client()
        self.num_rooms = 0

    def ask(self, worker, prompt, max_tokens=1, *, stop_token_ids=(), **more):
        conditions = StopConditions(max_tokens=max_tokens, stop_token_ids=[*stop_token_ids])
        tokens = pack_u32(np.array(prompt, np.uint32))
        more = {"sampling_options": {"seed": 7}} | more
        return Call(self.client, worker, PreprocessedRequest(token_ids=tokens, stop_conditions=conditions, **more))

    async def kv(self, prompt):
        """Let a prompt be computed, and return where its KV is."""
        call = await self.ask(self.prefill, prompt, kv_transfer_params=FIRST).over()
        assert not call.end.error, call.end
        return call.said("kv_transfer_params")

    def answer(self, prompt, max_tokens, kv, **more):
        return self.ask(self.decode, prompt, max_tokens, kv_transfer_params=kv, **more)

    def meet(self, prompt, max_tokens, **more):
        """Call both at once."""
        self.num_rooms += 1
        params = self.prefill.handover.bootstrap.params | {"bootstrap_room": self.num_rooms}
        return (
            self.ask(self.decode, prompt, max_tokens, kv_transfer_params=params | {"do_remote_prefill": True}, **more),
            self.ask(self.prefill, prompt, kv_transfer_params=params | {"do_remote_decode": True}),
        )

    async def at_rest(self):
        await until_async(lambda: self.prefill.is_full and self.decode.is_full)


def expected(prompt, max_tokens):
    """Return the answer of a worker that does all of a request."""
    return answer_tokens(np.array(prompt, np.uint32), 7, 0, max_tokens, ByteTokenizer().speakable())


def with_pair(talk, kind="shm", *, prefill=None, decode=None, lease=None, **transfer):
    """Talk to a prefill and a decode worker; nothing is left of them in the end."""
    transfer = TransferRunConfig(**({"transfer": kind, "transfer_latency_ms": 0.0} | transfer))

    async def main():
        async with in_time(), pair(transfer, LeaseConfig(**(lease or {})), prefill or {}, decode or {}) as both:
            await talk(both)

    uvloop.run(main())


@contextlib.asynccontextmanager
async def pair(transfer, lease, prefill, decode):
    before = asyncio.all_tasks()
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:  # short: sockets' names are
        both = Pair(
            Worker("prefill", Path(folder), transfer, lease, prefill),
            Worker("decode", Path(folder), transfer, lease, decode),
        )
        await both.prefill.start()
        await both.decode.start()
        try:
            yield both
        finally:
            await both.decode.close()
            await both.prefill.close()
    await until_async(lambda: asyncio.all_tasks() <= before)
