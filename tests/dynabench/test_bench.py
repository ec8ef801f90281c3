"""Endpoints are measured at each load, and loads are chosen by what came of those before."""

import asyncio
import itertools
import json
import math
import os
import re
import signal
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from dynabench.arm import Arm, Settings
from dynabench.benchmark import endpoint, run
from dynabench.benchmark.climb import Climb, Tried
from dynabench.benchmark.run import Asked, run_bench
from dynabench.benchmark.sample import unsteady
from dynabench.benchmark.settings import BenchClientConfig, BenchConfig, SentConfig
from dynabench.benchmark.workload import Requests, Talks
from dynabench.experiment.settings import ExperimentConfig
from dynabench.fidelity.measured_loads import read_loads
from dynabench.live.enough import Enough, width
from dynabench.live.known_server import MODEL
from dynabench.live.load import LoadGenerator
from dynabench.live.run import measure
from dynabench.live.selftest import known_server
from dynabench.live.settings import SelftestConfig
from dynabench.live.timeline import Timeline
from dynabench.terminal import Terminal
from foundation.errors import UserError
from reports import folder
from reports.sweep import report
from tests.support import commands
from tests.support.strange_server import DONE, EVENT, FINISH, HEAD, chunk, says, strange_server, usage
from workloads import Request, Workload, WorkloadError
from workloads.pacing import LoadConfig
from workloads.shape import ShapeConfig
from workloads.synthesize import SynthConfig, synthesize


def loads(throughput, most_met=None, **settings):
    """Return the loads that a climb tries, in their order."""
    climb = Climb((1, 1024), is_range=True, is_whole=True, **settings)
    tried = []
    while (load := climb.next()) is not None:
        tried.append(load)
        climb.learn(Tried(load, throughput(load), None if most_met is None else load <= most_met))
        assert len(tried) < 20
    return tried


def saturating(load):
    return min(40 * load, 1300)


def test_a_climb_goes_up_in_large_steps_and_then_closer_to_the_knee():
    assert loads(saturating) == [1, 4, 16, 64, 128, 32, 23]


def test_a_climb_goes_closer_to_the_last_load_within_the_limits_too():
    assert loads(saturating, 24) == [1, 4, 16, 64, 128, 32, 23, 27, 25]
    assert loads(saturating, 24, seeks="limits") == [1, 4, 16, 64, 32, 23, 27, 25]
    assert loads(saturating, 24, seeks="limits", closeness=0.5) == [1, 4, 16, 64, 32, 23]


def test_a_climb_ends_where_nothing_is_answered_or_the_range_ends():
    assert loads(lambda _: 0) == [1]
    assert loads(lambda load: 40 * load)[:6] == [1, 4, 16, 64, 256, 1024]


def test_a_climb_goes_closer_to_where_loads_stop_being_valid():
    assert loads(lambda load: 40 * load if load <= 8 else 0) == [1, 4, 16, 8, 11, 6]


def test_a_climb_within_limits_goes_on_below_a_miss_where_nothing_is_known():
    climb = Climb((1, 1024), is_range=True, is_whole=True, seeks="limits")
    tried = []
    while (load := climb.next()) is not None:
        tried.append(load)
        climb.learn(Tried(load, load, None if load < 4 else load <= 5))
    assert tried == [1, 4, 16, 8, 6, 5]
    climb = Climb((1, 1024), is_range=True, is_whole=True, seeks="limits")
    while (load := climb.next()) is not None:
        climb.learn(Tried(load, load, None if load <= 5 else False))
    assert [each.load for each in climb.tried] == [1, 4, 5, 6, 8, 16]


