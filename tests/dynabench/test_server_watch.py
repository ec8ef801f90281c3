"""What a measured server says of itself: its metrics, whatever its software calls them, set beside what the client saw."""

import asyncio
import contextlib
import json
import random
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

from dynabench.arm import ClientConfig, Run, Settings
from dynabench.live import server_watch
from dynabench.live.bodies import MeasuredServer
from dynabench.live.http_client import clock
from dynabench.live.run import measure
from dynabench.live.scrape import ScrapeError, published, values
from dynabench.live.server_names import SERVERS, VLLM
from dynabench.live.server_reading import (
    counts_of,
    gauges,
    growing,
    growth,
    known_names,
    sample_of,
    software_of,
    times_of,
)
from dynabench.live.server_watch import ServerWatch
from reports.record.records import Requests
from serving.stand_in.config import StandInConfig
from tests.support.http_proxy import http_proxy
from tests.support.stand_ins import served_in_thread
from workloads import Request, Workload

RECORDED = Path(__file__).parent.parent / "stand_in" / "vllm_metrics.json"
TEN = Requests.of(
    intended_s=np.zeros(10),
    sent_s=np.zeros(10),
    first_token_s=np.full(10, 0.3),
    last_token_s=np.full(10, 1.0),
    isl=np.full(10, 100),
    osl=np.full(10, 8),
    first_chunk_tokens=np.ones(10, int),
)
"""Ten answers, the first token of each after 300 ms."""


def histogram(name, counts, total, labels=""):
    """Lines of a histogram with these samples in its buckets up to 0.1, 0.4 and any seconds."""
    sums = np.cumsum(counts)
    bounds = ("0.1", "0.4", "+Inf")
    lines = [f'{name}_bucket{{{labels}le="{bound}"}} {value}' for bound, value in zip(bounds, sums, strict=True)]
    return "\n".join(
        [f"# TYPE {name} histogram", *lines, f"{name}_sum{{{labels}}} {total}", f"{name}_count{{{labels}}} {sums[-1]}"]
    )


def vllm(count, *, engine=0, model="m", running=3, ttft_s=0.25, started=1.0):
    """What vLLM says after so many requests."""
    labels = f'engine="{engine}",model_name="{model}"'
    return f"""\
# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{{labels}}} {running}
vllm:num_requests_waiting{{{labels}}} 2.0
vllm:kv_cache_usage_perc{{{labels}}} 0.{engine + 1}
vllm:num_preemptions_total{{{labels}}} {count / 10}
vllm:prefix_cache_queries_total{{{labels}}} {count * 100}
vllm:prefix_cache_hits_total{{{labels}}} {count * 25}
vllm:prompt_tokens_total{{{labels}}} {count * 100}
vllm:generation_tokens_total{{{labels}}} {count * 8}
vllm:request_success_total{{{labels},finished_reason="length"}} {count}
{histogram("vllm:time_to_first_token_seconds", (0, count, 0), count * ttft_s, labels + ",")}
{histogram("vllm:request_queue_time_seconds", (count, 0, 0), count * 0.05, labels + ",")}
process_start_time_seconds {started}
"""


@contextlib.asynccontextmanager
async def serving(says, seen=None):
    """Publish `says[path]` at each path, which may be changed; a number is the status of an answer without it."""

    async def answer(request):
        if seen is not None:
            seen.append((request.path, dict(request.headers)))
        said = says.get(request.path, 404)
        return web.Response(status=said) if isinstance(said, int) else web.Response(text=said)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield "http://127.0.0.1:{}".format(*site._server.sockets[0].getsockname()[1:])
    finally:
        await runner.cleanup()


def watched(before, after, *, requests=TEN, others=None, seen=None, path="/metrics", **target):
    """Return what is known of a server that said one thing before a run, and another after it."""

    async def run():
        says = {path: before} | ({"/others": others[0]} if others else {})
        async with serving(says, seen) as url:
            others_url = (f"{url}/others",) if others else ()
            watch = ServerWatch(MeasuredServer(url, "m", **target), others_url, every_s=0.002)
            async with watch.watching():
                says[path] = after
                if others:
                    says["/others"] = others[1]
                for _ in range(20 * bool(watch._sources)):
                    await asyncio.sleep(0.005)
                    if watch._samples:
                        break
                return await watch.finish(requests, clock())

    return asyncio.run(run())


STAND_IN = StandInConfig(served_model_names=("mock",))


def settings_of(client, **settings):
    """Measure a stand-in."""
    return Settings(client=ClientConfig(url=str(client.base_url).rstrip("/"), **settings))


