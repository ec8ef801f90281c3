"""Workloads of agents against our own frontend: answers that call tools or reason come in parts, not token by token."""

import asyncio
import json

import pyarrow.parquet as pq
import pytest
import uvloop

from dynabench.live.bodies import MeasuredServer
from dynabench.live.clients import Order, send_all
from tests.support import speaking_engine
from tests.support.commands import dynabench
from tests.support.own_engines import serving_engine
from tests.support.waiting import PATIENCE_S
from workloads import Request, Workload
from workloads.pacing import LoadConfig

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
THOUGHT = "<think>\nHm, Rome.\n</think>\nSunny."


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with serving_engine(speaking_engine, tmp_path_factory.mktemp("d"), models=2) as url:
        yield url


def ask(url, text, model, fields=None, **target):
    content = [{"role": "user", "content": text}]
    request = Request(0.0, 4, len(text), (0,), content=content, ends="stop", extra_body=fields)
    target = MeasuredServer(url, model, "chat", is_ours=True, **target)
    order = Order(Workload("w", 64, [request]), target, LoadConfig(), "", PATIENCE_S)

    async def run():
        return await send_all(order, num_clients=1, stop=asyncio.Event())

    return uvloop.run(run())


@pytest.mark.parametrize(
    ("text", "model", "fields", "target", "reason"),
    [
        (f"So. {CALL}", "agent", {"tools": [TOOL]}, {"splits_answers": True}, "tool_calls"),
        (CALL, "agent", None, {"splits_answers": True, "extra_body": {"tools": [TOOL]}}, "tool_calls"),
        (THOUGHT, "agent", None, {"splits_answers": True}, "stop"),
        (THOUGHT, "plain", {"tools": [TOOL]}, {}, "stop"),
        (THOUGHT, "plain", None, {}, "stop"),
    ],
)
def test_an_answer_in_parts_has_the_tokens_that_its_usage_counts(url, text, model, fields, target, reason):
    sent = ask(url, text, model, fields, **target)
    columns = sent.requests
    assert (columns.error[0], columns.osl[0], columns.finish_reason[0]) == ("", len(text), reason)
    assert columns.sent_s[0] <= columns.first_token_s[0] <= columns.last_token_s[0]
    assert sent.facts["tokens"] == len(text)


def test_a_stack_that_does_not_split_answers_loses_no_token_unnoticed(url):
    error = ask(url, THOUGHT, "agent").requests.error[0]
    assert error.endswith(f" tokens arrived of {len(THOUGHT)}")


def test_requests_with_tools_run_against_our_own_stack(tmp_path):
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    first = [{"role": "user", "content": "weather in Rome"}]
    turns = [first, [*first, {"role": "assistant", "content": None, "tool_calls": [call]}]]
    turns[1].append({"role": "tool", "tool_call_id": "c1", "content": "sunny"})
    rows = [
        {"custom_id": "x", "body": {"messages": turn, "max_tokens": 8, "tools": [TOOL] * 20, "temperature": 0}}
        for turn in turns
    ]
    file = tmp_path / "agent.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "x"
    done = dynabench(
        "run", file, "--prompts", "chat", "--workers", "1", "--router-mode", "kv", "--concurrency", "1", "--out", out
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [arm] = json.loads((out / "summary.json").read_text())["arms"].values()
    assert (arm["requests"], arm["failed"]) == (2, 0)
    prompts = [request["isl"] for request in pq.read_table(out / "requests.parquet").to_pylist()]
    assert 20 * 20 < prompts[0] < prompts[1]  # tools, and then a call too, are a part of the prompts
