"""How answers end: forced to a length, or by EOS; on both clocks, and in what is reported."""

import asyncio
import json

import msgspec
import pytest
import uvloop

from dynabench.arm import ClientConfig, Run, Settings
from dynabench.live.bodies import Bodies, MeasuredServer
from dynabench.live.clients import Order, send_all
from dynabench.live.known_server import MODEL
from dynabench.live.models import reported_context
from dynabench.live.run import measure
from dynabench.live.selftest import known_server
from dynabench.live.settings import SelftestConfig
from reports import folder
from tests.support.commands import dynabench
from tests.support.stacks import running
from tests.support.strange_server import answers, strange_server
from tests.support.waiting import PATIENCE_S
from workloads import Request, Workload
from workloads.pacing import LoadConfig

LENGTHS = (1, 7, 30, 12)


def workload(ends="stop"):
    rows = [Request(0.02 * n, 40, length, (3 * n, 3 * n + 1, 3 * n + 2), ends=ends) for n, length in enumerate(LENGTHS)]
    return Workload("w", 16, rows)


def body(ends, **target):
    one = Workload("w", 64, [Request(0.0, 100, 40, (0, 1), "s", ends=ends)])
    return json.loads(Bodies(MeasuredServer("http://x", "m", **target), 64, "").of(one.requests[0]))


def test_an_answer_that_ends_by_length_is_forced_and_one_that_ends_by_eos_is_not():
    forced, free = body("length", is_ours=True), body("stop", is_ours=True)
    assert (forced["ignore_eos"], forced["max_tokens"]) == (True, 40)
    assert ("ignore_eos" in free, free["max_tokens"]) == (False, 80)
    assert ("stop_after" in forced["nvext"], free["nvext"]["stop_after"]) == (False, 40)
    assert "nvext" not in body("stop")  # others' servers may refuse what they do not know
    assert body("stop", context=150)["max_tokens"] == 45


@pytest.mark.parametrize(("ends", "reason"), [("length", "length"), ("stop", "stop")])
@pytest.mark.parametrize("prompts", ["tokens", "chat"])
def test_the_mocker_ends_answers_as_planned(stack, ends, reason, prompts):
    target = MeasuredServer(stack.url, stack.model, prompts, is_ours=True)
    order = Order(workload(ends), target, LoadConfig(), "", PATIENCE_S)

    async def send():
        return await send_all(order, num_clients=1, stop=asyncio.Event())

    columns = uvloop.run(send()).requests
    assert columns.error.tolist() == [""] * 4
    assert columns.osl.tolist() == list(LENGTHS)
    assert columns.finish_reason.tolist() == [reason] * 4


@pytest.fixture(scope="module")
def stack():
    with running(num_workers=1) as stack:
        yield stack


def test_an_endpoint_says_how_much_its_models_hold():
    with known_server(SelftestConfig()) as url:
        assert uvloop.run(reported_context(MeasuredServer(url, MODEL))) == 1 << 20
        assert uvloop.run(reported_context(MeasuredServer(url, "another"))) is None
    assert uvloop.run(reported_context(MeasuredServer(url, MODEL))) is None  # nobody is there any more


def test_an_endpoint_that_knows_no_list_of_models_is_sent_whole_limits():
    seen = []
    with strange_server(answers, seen) as url:
        measure(Run.alone(Settings(client=ClientConfig(url=url))), workload())
    assert [(one["max_tokens"], "ignore_eos" in one) for one in seen] == [(2 * length, False) for length in LENGTHS]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "w.jsonl"
    rows = [msgspec.json.encode(request).decode() for request in workload("length")]
    path.write_text("\n".join(['{"schema": "dynabench.workload/1", "block_size": 16}', *rows]) + "\n")
    return path


def test_the_results_of_a_live_run_say_how_answers_ended(trace, tmp_path):
    out = tmp_path / "x"
    done = dynabench(
        "run", trace, "--ends", "stop", "--router-mode", "kv", "--speedup-ratio", "20", "--http-port", "0", "--out", out
    )
    assert done.returncode == 0, done.stderr
    experiment, (run,) = folder.read(out)
    assert (run.requests.osl.tolist(), run.requests.finish_reason.tolist()) == (list(LENGTHS), ["stop"] * 4)
    assert experiment["workload"]["ends"] == {"stop": 4}
    assert json.loads((out / "summary.json").read_text())["arms"]["kv"]["ends"] == {"stop": 4}
    page = (out / "report.html").read_text()
    assert "answers end by EOS (simulated ones at the workload&#39;s lengths)" in page
    assert "answers ended by EOS" in page


def test_how_answers_end_can_be_varied_in_virtual_time(trace, tmp_path):
    out = tmp_path / "x"
    done = dynabench(
        "simulate", trace, "--vary", "ends=length,stop", "--router-mode", "kv", "--jobs", "1", "--out", out
    )
    assert done.returncode == 0, done.stderr
    assert "Answers ended differently: by length in ends length; by EOS in ends stop." in " ".join(done.stdout.split())
    assert [set(run.requests.finish_reason) for run in folder.read(out)[1]] == [{"length"}, {"stop"}]
    assert "how answers end is varied" in (out / "report.html").read_text()
