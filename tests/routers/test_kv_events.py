"""vLLM's router follows the KV events of stand-ins: it knows what each has cached, whoever asked for it."""

import itertools
import json

import httpx

from tests.routers.fleet import MODEL, needs, stand_ins
from tests.routers.routers import VLLM
from tests.support.servers import free_port
from tests.support.waiting import until

WORDS = ("alpha", "beta", "gamma")


def publishing(port):
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
    return ("--kv-events-config", json.dumps(events))


def sources(workers, ports):
    yield from ("--policy", "kv_aware", "--kv-event-model", MODEL, "--kv-event-block-size", "16")
    for worker, port in zip(workers, ports, strict=True):
        yield from ("--kv-event-source", f"{worker.url}=tcp://127.0.0.1:{port}")


def ask(url, text):
    asked = {"model": MODEL, "prompt": text * 100, "max_tokens": 2}
    assert httpx.post(f"{url}/v1/completions", json=asked).status_code == 200


def hits_by_events(url, workers, attempt):
    """Have each worker cache a prompt of its own, which the router does not see; send all to the router; return the hits."""
    texts = [f"{word} {attempt:02} " for word in WORDS]
    for worker, text in zip(workers, texts, strict=True):
        ask(worker.url, text)
    before = [worker.num_hits for worker in workers]
    for text in texts:
        ask(url, text)
    return [worker.num_hits - earlier for worker, earlier in zip(workers, before, strict=True)]


@needs("vllm-router")
def test_a_prompt_goes_to_the_worker_that_has_cached_it_for_others(tmp_path):
    """Attempt by attempt: events that came before the router had subscribed, or that are still on their way, help nobody."""
    ports = [free_port() for _ in WORDS]
    attempts = itertools.count()
    with (
        stand_ins(*map(publishing, ports)) as workers,
        VLLM.in_front_of(workers, tmp_path, *sources(workers, ports)) as url,
    ):
        all_found = [((len(word) + 4) * 100 - 1) // 16 * 16 for word in WORDS]  # the last token is always computed
        until(lambda: hits_by_events(url, workers, next(attempts)) == all_found)
