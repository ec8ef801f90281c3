"""The stand-in answers as `vllm serve` did when its answers were recorded: `vllm_answers.json`, by tests/real_engines."""

import asyncio
import contextlib
import importlib.util
import socket
import threading
from pathlib import Path

import httpx
import pytest

from serving.engines.mock import EngineConfig, TimingConfig
from serving.stand_in.config import ApiConfig, HttpConfig, StandInConfig
from serving.stand_in.server import serve
from tests.stand_in import recorded
from tests.stand_in.outlines import ask
from tests.stand_in.vllm_cases import CASES, CONTEXT, DIFFERENT, DIFFERENT_IF_FULL, SERVERS, TEMPLATE

ROOT = Path(__file__).parents[2]
RECORDED = recorded.load()
FULL = ApiConfig(
    enable_prompt_tokens_details=True,
    enable_auto_tool_choice=True,
    tool_call_parser="hermes",
    reasoning_parser="qwen3",
    enable_per_request_metrics=True,
    enable_force_include_usage=True,
    trust_request_chat_template=True,
    chat_template=TEMPLATE,
)
SETTINGS = {
    "plain": {"served_model_names": ("tiny", "other")},
    "full": {
        "served_model_names": ("tiny",),
        "api": FULL,
        "http": HttpConfig(enable_request_id_headers=True),
    },
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    specification = importlib.util.spec_from_file_location("tiny_model", ROOT / "examples" / "tiny_model.py")
    tiny = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(tiny)
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny.make(path)
    return path


@contextlib.contextmanager
def client_of(config):
    """Run a stand-in in a thread; give a client of it."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = "http://{}:{}".format(*listener.getsockname())
    loop, stopping = asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=[serve(config, stopping, listener)])
    thread.start()
    try:
        with httpx.Client(base_url=url, timeout=30) as client:
            yield client
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join()
        loop.close()


@pytest.fixture(scope="module", params=SERVERS)
def server(request, folder):
    policy = "priority" if request.param == "full" else "fcfs"
    engine = EngineConfig(
        block_size=32, num_gpu_blocks=200, max_num_seqs=16, max_model_len=CONTEXT, scheduling_policy=policy
    )
    timing = TimingConfig(speedup_ratio=50.0)
    own = SETTINGS[request.param]
    config = StandInConfig(model=str(folder), model_path=str(folder), engine=engine, timing=timing, **own)
    with client_of(config) as client:
        yield request.param, client


@pytest.mark.parametrize("name", CASES)
def test_a_request_is_answered_as_vllm_answers_it_unless_a_difference_is_known(server, name):
    flags, client = server
    is_different = name in DIFFERENT or (flags == "full" and name in DIFFERENT_IF_FULL)
    assert (ask(client, CASES[name]) == RECORDED[flags][name]) is not is_different
