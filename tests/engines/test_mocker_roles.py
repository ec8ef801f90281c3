"""The mocker as a prefill and as a decode worker: what it says of itself, its ranks, and what it gives back."""

import asyncio
import tempfile
from contextlib import AsyncExitStack

import msgspec
import numpy as np
import pytest
import uvloop

from mocker import EngineConfig
from serving.engines.mock.engine import Mocker, TimingConfig
from serving.model.files import ModelFiles
from serving.model.watch import present_cards
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import CallError, DistributedRuntime
from serving.runtime.messages import pack_u32
from serving.transfer.config import TransferRunConfig
from serving.worker.config import WorkerConfig
from serving.worker.engine import EngineError, HoldingEngine, KvTransfers, TransferringEngine
from serving.worker.loop import serve_engine
from serving.worker.protocol import PreprocessedRequest, StopConditions
from tests.engines.kv_world import FIRST, TOKEN, Pair, expected
from tests.support.waiting import in_time, until_async

ENGINE = EngineConfig(block_size=4, num_gpu_blocks=100, dp_size=2)
PROMPT = list(range(1, 60))


class Served:
    """A mocker that is asked as the runtime asks it."""

    def __init__(self, mocker):
        self.mocker = self
        self._mocker = mocker

    def submit(self, request, stream):
        self._mocker.service(msgspec.Raw(msgspec.msgpack.encode(request)), stream)


async def started(role, **transfer):
    timing = TimingConfig(timing="constant", speedup_ratio=20.0)
    settings = TransferRunConfig(**transfer)
    mocker = Mocker(WorkerConfig(role=role), ENGINE, timing, transfer=settings)
    mocker.transfer_with(lambda: TOKEN)
    await mocker.start(ModelFiles({}))
    mocker.publish_to([])
    return mocker


@pytest.fixture
def short_folder(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield folder


@pytest.mark.parametrize("transfer", ["auto", "shm", "tcp"])
def test_mockers_share_requests_across_their_ranks(short_folder, transfer):
    async def main():
        async with in_time():
            prefill, decode = await started("prefill", transfer=transfer), await started("decode", transfer=transfer)
            pair = Pair(Served(prefill), Served(decode))
            assert decode.traits.bootstrap is None
            first = await pair.ask(pair.prefill, PROMPT, kv_transfer_params=FIRST, dp_rank=1).over()
            kv = first.said("kv_transfer_params")
            assert [prefill.load(rank).kv_transfers.num_held for rank in (0, 1)] == [1, 0]  # the first has the worker's
            assert (await pair.answer(PROMPT, 5, kv, dp_rank=1).over()).tokens == expected(PROMPT, 5)
            params = prefill.traits.bootstrap.params | {"bootstrap_room": 7}
            calls = [
                pair.ask(pair.prefill, PROMPT, kv_transfer_params=params | {"do_remote_decode": True}),
                pair.ask(pair.decode, PROMPT, 5, kv_transfer_params=params | {"do_remote_prefill": True}),
            ]
            assert (await calls[1].over()).tokens == expected(PROMPT, 5)
            await calls[0].over()
            await prefill.released()
            counts = decode.load(0).kv_transfers
            assert (counts.num_read, counts.num_failed, counts.num_loading) == (2, 0, 0)
            assert counts.num_bytes == 2 * 15 * 4 * 131_072
            assert counts.seconds > 0
            await until_async(lambda: not any(prefill.load(rank).kv_active_blocks for rank in (0, 1)))
            await decode.close()
            await prefill.close()

    uvloop.run(main())


def test_a_worker_that_does_all_of_a_request_moves_nothing(short_folder):
    async def main():
        mocker = await started("aggregated")
        pair = Pair(Served(mocker), Served(mocker))
        call = pair.ask(pair.prefill, PROMPT, kv_transfer_params=FIRST)
        assert (call.end.kind, "--role" in call.end.error) == ("invalid", True)
        assert mocker.load(0).kv_transfers == KvTransfers()
        await mocker.released()
        await mocker.close()

    uvloop.run(main())


def test_kv_that_cannot_be_transferred_here_is_told_at_the_start(short_folder):
    async def main():
        with pytest.raises(EngineError, match=r"KV cannot be transferred: .*192\.0\.2\.1"):
            await started("prefill", transfer="tcp", transfer_host="192.0.2.1")

    uvloop.run(main())


def test_the_mocker_has_the_protocols_of_workers_that_share_requests():
    mocker = Mocker(WorkerConfig(), ENGINE)
    assert isinstance(mocker, TransferringEngine)
    assert isinstance(mocker, HoldingEngine)
    assert mocker.calls[0].arguments["config"].kv_role is None
    assert Mocker(WorkerConfig(role="decode"), ENGINE).calls[0].arguments["config"].kv_role == "kv_consumer"


def asked(prompt, max_tokens, params):
    return PreprocessedRequest(
        token_ids=pack_u32(np.array(prompt, np.uint32)),
        stop_conditions=StopConditions(max_tokens=max_tokens),
        sampling_options={"seed": 7},
        kv_transfer_params=params,
    )


async def collect(stream):
    """Return the tokens of an answer, and what else came."""
    tokens, more = [], {}
    async for item in stream:
        tokens += item.get("token_ids", []) if isinstance(item, dict) else [item] if isinstance(item, int) else item
        more |= item if isinstance(item, dict) else {}
    return tokens, more


@pytest.mark.parametrize("is_read", [True, False])
def test_a_prefill_worker_that_drains_waits_for_its_readers(short_folder, tmp_path, is_read):
    async def main():
        async with in_time(), AsyncExitStack() as stack:
            config = RuntimeConfig(discovery_dir=str(tmp_path / "d"), etcd_endpoints="", nats_server="")

            async def join(**options):
                return await stack.enter_async_context(await DistributedRuntime.connect(config, **options))

            async def serve(role, component):
                runtime = await join(drain_s=100.0 if is_read else 0.0)
                worker = WorkerConfig(role=role, endpoint=f"dyn://x.{component}.generate", model_name="m")
                timing = TimingConfig(timing="constant", speedup_ratio=20.0)
                mocker = Mocker(worker, ENGINE, timing, transfer=TransferRunConfig(transfer="tcp"))
                serving = asyncio.create_task(serve_engine(runtime, worker, mocker))
                client = await (await join()).client(worker.address)
                [id] = await client.wait_for_instances()
                return runtime, serving, lambda *request: collect(client.direct(asked(*request), id))

            prefill, prefilling, ask_prefill = await serve("prefill", "prefill")
            decode, decoding, ask_decode = await serve("decode", "backend")
            cards = await present_cards(prefill.discovery)
            assert {(card.role, card.bootstrap is not None) for card in cards} == {("prefill", True), ("decode", False)}
            _, said = await ask_prefill(PROMPT, 1, FIRST)
            prefill.stopping.set()
            if is_read:
                await until_async(lambda: not prefill.num_streams)
                tokens, _ = await ask_decode(PROMPT, 5, said["kv_transfer_params"])
                assert tokens == expected(PROMPT, 5)
            await prefilling
            if not is_read:
                with pytest.raises(CallError, match="the KV of its prompt did not arrive"):
                    await ask_decode(PROMPT, 5, said["kv_transfer_params"])
            decode.stopping.set()
            await decoding

    uvloop.run(main())