def test_a_load_counts_longer_if_that_makes_its_limits_known(url, tmp_path, capsys):
    slow = asked(url, out=tmp_path / "b", slo=("ttft.p95 <= 60s",), concurrency="1", duration_s=0.2)
    _, _, found = run_bench(slow, console=Terminal())
    assert found.points[0].state == "met"
    assert found.points[0].requests >= 72
    assert "concurrency 1: too few requests to know the limits; again for 1 s" in capsys.readouterr().out
    never = asked(url, out=tmp_path / "c", slo=("ttft.p99 <= 60s",), concurrency="1")
    _, _, found = run_bench(never, console=Terminal())
    assert found.points[0].state == "unknown"
    assert "again" not in capsys.readouterr().out


def test_a_climb_ends_where_loads_cannot_come_closer():
    climb = Climb((1, 50), is_range=True, is_whole=False, seeks="limits", closeness=0.0001)
    tried = []
    while (load := climb.next()) is not None:
        tried.append(load)
        climb.learn(Tried(load, load, load <= 9.998))
        assert len(tried) < 30
    assert len(set(tried)) == len(tried)


def test_a_list_is_tried_in_its_order():
    climb = Climb((8, 2), is_range=False, is_whole=True)
    assert climb.next() == 8
    climb.learn(Tried(8, 0, None))
    assert climb.next() == 2
    climb.learn(Tried(2, 1, None))
    assert climb.next() is None


@pytest.mark.parametrize(
    ("settings", "axis", "values", "is_range"),
    [
        ({}, "concurrency", (1, 1024), True),
        ({"concurrency": "1,4,16"}, "concurrency", (1, 4, 16), False),
        ({"concurrency": "2..64"}, "concurrency", (2, 64), True),
        ({"rate": "0.5..50"}, "rate", (0.5, 50), True),
        ({"find": "rate"}, "rate", (0, math.inf), True),
    ],
)
def test_loads_are_lists_or_ranges(settings, axis, values, is_range):
    found = BenchConfig(**settings).loads
    assert (found.axis, tuple(found.values), found.is_range) == (axis, values, is_range)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"concurrency": "1,x"}, "concurrency has 'x'; expected whole numbers from 1 on"),
        ({"concurrency": "1.5"}, "concurrency has '1.5'; expected whole numbers from 1 on"),
        ({"rate": "0,1"}, "rate has '0'; expected numbers greater than 0"),
        ({"rate": "1,inf"}, "rate has 'inf'"),
        ({"concurrency": "8..4"}, "expected the lower end first"),
        ({"concurrency": "4,4"}, "has a value twice"),
        ({"concurrency": "4", "rate": "1"}, "concurrency and rate cannot be combined"),
        ({"find": "rate", "concurrency": "1..4"}, "find is rate, but the loads are given as another"),
        ({"find": "rate", "rate": "1,2"}, "expected a range such as 1..64, in which find searches"),
        ({"model": ("a", "a")}, "model is given twice: a"),
    ],
)
def test_loads_that_are_not_understood_are_refused(settings, why):
    with pytest.raises(ValueError, match=why.replace(".", r"\.").replace("(", r"\(")):
        BenchConfig(**settings)


def timeline(count, e2e_s, span_s):
    """Return the log of requests that were sent evenly, and took one of two times in turn."""
    log = Timeline(count)
    for number in range(count):
        log.intended_s[number] = log.sent_s[number] = number * span_s / count
        took = e2e_s[number % 2]
        log.first_token_s[number] = log.intended_s[number] + took / 2
        log.done_s[number] = log.intended_s[number] + took
    return log


def test_a_load_is_done_after_its_time_or_sooner_if_its_means_are_precise():
    load = LoadConfig(measure_s=50)
    few, many = timeline(50, (0.5, 0.6), 5), timeline(200, (0.5, 0.6), 5)
    assert not Enough(6, 0.05).is_reached(few, load, 5.0)
    assert Enough(6, 0.05).is_reached(few, load, 6.0)
    assert Enough(6, 0.05).is_reached(many, load, 5.0)
    assert not Enough(6, 0).is_reached(many, load, 5.0)


