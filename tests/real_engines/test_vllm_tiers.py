"""vLLM with LMCache's server beside it: what the GPU's blocks forgot comes back from host memory, alone and beside NIXL.

vLLM's own connectors refuse to start without a GPU, which is tried here, too.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys

import pytest

from serving.router.events import BlocksRemoved, BlocksStored
from tests.real_engines.test_vllm import tokens
from tests.real_engines.test_vllm_apart import BLOCK, Engines, items_of, request
from tests.support.waiting import until

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # vLLM warns as it is imported
    pytest.mark.skipif(importlib.util.find_spec("lmcache") is None, reason="needs LMCache"),
]
CHUNK = 2 * BLOCK
FEW_BLOCKS = ("--num-gpu-blocks-override=40", "--max-model-len=1024")
PROMPTS = [tokens(f"tier {number}", 9 * CHUNK + 5) for number in range(4)]
"""Two of them fit on the GPU."""


@pytest.fixture(scope="module")
def lmcache(tmp_path_factory):
    """LMCache's server; gives the arguments of vLLM that lead to it."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "lmcache.v1.multiprocess.server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--chunk-size", str(CHUNK), "--l1-size-gb", "0.25", "--eviction-policy", "LRU", "--max-workers", "1"]
    # vLLM's CPU build copies its KV itself; the server would need a device to do it.
    command += ["--supported-transfer-mode", "engine_driven", "--kv-event-log-size", "10000", "--prometheus-port", "0"]
    log = tmp_path_factory.mktemp("lmcache") / "log"
    environment = os.environ | {"LMCACHE_TRACK_USAGE": "false"}
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        until(lambda: "cache server is running..." in log.read_text(), server)
        extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
        config = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        yield f"--kv-transfer-config={json.dumps(config)}"
    finally:
        server.kill()
        server.wait()


class Told:
    """Keeps what an engine publishes."""

    def __init__(self):
        self.events = []

    def publish(self, events):
        self.events += events


@pytest.fixture(scope="module")
def engines(folder, lmcache):
    made = Engines(folder)
    try:
        yield made
    finally:
        made.close()


def test_what_the_gpu_forgot_comes_back_from_host_memory(engines, lmcache, reference):
    engine, told = engines.start("aggregated", *FEW_BLOCKS, lmcache), Told()

    async def follow():
        engine.publish_to([told])

    engines.do(follow())
    first = [engines.do(items_of(engine, request(prompt))) for prompt in PROMPTS]
    again = [engines.do(items_of(engine, request(prompt))) for prompt in PROMPTS]
    assert [items[0]["cached_tokens"] for items in first] == [0] * 4
    assert [items[0]["cached_tokens"] for items in again] == [9 * CHUNK] * 4
    said = [[token for item in items for token in item["token_ids"]] for items in first]
    assert [[token for item in items for token in item["token_ids"]] for items in again] == said
    print(told.events)
    media = {(type(event), event.medium) for event in told.events}
    assert media == {(BlocksStored, "GPU"), (BlocksRemoved, "GPU"), (BlocksStored, "CPU")}