def test_what_two_engines_added_during_the_run_is_added_up():
    use = watched(vllm(5) + vllm(20, engine=1), vllm(9) + vllm(26, engine=1))
    assert use.software == ("vLLM",)
    assert use.problems == ()
    assert (use.requests, use.preemptions, use.prompt_tokens, use.output_tokens) == (10, 1, 1000, 80)
    assert (use.hit_tokens, use.looked_up_tokens) == (250, 1000)
    sample = use.samples[0]
    assert (sample.running, sample.waiting) == (6, 4)
    assert sample.kv == pytest.approx(0.15)
    ttft = use.times["ttft"]
    assert (ttft.count, ttft.bounds_s, ttft.counts) == (10, (0.1, 0.4), (0, 10, 0))
    assert ttft.mean_s == pytest.approx(0.25)
    assert use.client.answered == 10
    assert use.client.ttft_s == pytest.approx(0.3)
    assert use.client.tpot_s == pytest.approx(0.1)


def test_only_the_measured_model_s_requests_count_if_the_server_says_whose_they_are():
    other = vllm(70, engine=1, model="other")
    use = watched(vllm(0) + vllm(0, engine=1, model="other"), vllm(10) + other)
    assert (use.requests, use.samples[0].running) == (10, 3)
    assert watched(vllm(0, model="other"), vllm(10, model="other")).requests == 10  # it serves it under another name


def test_a_server_that_counts_late_is_given_time():
    async def run():
        says = {"/metrics": vllm(0)}
        async with serving(says) as url:
            watch = ServerWatch(MeasuredServer(url, "m"))
            async with watch.watching():
                asyncio.get_running_loop().call_later(0.05, says.__setitem__, "/metrics", vllm(10))
                return await watch.finish(TEN, clock())

    assert asyncio.run(run()).requests == 10


def test_sglang_s_ranks_say_the_same_and_its_priorities_are_parts():
    rows = """\
sglang:num_running_reqs{model_name="m",priority="",tp_rank="0"} 8
sglang:num_running_reqs{model_name="m",priority="",tp_rank="1"} 8
sglang:num_running_reqs{model_name="m",priority="5",tp_rank="0"} 3
sglang:num_queue_reqs{model_name="m",priority="",tp_rank="0"} 1
sglang:token_usage{model_name="m",priority="",tp_rank="0"} 0.5
# TYPE sglang:cached_tokens_total counter
"""
    counted = 'sglang:prompt_tokens_total{{model_name="m",priority="{}",is_streaming="true"}} {}\n'
    cached = 'sglang:cached_tokens_total{model_name="m",cache_source="device"} 300\n'
    after = rows + counted.format("", 400) + counted.format(5, 600) + cached
    use = watched(rows + counted.format("", 0), after)
    assert use.software == ("SGLang",)
    assert (use.samples[0].running, use.samples[0].waiting, use.samples[0].kv) == (8, 1, 0.5)
    assert (use.hit_tokens, use.looked_up_tokens) == (300, 1000)
    assert watched(rows + counted.format("", 0), rows + counted.format("", 400)).hit_tokens == 0  # never any


def test_a_frontend_s_figures_come_before_its_workers():
    def frontend(count):
        name = "dynamo_frontend_time_to_first_token_seconds"
        return f"{histogram(name, (0, count, 0), count * 0.28)}\ndynamo_frontend_queued_requests 1\n"

    use = watched(frontend(0), frontend(10), others=(vllm(0), vllm(10)))
    assert use.software == ("Dynamo's frontend", "vLLM")
    assert use.times["ttft"].mean_s == pytest.approx(0.28)
    assert use.times["queue"].mean_s == pytest.approx(0.05)
    assert (use.samples[0].waiting, use.samples[0].running) == (1, 3)


def test_our_own_frontend_s_blocks_are_its_use_of_kv():
    rows = 'dynamo_component_kv_active_blocks{rank="0"} 30\ndynamo_component_kv_total_blocks{rank="0"} 120\n'
    assert watched(rows, rows).samples[0].kv == 0.25


def test_llamacpp_has_means_only():
    rows = "llamacpp:tokens_predicted_total {}\nllamacpp:tokens_predicted_seconds_total {}\nllamacpp:requests_processing 2\n"
    use = watched(rows.format(0, 0), rows.format(80, 4))
    assert use.times["itl"].mean_s == pytest.approx(0.05)
    assert use.times["itl"].quantile(0.5) is None
    assert (use.output_tokens, use.samples[0].running) == (80, 2)


def test_tgi_counts_without_total():
    before = histogram("tgi_request_queue_duration", (0, 0, 0), 0)
    after = histogram("tgi_request_queue_duration", (9, 1, 0), 0.5)
    use = watched(f"{before}\ntgi_request_success 0\n", f"{after}\ntgi_request_success 10\ntgi_queue_size 4\n")
    assert use.requests == 10
    assert use.times["queue"].mean_s == pytest.approx(0.05)
    assert use.samples[0].waiting == 4


