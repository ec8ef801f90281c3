"""An engine that fails takes none of its requests with it: they end at once, and go on elsewhere."""

import asyncio
import contextlib
import os

import httpx
import pytest
import uvloop

from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from serving.engines.mock.engine import Mocker
from serving.runtime.address import EndpointAddress
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.messages import CallError, pack_u32
from serving.worker.config import WorkerConfig
from serving.worker.loop import serve_engine
from serving.worker.protocol import PreprocessedRequest, StopConditions
from tests.support import warm
from tests.support.commands import DYNAMO_RUN
from tests.support.model import write_model
from tests.support.servers import free_port
from tests.support.waiting import PATIENCE_S, in_time, instances, until_async, wait_for

ADDRESS = EndpointAddress("failing", "backend", "generate")
NEVER_S = 1000.0
"""Longer than any test may take."""

COUNTING = """
import asyncio, os, sys
from pathlib import Path

async def generate(request):
    number = len(request["token_ids"])  # with what was generated elsewhere
    for number in range(number, number + request["stop_conditions"]["max_tokens"]):
        if Path(sys.argv[-1], str(os.getpid())).exists():
            sys.exit("out of order")
        yield {"token_ids": [number % 200]}
        await asyncio.sleep(0.02)
"""
"""An engine whose next token is the number of tokens before it, and which exits once a file has its process's id."""


class FailingMocker(Mocker):
    """A mocker whose scheduler can be broken."""

    def breaks(self):
        def fail(engine):
            raise MemoryError("no memory for this step")

        self.ranks[0]._delivery.send = fail
        self.ranks[0].wake()


def mocker():
    timing = TimingConfig(timing="constant", constant_decode_ms=10.0, constant_prefill_ms=10.0)
    return FailingMocker(WorkerConfig(model_name="mock"), EngineConfig(num_gpu_blocks=100), timing)


@contextlib.asynccontextmanager
async def asked(tmp_path, engine):
    """Serve an engine, and ask it for an answer that does not end; give its worker, its runtime, a client and the answer."""
    config = RuntimeConfig(etcd_endpoints="", nats_server="", discovery_dir=str(tmp_path / "d"))
    worker = WorkerConfig(model_name="mock", endpoint="dyn://failing.backend.generate")
    async with (
        in_time(),
        await DistributedRuntime.connect(config, drain_s=NEVER_S) as runtime,
        await DistributedRuntime.connect(config) as caller,
    ):
        working = asyncio.create_task(serve_engine(runtime, worker, engine))
        client = await caller.client(ADDRESS)
        await client.wait_for_instances()
        request = PreprocessedRequest(token_ids=pack_u32([1, 2, 3]), stop_conditions=StopConditions(max_tokens=1000))
        stream = client.direct(request, runtime.instance_id)
        assert await stream.take()
        yield working, runtime, client, stream


def metric(url, name):
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


async def rest(stream):
    async for _ in stream:
        pass


@pytest.mark.parametrize("is_draining", [False, True], ids=["serving", "draining"])
def test_the_requests_of_an_engine_that_fails_are_lost_at_once_and_so_is_its_worker(tmp_path, is_draining):
    async def main():
        engine = mocker()
        async with asked(tmp_path, engine) as (working, runtime, client, stream):
            if is_draining:
                runtime.stopping.set()
                await until_async(lambda: client.instance_ids() == [])
            engine.breaks()
            with pytest.raises(CallError) as failed:
                await rest(stream)
            assert failed.value.kind == "lost"
            assert client.instance_ids() == []
            with pytest.raises(MemoryError, match="no memory for this step"):
                await working

    uvloop.run(main())


def test_an_engine_that_is_asked_to_end_finishes_what_it_has(tmp_path):
    async def main():
        async with asked(tmp_path, mocker()) as (working, runtime, _, stream):
            runtime.stopping.set()
            await rest(stream)
            await working

    uvloop.run(main())


def test_streams_of_an_own_engine_that_exits_go_on_elsewhere_with_no_token_lost_or_repeated(tmp_path):
    port, model = free_port(), write_model(tmp_path / "tiny")
    (tmp_path / "counting.py").write_text(COUNTING)
    environment = os.environ | {"DYN_DISCOVERY_DIR": str(tmp_path / "d")}
    worker = ["in=dyn://own.backend.generate", f"out=pytok:{tmp_path}/counting.py", model, "--migration-limit", "1"]
    commands = [
        *[[*worker, "--", tmp_path]] * 2,
        ["in=http", "out=dyn", "--http-port", port, "--router-mode", "round-robin"],
    ]
    with (tmp_path / "log").open("w") as log:
        processes = [
            warm.start([DYNAMO_RUN, *map(str, command)], env=environment, stdout=log, stderr=log)
            for command in commands
        ]
    url, body = f"http://127.0.0.1:{port}", {"model": "tiny", "prompt": [0, 1, 2], "max_tokens": 190}
    try:
        wait_for(url, 2)

        async def ask():
            async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
                asked = [asyncio.create_task(client.post(f"{url}/v1/completions", json=body)) for _ in range(4)]
                await until_async(lambda: metric(url, "dynamo_frontend_output_tokens_total") > 40)
                (tmp_path / str(processes[0].pid)).touch()
                return [answer.json() for answer in await asyncio.gather(*asked)]

        answers = asyncio.run(ask())
        assert metric(url, "dynamo_frontend_model_migration_total") == 2
        assert len({answer["choices"][0]["text"] for answer in answers}) == 1
        assert {answer["usage"]["completion_tokens"] for answer in answers} == {190}
        assert processes[0].wait(PATIENCE_S) != 0
        assert len(instances(url)) == 1
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(PATIENCE_S)
