"""vLLM's router follows the KV events of stand-ins: it knows what each has cached, whoever asked for it."""

import asyncio
import json

import httpx

from tests.routers.fleet import MODEL, needs, stand_ins
from tests.routers.routers import VLLM
from tests.support.servers import free_port
from tests.support.waiting import until

WORDS = ("alpha", "beta", "gamma")


def publishing(port):
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}", "topic": "kv-events"}
    return ("--kv-events-config", json.dumps(events))


def sources(workers, ports):
    yield from ("--policy", "kv_aware", "--kv-event-model", MODEL, "--kv-event-block-size", "16")
    for worker, port in zip(workers, ports, strict=True):
        yield from ("--kv-event-source", f"{worker.url}=tcp://127.0.0.1:{port}")


def ask(url, word):
    asked = {"model": MODEL, "prompt": f"{word} " * 100, "max_tokens": 2}
    assert httpx.post(f"{url}/v1/completions", json=asked).status_code == 200


@needs("vllm-router")
def test_a_prompt_goes_to_the_worker_that_has_cached_it_for_others(tmp_path):
    """The router has seen none of the requests that filled the caches."""
    ports = [free_port() for _ in WORDS]
    with stand_ins(*map(publishing, ports)) as workers, VLLM.in_front_of(workers, tmp_path, *sources(workers, ports)) as url:
        until(lambda: followed(url, workers))
        for worker, word in zip(workers, WORDS, strict=True):
            ask(worker.url, word)
        before = [worker.num_hits for worker in workers]
        until(lambda: asyncio.run(asyncio.sleep(0.5)) is None)
        for word in WORDS:
            ask(url, word)
        found = [worker.num_hits - earlier for worker, earlier in zip(workers, before, strict=True)]
        assert found == [(len(word) + 1) * 100 // 16 * 16 for word in WORDS]


def followed(url, workers):
    return True