def test_tensorrt_llm_s_metrics_are_where_its_json_is_not():
    name = "trtllm_time_to_first_token_seconds"
    before, after = histogram(name, (0, 0, 0), 0), histogram(name, (0, 10, 0), 2)
    seen = []
    use = watched(before, after, path="/prometheus/metrics", seen=seen)
    assert use.software == ("TensorRT-LLM",)
    assert use.times["ttft"].mean_s == pytest.approx(0.2)
    assert [path for path, _ in seen[:2]] == ["/metrics", "/prometheus/metrics"]


def test_gpus_are_known_from_exporters():
    rows = """\
DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-a",Hostname="h",pod="x"} 500.5
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a",Hostname="h"} 80
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-a",Hostname="h"} 1024
DCGM_FI_DEV_FB_FREE{gpu="0",UUID="GPU-a",Hostname="h"} 3072
nvidia_smi_power_draw_watts{uuid="b"} 100
"""
    use = watched(vllm(0), vllm(10), others=(rows, rows))
    first, second = use.gpus
    assert (first.name, first.power_w, first.busy) == ("h 0 GPU-a", 500.5, 0.8)
    assert (first.memory_bytes, first.capacity_bytes) == (1 << 30, 1 << 32)
    assert (second.name, second.power_w, second.busy, second.capacity_bytes) == ("b", 100, None, None)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (404, "it answers with status 404"),
        (302, "it answers with status 302"),
        ('[{"iter": 1}]', "has none of Dynamo's frontend, vLLM, SGLang, TensorRT-LLM, llama.cpp and TGI"),
        ("vllm:num_requests_running{ 3", "not in Prometheus's text format"),
        ("", "the answer is empty"),
    ],
)
def test_a_server_without_metrics_is_said_so_in_one_line(said, why):
    use = watched(said, said)
    [problem] = use.problems
    assert problem.startswith("no metrics of the server: http://127.0.0.1:")
    assert why in problem
    assert "\n" not in problem
    assert (use.software, use.samples, use.times) == ((), (), {})


@pytest.mark.parametrize("after", [vllm(10, started=2.0), vllm(3)])
def test_counts_of_another_process_are_not_set_against_each_other(after):
    use = watched(vllm(5), after)
    [problem] = use.problems
    assert "several processes answer at http://127.0.0.1:" in problem
    assert (use.requests, use.times) == (None, {})
    assert use.samples


def test_a_server_that_is_gone_at_the_end_spoils_no_run():
    use = watched(vllm(5), 500)
    assert "at the end: it answers with status 500" in use.problems[0]
    assert use.samples == ()


def test_an_exporter_that_never_answers_is_given_up(monkeypatch):
    monkeypatch.setattr(server_watch, "PATIENCE_S", 0.05)

    async def run():
        async with await asyncio.start_server(lambda *_: asyncio.sleep(30), "127.0.0.1", 0) as server:
            url = "http://127.0.0.1:{}".format(*server.sockets[0].getsockname()[1:])
            watch = ServerWatch(MeasuredServer(url, "m"))
            async with watch.watching():
                return await watch.finish(TEN, clock())

    assert "no answer within" in asyncio.run(run()).problems[0]


def test_a_key_is_sent_to_the_server_and_to_nobody_else():
    seen = []
    watched(vllm(0), vllm(10), others=(vllm(0), vllm(10)), seen=seen, api_key="sk-secret", extra_headers={"x-a": "b"})
    for path, headers in seen:
        sent = {name.lower(): value for name, value in headers.items()}
        assert (sent.get("authorization"), sent.get("x-a")) == (
            ("Bearer sk-secret", "b") if path == "/metrics" else (None, None)
        )


def test_metrics_are_read_through_the_server_s_proxy():
    with http_proxy(asked := []) as proxy:
        use = watched(vllm(0), vllm(10), others=(vllm(0), vllm(10)), seen=(seen := []), proxy=f"http://u:p@{proxy}")
    assert use.software == ("vLLM",)
    assert {path for path, _ in seen} == {"/metrics", "/others"}
    assert all("proxy-authorization: basic dtpw\r\n" in head.lower() for head in asked)
    assert {head.split("/")[3].split()[0] for head in asked} == {"metrics", "others"}


@pytest.mark.parametrize("refusal", [b"HTTP/1.1 407 No\r\nconnection: close\r\ncontent-length: 0\r\n\r\n", b""])
def test_what_is_said_of_a_proxy_has_no_password(refusal):
    with http_proxy([], refusal=refusal or b"\0") as proxy:
        use = watched(vllm(0), vllm(0), proxy=f"http://user:hunter2-hunter2@{proxy}", api_key="sk-hunter3-hunter3")
    [problem] = use.problems
    assert "no metrics of the server" in problem
    assert "hunter" not in problem