def test_a_load_lasts_several_times_as_long_as_its_requests_but_not_forever():
    slow = timeline(200, (3.0, 4.0), 50)
    assert not Enough(6, 0.05).is_reached(slow, LoadConfig(measure_s=50), 9.0)
    assert Enough(6, 0.05).is_reached(slow, LoadConfig(measure_s=50), 11.0)
    assert Enough(6, 0.05).is_reached(slow, LoadConfig(measure_s=8), 8.0)
    assert not Enough(6, 0.05).is_reached(Timeline(3), LoadConfig(measure_s=10), 9.0)


def test_the_width_of_an_interval_is_that_of_the_means_of_blocks():
    assert width(np.ones(100)) == 0
    drifting = np.repeat(np.arange(1.0, 11.0), 10)  # neighbours are alike, so there are ten values, not a hundred
    assert width(drifting) == pytest.approx(2.262 * drifting.std() * math.sqrt(10 / 9) / math.sqrt(10) / 5.5, rel=1e-3)


def test_requests_are_enough_for_the_time_of_a_load():
    requests = Requests((), SentConfig(isl=30, osl=4), ExperimentConfig(), ShapeConfig())
    closed = requests.of(LoadConfig(concurrency=8, warmup_s=1, measure_s=4), None, 16.0).workload
    assert len(closed) == 5 * 16 * 1.3 + 8
    assert {(one.input_length, one.output_length) for one in closed} == {(30, 4)}
    opened = requests.of(LoadConfig(warmup_s=1, measure_s=4), 20.0, 0.0).workload
    assert len(opened) == 101
    assert opened.columns.arrival_s[-1] == pytest.approx(5, rel=0.5)
    assert requests.name == "30 tokens in, 4 out"


def test_streams_of_conversations_are_sessions_and_rates_are_those_of_conversations():
    requests = Requests((), SentConfig(turns=4, think_time_s=2.0), ExperimentConfig(), ShapeConfig())
    assert requests.name == "512 tokens in, 128 out, up to 4 turns with 2 s between them"
    assert requests.talks.load(8, measure_s=4.0) == LoadConfig(session_concurrency=8, measure_s=4.0)
    assert requests.talks.lasts_s(1.0) == 4 * 1.0 + 3 * 2.0
    opened = requests.of(LoadConfig(warmup_s=1, measure_s=4), 20.0, 0.0).workload
    assert len(opened) == (1 + 4) * 20 * 4 + 4
    assert len({request.session for request in opened if not request.after}) > 5 * 20
    assert Requests((), SentConfig(), ExperimentConfig(), ShapeConfig()).talks.load(8) == LoadConfig(concurrency=8)


def test_sessions_of_a_file_are_conversations_if_their_turns_wait():
    def talks(**second):
        return Talks.of(
            Workload(
                "w", 1, [Request(0, 1, 1, (0,), "a"), Request(0, 1, 1, (1,), "b"), Request(1, 1, 1, (2,), **second)]
            )
        )

    assert talks(session="a", after=(0,), delay_s=3.0) == Talks(1.5, 3.0)
    assert talks(session="a") == talks(after=(0,)) == Talks(1, 0)


@pytest.fixture(scope="module")
def url():
    with known_server(SelftestConfig(ttft_ms=4, itl_ms=1)) as address:
        yield address


def asked(*urls, out, slo=(), client=(), shape=(), **config):
    config = BenchConfig(**{"concurrency": "1,2", "duration_s": 0.1, "precision": 0} | config)
    experiment = ExperimentConfig(out=out, slo=slo)
    return Asked(
        urls=urls, given=(), config=config, sent=SentConfig(isl=16, osl=4), shape=ShapeConfig(**dict(shape)), experiment=experiment,
        client=BenchClientConfig(**dict(client)),
    )  # fmt: skip


