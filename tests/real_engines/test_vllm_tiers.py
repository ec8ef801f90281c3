"""vLLM with LMCache's server beside it: what the GPU's blocks forgot comes back from host memory, alone and beside NIXL.

"GPU" is what vLLM calls its own blocks, on a CPU, too. Its connectors for host memory refuse to start there, which is tried as well.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from serving.router.events import BlocksRemoved, BlocksStored
from serving.router.hashing import block_hashes, sequence_hashes
from tests.real_engines.serving_vllm import VLLM_FLAGS
from tests.real_engines.test_vllm import tokens
from tests.real_engines.test_vllm_apart import (
    BLOCK,
    Engines,
    apart,
    assert_likeliest,
    items_of,
    prefilled,
    request,
    said,
)
from tests.support.waiting import PATIENCE_S, until

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
    # Without a GPU vLLM's worker copies the KV, not the server, which then does not know the tokens of its events: workers
    # report them where the server keeps no log.
    command += ["--supported-transfer-mode", "engine_driven", "--kv-event-log-size", "0", "--prometheus-port", "0"]
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


@pytest.fixture
def engines(folder):
    made = Engines(folder)
    try:
        yield made
    finally:
        made.close()


def test_vllm_keeps_nothing_in_host_memory_by_itself_without_a_gpu(folder):
    command = [sys.executable, "-m", "serving.vllm", folder, "--", *VLLM_FLAGS, "--kv-offloading-size=0.1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert "CPU Offloading is currently only supported on CUDA-alike and XPU GPUs" in done.stderr.splitlines()[-1]


def test_what_the_gpu_forgot_comes_back_from_host_memory(engines, lmcache):
    engine, told = engines.start("aggregated", *FEW_BLOCKS, lmcache), Told()

    async def follow():
        engine.publish_to([told])

    engines.do(follow())
    first = [engines.do(items_of(engine, request(prompt))) for prompt in PROMPTS]
    again = [engines.do(items_of(engine, request(prompt))) for prompt in PROMPTS]
    assert [items[0]["cached_tokens"] for items in first] == [0] * 4
    assert [items[0]["cached_tokens"] for items in again] == [9 * CHUNK] * 4
    assert [said(items) for items in again] == [said(items) for items in first]
    blocks = [sequence_hashes(block_hashes(np.array(prompt, np.uint32), BLOCK)) for prompt in PROMPTS]
    whole = {block for chain in blocks for block in chain[: 9 * CHUNK // BLOCK]}
    until(lambda: len(kept(told)) == len(whole))
    assert kept(told) == whole  # under the names that the GPU's blocks have
    assert any(isinstance(event, BlocksRemoved) and event.medium == "GPU" for event in told.events)


def kept(told):
    """Return what was said to be in host memory."""
    stored = [event for event in told.events if isinstance(event, BlocksStored) and event.medium == "CPU"]
    return {block for event in stored for block in event.hashes}


def test_a_prefill_worker_hands_over_what_came_from_host_memory(engines, lmcache, reference):
    prefill, decode = engines.start("prefill", *FEW_BLOCKS, lmcache), engines.start("decode", *FEW_BLOCKS, lmcache)
    for prompt in PROMPTS:
        engines.do(apart(prefill, decode, request(prompt)))
    again = engines.do(prefilled(prefill, request(PROMPTS[0])))
    assert again["cached_tokens"] == 9 * CHUNK
    params = {"kv_transfer_params": again["kv_transfer_params"]}
    assert_likeliest(reference, PROMPTS[0], engines.do(items_of(decode, request(PROMPTS[0]) | params)))
    assert decode.load(0).kv_transfers.num_read == 5
