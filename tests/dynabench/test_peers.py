"""The page that compares load generators, from what `benchmarks/peers.py` measured."""

import asyncio
import json
import urllib.request

from dynabench.live.known_server import MODEL
from dynabench.live.selftest import known_server, measure
from dynabench.live.settings import SelftestConfig
from tests.support.benchmarks import program

peers_page = program("peers_page")
JOBS = [
    {"name": "start-up", "ttft_ms": 0, "itl_ms": 0, "tokens": 2, "requests": 1, "streams": 1, "is_timed": False},
    {
        "name": "64 streams",
        "ttft_ms": 50,
        "itl_ms": 10,
        "tokens": 64,
        "requests": 1000,
        "streams": 64,
        "is_timed": True,
    },
]


def ran(client, job, cpu_s, **more):
    run = {"client": client, "job": job, "wall_s": 2.0, "cpu_s": cpu_s, "requests_per_s": 100.0, "tokens_per_s": 6400.0}
    return run | more


def timed(client, cpu_s, ttft, itl):
    """A run whose server needed 50 and 60 ms for the first token, and 10 ms between two."""
    told, server = {"ttft": ttft, "itl": itl}, {"ttft": [50, 60], "itl": [10, 10]}
    return ran(client, "64 streams", cpu_s, told_ms=told, server_ms=server)


def page(*runs):
    head = {"date": "2026-11-27", "cores": 2, "python": "3.11", "rounds": 1, "jobs": JOBS}
    sizes = {"dynabench": 300.0, "aiperf": 800.0, "vllm": 3000.0}
    return peers_page.page(peers_page.Found(head | {"installed_mb": sizes, "runs": list(runs)}))


def test_the_page_has_costs_without_start_up_and_errors_against_the_servers_stamps():
    text = page(
        ran("dynabench", "start-up", 1.0),
        ran("aiperf", "start-up", 6.0),
        timed("dynabench", 2.0, [50.125, 60.5], [10.0, 10.25]),
        timed("aiperf", 10.0, [52.0, 70.0], [9.5, 10.0]),
    )
    assert "| dynabench | 100 | 6,400 | 1.00 | 1,000 |" in text
    assert "| AIPerf 0.13 | 100 | 6,400 | 4.00 | 250 |" in text
    assert "| dynabench | +0.125 | +0.500 | +0.000 | +0.250 |" in text
    assert "| AIPerf 0.13 | +2.000 | +10.000 | -0.500 | +0.000 |" in text
    assert "- 64 streams: 4.0 times as many requests per CPU second as AIPerf 0.13, the best of the others." in text
    assert "means are within 0.12 ms of the server's own stamps, and p99 within 0.50 ms (within our goal" in text
    assert "| AIPerf 0.13 | 2.0 | 6.0 | 800 |" in text


def test_what_a_client_cannot_do_is_said_where_its_figures_would_be():
    text = page(ran("vllm", "start-up", 6.0), {"client": "vllm", "job": "64 streams", "unable": "it always streams"})
    assert "| `vllm bench serve` 0.32 | it always streams | | | |" in text


def test_what_a_client_says_against_its_own_rounds_is_on_the_page():
    text = page(
        ran("dynabench", "start-up", 1.0),
        timed("dynabench", 2.0, [50, 60], [10, 10]) | {"notes": ["the client was late"]},
        timed("dynabench", 2.0, [50, 60], [10, 10]),
    )
    assert "- dynabench itself calls 1 of 2 rounds not valid: the client was late." in text


def test_rounds_are_a_median_with_their_range():
    assert peers_page.spread([3.0, 1.0, 2.0]) == "2 (1 to 3)"
    assert peers_page.spread([]) == "n/a"


def test_the_known_server_keeps_when_it_wrote_and_counts_whole_answers():
    config = SelftestConfig(ttft_ms=10, itl_ms=2, tokens=4, requests=3, rate=100)
    with known_server(config) as url:
        sent = asyncio.run(measure(url, config))
        body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 2}).encode()
        urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body)).read()
        stamps, counts = (json.loads(urllib.request.urlopen(f"{url}/{name}").read()) for name in ("stamps", "stats"))
    assert (len(stamps["ttft_s"]), len(stamps["itl_s"])) == (3, 3)
    assert min(stamps["ttft_s"]) >= 0.01
    assert min(stamps["itl_s"]) > 0
    assert (counts["requests"], counts["tokens"]) == (4, 14)
    assert sent is not None