def test_each_load_is_measured_and_kept_as_a_results_folder(url, tmp_path):
    out, manifest, found = run_bench(asked(url, out=tmp_path / "b", slo=("ttft.p50 <= 60s",)), console=Terminal())
    assert [point.changes for point in found.points] == [{"concurrency": 1}, {"concurrency": 2}]
    assert all(point.failed == 0 and point.requests > 0 for point in found.points)
    assert all(point.throughput.window_output_tokens_per_s > 0 for point in found.points)
    assert manifest["head"]["Server"] == f"{url}, model {MODEL} (dynabench), prompts as token ids"
    assert found.verdict.startswith("The limits hold at every load tried, up to 2 streams")
    assert [(each.line, each.axis, each.load, each.missed_at) for each in found.found] == [("", "concurrency", 2, None)]
    assert all(outcome.interval[0] <= outcome.value <= outcome.interval[1] for outcome in found.points[0].outcomes)
    kept, runs = folder.read(out / "runs" / "concurrency-2")
    assert len(runs[0].measured.requests) == found.points[1].requests
    assert kept["arms"] == {"concurrency 2": {"concurrency": 2}}
    assert report.is_complete(out)
    assert "What does throughput cost?" in (out / "report.html").read_text()


def test_a_load_stays_until_all_that_counts_is_answered(tmp_path):
    with known_server(SelftestConfig(ttft_ms=300, itl_ms=1)) as slow:
        out, _, _ = run_bench(asked(slow, out=tmp_path / "b", concurrency="4", duration_s=0.6), console=Terminal())
    _, (run,) = folder.read(out / "runs" / "concurrency-4")
    requests = run.requests
    counted = requests.is_measured
    assert requests.succeeded[counted].all()
    after = requests.sent_s > requests.intended_s[counted].max()
    assert after.any()  # they were sent, and answered, while the last that count were still in flight
    assert requests.sent_s[after].min() < requests.done_s[counted].max()


def test_a_complete_benchmark_is_not_measured_again_and_an_interrupted_one_is_continued(url, tmp_path):
    first = asked(url, out=tmp_path / "b")
    out, _, before = run_bench(first, console=Terminal())
    with pytest.raises(UserError, match="has a benchmark that is complete"):
        run_bench(first, console=Terminal())
    (out / "sweep.json").unlink()  # as if it had been interrupted after its last load
    removed, kept = sorted((out / "points").iterdir())
    removed.unlink()
    written = kept.stat().st_mtime_ns
    _, _, after = run_bench(first, console=Terminal())
    assert [point.name for point in after.points] == [point.name for point in before.points]
    assert removed.exists()
    assert kept.stat().st_mtime_ns == written


def test_an_interrupted_benchmark_is_only_continued_as_it_began(url, tmp_path):
    first = asked(url, out=tmp_path / "b", concurrency="1")
    run_bench(first, console=Terminal())
    (tmp_path / "b" / "sweep.json").unlink()
    for other in (replace(first, sent=SentConfig(isl=17, osl=4)), replace(first, shape=ShapeConfig(osl_scale=2))):
        with pytest.raises(UserError, match="contains another bench"):
            run_bench(other, console=Terminal())


def test_loads_for_which_there_is_no_time_are_not_tried_and_named(url, tmp_path, monkeypatch):
    monkeypatch.setattr(run._Line, "expected_s", lambda line, load: 1e9)
    _, _, found = run_bench(asked(url, out=tmp_path / "b", concurrency="1,2", within_s=60), console=Terminal())
    assert [point.changes for point in found.points] == [{"concurrency": 1}]
    assert found.verdict.endswith("There was no time left for concurrency 2 (--within-s).")


def test_a_first_load_without_enough_answers_in_time_is_named(url, tmp_path):
    with pytest.raises(
        UserError, match=r"no time for concurrency 1: it had not enough answers after --within-s 0\.001"
    ):
        run_bench(asked(url, out=tmp_path / "b", within_s=0.001), console=Terminal())


def stops_in(every):
    """Make the behaviour of a server each of whose last answers of so many stops in the middle."""
    numbers = itertools.count(1)

    async def answer(reader, writer):
        writer.write(HEAD + chunk(EVENT))
        await asyncio.sleep(0.001)
        if next(numbers) % every == 0:
            await reader.read()
        writer.write(chunk(EVENT) + chunk(FINISH + usage(16, 2) + DONE) + b"0\r\n\r\n")
        await writer.drain()

    return answer


