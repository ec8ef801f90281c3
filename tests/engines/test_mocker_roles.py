"""The mocker as a prefill and as a decode worker: what it says of itself, its ranks, and what it gives back."""

import tempfile

import msgspec
import pytest
import uvloop

from mocker import EngineConfig
from serving.engines.mock import Mocker, TimingConfig
from serving.model.files import ModelFiles
from serving.transfer.config import TransferRunConfig
from serving.worker.config import WorkerConfig
from serving.worker.engine import EngineError, HoldingEngine, KvTransfers, TransferringEngine
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
    settings = TransferRunConfig(transfer_memory_mb=2, **transfer)
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
            assert counts.num_bytes == 2 * 15 * 5248
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