def test_a_longer_run_is_sampled_less_often(monkeypatch):
    monkeypatch.setattr(server_watch, "MOST_SAMPLES", 8)
    monkeypatch.setattr(server_watch, "LATE_S", 0.0)

    async def run():
        async with serving({"/metrics": vllm(10)}) as url:
            watch = ServerWatch(MeasuredServer(url, "m"), every_s=0.001)
            async with watch.watching():
                while watch._every_s < 0.004:
                    await asyncio.sleep(0.001)
                return await watch.finish(TEN, clock())

    samples = asyncio.run(run()).samples
    assert 0 < len(samples) < 8
    times = [sample.time_s for sample in samples]
    assert times == sorted(times)


def test_only_whole_names_are_found():
    text = b"vllm:num_requests_running_x 1\nvllm:num_requests_running 2\n# TYPE vllm:a counter\n"
    assert values(text, ["vllm:num_requests_running"]) == {("vllm:num_requests_running", ()): 2}
    assert published(text, ["vllm:a", "vllm:num_requests_running", "vllm:num"]) == {
        "vllm:a",
        "vllm:num_requests_running",
    }
    with pytest.raises(ScrapeError, match="not in Prometheus's text format"):
        values(b"a{ 1", ["a"])


def test_each_name_is_of_the_software_whose_prefix_it_has():
    for name in known_names() - {name for name in known_names() if name.startswith(("DCGM_", "nvidia_smi_"))}:
        assert sum(name.startswith(one.prefix) for one in SERVERS) == 1, name


def test_a_run_against_a_stand_in_for_vllm_keeps_what_it_says():
    requests = Workload("w", 16, [Request(0.0, 32, 8, (2 * number, 2 * number + 1)) for number in range(10)])
    with served_in_thread(STAND_IN) as client:
        record = measure(Run.alone(settings_of(client)), requests)
    use = record.server
    assert use.software == ("vLLM",)
    assert (use.requests, use.times["ttft"].count, use.client.answered) == (10, 10, 10)
    assert use.output_tokens == 80
    assert 0 < use.times["ttft"].mean_s <= use.client.ttft_s


def test_metrics_can_be_left_out():
    with served_in_thread(STAND_IN) as client:
        settings = settings_of(client, server_metrics=False)
        assert measure(Run.alone(settings), Workload("w", 16, [Request(0.0, 32, 2, (0, 1))])).server is None


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"metrics_url": ("http://h",)}, "metrics_url adds to the metrics of another server"),
        ({"metrics_url": ("http://h",), "url": "http://h", "server_metrics": False}, "without --no-server-metrics"),
        ({"metrics_url": ("h:9400",), "url": "http://h"}, "metrics_url must begin with http://"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, why):
    with pytest.raises(ValueError, match=why):
        ClientConfig(**settings)


def test_of_an_exporter_the_host_is_enough():
    assert (
        server_watch.with_path("http://h:9400") == server_watch.with_path("http://h:9400/") == "http://h:9400/metrics"
    )
    assert server_watch.with_path("http://h/x") == "http://h/x"


def test_results_name_exporters_without_their_passwords():
    shown = ClientConfig(url="http://h", metrics_url=("http://me:secret@h:9400",)).shown
    assert "secret" not in str(shown["metrics_url"])


def test_vllm_s_names_are_those_that_a_real_one_publishes():
    """As recorded: the first name of each figure, with the kind that it is read as."""
    families = json.loads(RECORDED.read_text())["default"]
    kinds = {name: family["type"] for name, family in families.items()}
    counted = [*(names[0] for names in VLLM.counts.values()), VLLM.hits[0].part, *VLLM.hits[0].whole]
    assert {kinds[names[0]] for names in VLLM.states.values()} == {"gauge"}
    assert {kinds[names[0]] for names in VLLM.times.values()} == {"histogram"}
    assert {kinds[name.removesuffix("_total")] for name in counted} == {"counter"}


@pytest.mark.parametrize("seed", range(20))
def test_damaged_metrics_are_read_or_refused(seed):
    rng = random.Random(seed)
    for _ in range(10):
        text = bytearray((vllm(5) + vllm(9, engine=1)).encode())
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(text))
            text[place : place + rng.randint(0, 20)] = rng.choice(
                [b"", b"{", b'"', b"le", b"\n", b"1e999", b"\xff", b"-"]
            )
        names = published(bytes(text), known_names())
        software = software_of(names)
        with contextlib.suppress(ScrapeError):
            added = growth({}, values(bytes(text), growing(software))) or {}
            assert all(count >= 0 for count in counts_of(added, software, names).values())
            assert all(one.count >= 0 for one in times_of(added, software).values())
            sample_of(0.0, values(bytes(text), gauges(software, ())), software)