def test_a_request_that_stops_in_the_middle_has_failed_when_the_time_is_over(tmp_path):
    few = asked(
        "", out=tmp_path / "b", concurrency="2", duration_s=2, within_s=3, model=("m",), client={"timeout_s": 600.0}
    )
    with strange_server(stops_in(40)) as url:
        _, _, found = run_bench(replace(few, urls=(url,)), console=Terminal())
    (point,) = found.points
    assert point.failed == 2
    assert "most often with: no answer when the time was over" in found.verdict
    assert not list((tmp_path / "b" / "points").iterdir())


def test_the_time_for_all_loads_may_differ_when_a_benchmark_is_continued(url, tmp_path):
    run_bench(asked(url, out=tmp_path / "b", within_s=60), console=Terminal())
    (tmp_path / "b" / "sweep.json").unlink()  # as if it had been interrupted after its last load
    _, _, found = run_bench(asked(url, out=tmp_path / "b"), console=Terminal())
    assert len(found.points) == 2


@pytest.mark.parametrize("after", [3, 100])
def test_ctrl_c_in_the_first_load_keeps_its_answers_if_they_are_enough(url, tmp_path, monkeypatch, capsys, after):
    ended = LoadGenerator._on_end

    def on_end(generator, call, now):
        ended(generator, call, now)
        if generator.timeline.num_ended == after and generator._enough is not None:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(LoadGenerator, "_on_end", on_end)
    first = asked(url, out=tmp_path / "b", duration_s=60)
    if after == 3:
        with pytest.raises(KeyboardInterrupt, match="before the first load had enough answers; nothing was written"):
            run_bench(first, console=Terminal())
        return
    _, _, found = run_bench(first, console=Terminal())
    assert [point.name for point in found.points] == ["concurrency 1"]
    assert not found.is_complete
    assert not list((tmp_path / "b" / "points").iterdir())  # it is measured again


def test_several_endpoints_take_turns(url, tmp_path):
    other = url.replace("127.0.0.1", "localhost")
    _, _, found = run_bench(asked(url, other, out=tmp_path / "b"), console=Terminal())
    names = [address.partition("://")[2] for address in (url, other)]
    assert [point.changes for point in found.points] == [
        {"endpoint": name, "concurrency": load} for load in (1, 2) for name in names
    ]
    assert "Highest throughput: " in found.verdict


def test_no_two_loads_share_a_folder():
    names = [
        run._file_name(Arm(f"model {model}, concurrency 1", Settings(), {"model": model}))
        for model in ("a/b", "a-b", "..")
    ]
    assert len(set(names)) == 3
    assert all("/" not in name and name not in (".", "..") for name in names)
    assert run._file_name(Arm("concurrency 2", Settings(), {"concurrency": 2})) == "concurrency-2"


def test_a_stream_plays_one_conversation_after_another(url, tmp_path):
    talks = replace(asked(url, out=tmp_path / "b", concurrency="2"), sent=SentConfig(isl=8, osl=2, turns=3, requests=9))
    out, _, _ = run_bench(talks, console=Terminal())
    manifest, [record] = folder.read(out / "runs" / "concurrency-2")
    assert manifest["load"]["session_concurrency"] == 2
    requests = record.requests
    again = synthesize(msgspec.convert(manifest["workload"]["synth"], SynthConfig))
    waits = [(number, again[number].after) for number in requests.request.tolist() if again[number].after]
    assert len(waits) > 2
    for number, [before] in waits:
        place, earlier = (int(np.flatnonzero(requests.request == each)[0]) for each in (number, before))
        assert requests.sent_s[place] >= requests.done_s[earlier]
    in_flight = [int(((requests.sent_s <= at) & (requests.done_s > at)).sum()) for at in requests.sent_s.tolist()]
    assert max(in_flight) <= 2
    assert [load.load.session_concurrency for load in read_loads((out / "runs" / "concurrency-2",))] == [2]


def test_a_benchmark_of_conversations_says_whose_answers_they_repeat(url, tmp_path, capsys):
    talks = asked(url, out=tmp_path / "b", concurrency="1", client={"history": "server", "api": "chat"})
    _, _, found = run_bench(replace(talks, sent=SentConfig(isl=8, osl=2, turns=3)), console=Terminal())
    assert [point.failed for point in found.points] == [0]
    assert re.search(r"concurrency 1: later turns repeated \d+ answers of the server", capsys.readouterr().out)


def test_a_benchmark_says_which_words_of_a_file_it_does_not_send(url, tmp_path, capsys):
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}) + "\n")
    _, manifest, _ = run_bench(
        replace(asked(url, out=tmp_path / "b", concurrency="1"), given=(file,)), console=Terminal()
    )
    said = "1 chat of chats.jsonl is sent as token ids of the same length; --prompts chat sends their words"
    assert said in capsys.readouterr().out.replace("\n", " ")
    assert said in manifest["subtitle"]


def test_a_history_without_turns_is_refused_before_anything_is_sent(url, tmp_path):
    client = {"history": "server", "api": "chat"}
    with pytest.raises(WorkloadError, match=r"no request waits for an earlier one of its session.*bench: --turns 4"):
        run_bench(asked(url, out=tmp_path / "b", client=client), console=Terminal())


def test_rates_are_loads_too(url, tmp_path):
    _, _, found = run_bench(asked(url, out=tmp_path / "b", concurrency="", rate="40,80"), console=Terminal())
    assert [point.name for point in found.points] == ["rate 40", "rate 80"]


MODELS = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"


def says_models(body):
    """Make the behaviour of a server that answers everything with its models."""

    async def answer(reader, writer):
        writer.write(MODELS % (len(body), body))
        await writer.drain()

    return answer


@pytest.mark.parametrize(
    ("body", "model", "why"),
    [
        (b'{"data": [{"id": "a"}, {"id": "b"}]}', (), r"lists 2 models \(a and b\); choose with --model"),
        (b'{"data": []}', (), "lists no models; choose with --model"),
        (b'{"data": [{"id": "a"}]}', ("c",), "does not list c; it lists a"),
        (b"<html>", (), "does not list models .*; name the model with --model"),
    ],
)
def test_an_endpoint_without_one_model_is_refused(body, model, why):
    with strange_server(says_models(body)) as address, pytest.raises(UserError, match=why):
        endpoint.find(address, model, BenchClientConfig().at(address), None)


def test_an_endpoint_that_refuses_every_form_of_prompts_is_refused_with_its_reasons(tmp_path):
    with (
        strange_server(says_models(b'{"data": [{"id": "a"}]}')) as address,
        pytest.raises(UserError, match=r"as token ids: .*; prompts as text: .*; prompts as text to chat: "),
    ):
        run_bench(asked(address, out=tmp_path / "b"), console=Terminal())


def test_an_endpoint_that_errs_now_and_then_can_be_measured(tmp_path):
    numbers = itertools.count(1)

    async def answer(reader, writer):
        if next(numbers) % 3 == 0:
            writer.write(b"HTTP/1.1 500 No\r\nconnection: close\r\ncontent-length: 4\r\n\r\nboom")
        else:
            writer.write(HEAD + chunk(EVENT) + chunk(FINISH + usage(16, 1) + DONE) + b"0\r\n\r\n")
        await writer.drain()

    with strange_server(answer) as address:
        first = asked(address, out=tmp_path / "b", model=("m",), concurrency="1", client={"max_failed_share": 0.5})
        _, manifest, found = run_bench(first, console=Terminal())
    assert re.search(
        r"; 1 of 3 requests failed before the first load, one with: HTTP 500: boom$", manifest["head"]["Server"]
    )
    assert found.points[0].requests > found.points[0].failed > 0


def test_a_benchmark_says_once_that_the_counts_of_a_server_are_unusable(tmp_path, capsys):
    with strange_server(says(EVENT, EVENT, FINISH + usage(16, -7) + DONE)) as address:
        run_bench(asked(address, out=tmp_path / "b", model=("m",)), console=Terminal())
    assert capsys.readouterr().out.replace("\n", " ").count("so the server's counts are unusable: ") == 1


def test_the_command_measures_an_endpoint(url, tmp_path):
    words = ["--concurrency", "1,2", "--duration-s", "0.1", "--precision", "0", "--isl", "16", "--osl", "4", "--json"]
    done = commands.dynabench("bench", url, *words, "--out", "b", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert [row[0] for row in said["summary"]["rows"]] == ["1", "2"]
    assert said["summary"]["title"] == "Every load"
    assert "Every load" in done.stderr
    nobody = commands.dynabench("bench", "http://127.0.0.1:9", cwd=tmp_path)
    assert (nobody.returncode, nobody.stdout) == (2, "asking http://127.0.0.1:9\n")
    assert nobody.stderr.startswith("dynabench: no server responds at http://127.0.0.1:9")


def test_the_highest_load_within_the_limits_can_fail_the_command(url, tmp_path):
    fixed = ["--concurrency", "1,2", "--duration-s", "0.3", "--isl", "16", "--osl", "4", "--slo", "ttft.p50 <= 60s"]
    for limit, code, state in (("found < 2", 0, "passed"), ("found < 3", 1, "failed")):
        out = tmp_path / str(code)
        done = commands.dynabench("bench", url, *fixed, "--fail-if", limit, "--out", out, "--json")
        assert done.returncode == code, done.stderr
        content = json.loads(done.stdout)
        assert [gate["state"] for gate in content["gates"]] == [state]
        assert [each["load"] for each in content["summary"]["found"]] == [2]
    refused = commands.dynabench("bench", url, *fixed[:-2], "--fail-if", "found < 2", "--out", tmp_path / "c")
    assert (refused.returncode, "a benchmark with --slo" in refused.stderr) == (2, True)


def test_a_load_is_measured_again_with_more_processes_if_the_client_could_not_keep_up(
    url, tmp_path, monkeypatch, capsys
):
    seen = []

    def measured(run, workload, **options):
        client = run.settings.client
        seen.append(client.clients)
        alone = replace(run.settings, client=replace(client, clients=1))
        record = measure(replace(run, arm=replace(run.arm, settings=alone)), workload, **options)
        return replace(record, notes=("the client used 95% of a core",)) if client.clients == 1 else record

    monkeypatch.setattr("dynabench.benchmark.run.measure", measured)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    _, _, found = run_bench(asked(url, out=tmp_path / "b"), console=Terminal())
    assert seen == [1, 2, 1, 2]
    assert [point.notes for point in found.points] == [[], []]
    assert "concurrency 1: the client could not keep up; again with 2 processes" in capsys.readouterr().out
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    _, _, found = run_bench(asked(url, out=tmp_path / "c"), console=Terminal())
    assert found.verdict.count("Not valid at ") == 2


def test_limits_on_tokens_are_refused_where_answers_have_none(url, tmp_path):
    refused = asked(f"{url}/v1/embeddings", out=tmp_path / "b", slo=("ttft.p50 <= 1s",))
    with pytest.raises(UserError, match="answers of embeddings have none; expected a limit on e2e"):
        run_bench(refused, console=Terminal())


@pytest.mark.parametrize(
    "words",
    [
        ["--header", "x-tenant: a"],
        ["--metrics-url", "http://127.0.0.1:1/metrics"],
        ["--extra-body", '{"temperature": 0}'],
        ["--prompts", "text"],
        ["--no-server-metrics"],
    ],
)
def test_settings_of_the_client_apply_to_each_endpoint(url, tmp_path, words):
    quick = ["--concurrency", "1", "--duration-s", "0.05", "--precision", "0", "--osl", "2", "--isl", "8"]
    done = commands.dynabench("bench", url, *quick, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--insecure"], "insecure applies to certificates"),
        (["--proxy", "x"], "proxy"),
        (["--metrics-url", "ftp://x"], "metrics_url must begin with http"),
        (["--api", "embeddings", "--history", "server"], "history is 'server'"),
    ],
)
def test_settings_of_the_client_that_do_not_go_with_an_endpoint_are_refused(url, tmp_path, words, why):
    done = commands.dynabench("bench", url, *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert why in done.stderr


def test_an_endpoint_is_given_once(url, tmp_path):
    with pytest.raises(UserError, match="an endpoint is given twice"):
        run_bench(asked(url, url, out=tmp_path / "b"), console=Terminal())


def test_prompts_that_would_be_cut_are_refused():
    with pytest.raises(ValueError, match="prompts have 200000 tokens, more than max_isl 131072"):
        SentConfig(isl=200_000)


REDIRECT = b"HTTP/1.1 302 Found\r\nlocation: %s\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def test_headers_are_not_sent_to_where_a_server_redirects(url):
    async def answer(reader, writer):
        writer.write(REDIRECT % f"{url}/v1/models".encode())
        await writer.drain()

    with strange_server(answer) as address, pytest.raises(UserError, match=r"does not list models \(HTTP 302\)"):
        endpoint.find(address, (), BenchClientConfig().at(address), None)


def test_loads_that_fail_decide_nothing_and_end_the_climb(url, tmp_path, monkeypatch):
    def measured(run, workload, **options):
        record = measure(run, workload, **options)
        return replace(record, notes=("5 of 9 requests failed",)) if run.settings.load.concurrency > 1 else record

    monkeypatch.setattr("dynabench.benchmark.run.measure", measured)
    _, _, found = run_bench(asked(url, out=tmp_path / "b", concurrency="1..64"), console=Terminal())
    assert [point.name for point in found.points] == ["concurrency 1", "concurrency 2", "concurrency 4"]
    assert [row[:2] for row in found.rows] == [["1", "yes"], ["2", "no"], ["4", "no"]]
    assert found.verdict.startswith("1 stream: ")
    assert "Not valid at concurrency 4: 5 of 9 requests failed." in found.verdict


def test_a_calibration_leaves_out_loads_that_are_not_valid_and_names_them(url, tmp_path, monkeypatch, capsys):
    def measured(run, workload, **options):
        record = measure(run, workload, **options)
        return replace(record, notes=("5 of 9 requests failed",) * (run.settings.load.concurrency > 1))

    monkeypatch.setattr("dynabench.benchmark.run.measure", measured)
    out, _, _ = run_bench(asked(url, out=tmp_path / "b"), console=Terminal())
    assert [load.load.concurrency for load in read_loads((out,))] == [1]
    said = capsys.readouterr().err
    assert "concurrency 2 is left out, because it is not valid: 5 of 9 requests failed" in said
    with pytest.raises(UserError, match="no run is valid"):
        read_loads((out / "runs" / "concurrency-2",))


@pytest.mark.parametrize(("seconds", "is_said"), [(2.5, False), (0.4, True)])
def test_a_load_that_lasts_as_long_as_the_default_is_never_too_short(url, tmp_path, seconds, is_said):
    out, _, _ = run_bench(asked(url, out=tmp_path / "b", concurrency="1"), console=Terminal())
    _, [record] = folder.read(out / "runs" / "concurrency-1")
    requests = record.requests
    took = float(np.percentile(np.asarray(requests.done_s - requests.intended_s), 90))
    sent = requests.intended_s[0] + np.linspace(0, max(seconds - 1, seconds / 2) * took, len(requests))
    shifted = replace(requests, intended_s=sent, done_s=sent + took, is_measured=np.ones(len(requests), bool))
    assert bool(unsteady(replace(record, requests=shifted))) is is_said
