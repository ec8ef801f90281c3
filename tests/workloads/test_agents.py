"""Traces of agents, and of requests that wait for others by name."""

import json

import pytest

from tests.workloads.test_formats import SAMPLES, lines, read
from workloads import WorkloadError, formats

HEAD = json.loads(SAMPLES["agentic-mooncake"].splitlines()[0])


def row(name, *waits, play="p", **more):
    """Return a row of agentic Mooncake; `waits` are (name, trigger, delay_ms)."""
    edges = [
        {"request_id": n, "trigger": trigger, "delay_ms": delay, "relation": "sequence"} for n, trigger, delay in waits
    ]
    fixed = {"model": "m", "input_length": 20, "output_length": 3, "hash_ids": [1, 2], "not_before_ms": 0}
    return {"request_id": name, "play_id": play, "session_id": "s", **fixed, "dependencies": edges, **more}


def agentic(tmp_path, *rows):
    return read(tmp_path, "agentic-mooncake", lines(HEAD, *rows))


def waits(workload):
    return [(request.arrival_s, request.after, round(request.delay_s, 6)) for request in workload]


def test_a_request_waits_for_the_end_of_another_and_its_delay(tmp_path):
    workload = read(tmp_path, "agentic-mooncake")
    assert waits(workload) == [(0.0, (), 0.0), (0.0, (0,), 0.25)]
    assert (workload.block_size, workload.requests[1].session) == (16, "p/main")
    assert [a == b for a, b in zip(*(r.hash_ids for r in workload), strict=False)] == [True, False]


def test_a_request_that_is_sent_with_another_waits_for_what_that_one_waits_for(tmp_path):
    rows = (
        row("root", not_before_ms=1000),
        row("beside", ("root", "dispatch", 5)),
        row("next", ("root", "completion", 100)),
        row("child", ("next", "dispatch", 5)),
        row("join", ("next", "completion", 1), ("child", "completion", 1)),
    )
    workload = agentic(tmp_path, *rows)
    root, after_root, child, join, beside = workload
    assert (root.arrival_s, root.after) == (0.0, ())
    assert (beside.arrival_s, beside.after) == (pytest.approx(0.005), ())
    assert (after_root.after, after_root.delay_s) == ((0,), 0.1)
    assert (child.after, child.delay_s) == ((0,), pytest.approx(0.105))
    assert (join.after, join.delay_s) == ((1, 2), 0.001)
    assert workload.notes == ("read as agentic-mooncake",)


def test_rows_may_stand_before_those_they_wait_for(tmp_path):
    workload = agentic(tmp_path, row("late", ("early", "completion", 7)), row("early"))
    assert waits(workload) == [(0.0, (), 0.0), (0.0, (0,), 0.007)]


def test_the_ids_of_a_play_are_its_own(tmp_path):
    one, two, other = (r.hash_ids for r in agentic(tmp_path, row("a"), row("b"), row("c", play="q")))
    assert one == two
    assert not set(one) & set(other)


def test_what_a_workload_cannot_say_of_waits_and_priorities_is_noted(tmp_path):
    rows = (
        row("a", priority=5),
        row("b", strict_priority=1),
        row("c", ("a", "completion", 1), ("b", "completion", 2), not_before_ms=9),
    )
    workload = agentic(tmp_path, *rows)
    assert [request.priority for request in workload] == [-5, 0, 0]
    assert workload.requests[2].delay_s == 0.001
    assert [note.split()[0] for note in workload.notes] == ["read", "priorities,", "requests", "requests", "times"]


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([HEAD | {"version": 1}], "line 1: version must be 2, not 1"),
        ([], "schema must be 'dynamo.agentic_mooncake', not None"),
        ([HEAD | {"hash_id_scope": "global"}], "line 1: hash_id_scope must be 'local', not 'global'"),
        ([HEAD, row("a"), row("a")], "line 3: a second request named 'a'"),
        ([HEAD, row("a", ("b", "completion", 0))], "line 2: waits for 'b', which is not in the file"),
        ([HEAD, row("a", ("b", "completion", 0)), row("b", ("a", "completion", 0))], "requests wait for each other: "),
        ([HEAD, row("a", ("a", "start", 0))], "trigger must be dispatch or completion, not 'start'"),
        ([HEAD, row("a", hash_ids=[1])], "line 2: 20 tokens in blocks of 16 need 2 hash_ids, not 1"),
        ([HEAD, row("a", not_before_ms=1e300)], "line 2: not_before_ms must be at most"),
    ],
)
def test_agentic_rows_that_cannot_be_used_are_refused_with_their_place(tmp_path, rows, problem):
    with pytest.raises(WorkloadError, match=problem):
        read(tmp_path, "agentic-mooncake", lines(*rows) or "[]", format="agentic-mooncake")


@pytest.mark.parametrize("name", ["mooncake", "mooncake-sessions", "mooncake-delta"])
def test_rows_of_version_1_that_wait_by_name_are_refused_not_sent_at_their_time(tmp_path, name):
    rows = [
        json.loads(line) | {"request_id": str(n), "wait_for": ["x"] * n}
        for n, line in enumerate(SAMPLES[name].splitlines() * 2)
    ]
    with pytest.raises(WorkloadError, match="line 2: wait_for belongs to agentic Mooncake version 1"):
        read(tmp_path, name, lines(*rows), format=name)


def end(name, start, total, *, session=None, parent=None, hashes=(1, 2), tokens=3):
    """Return a row of a Dynamo trace: a request from `start` (ms) that took `total` ms."""
    replay = {"trace_block_size": 16, "input_length": 20, "input_sequence_hashes": list(hashes)}
    request = {"request_id": name, "output_tokens": tokens, "request_received_ms": start, "total_time_ms": total}
    context = {"session_id": session} | ({"parent_session_id": parent} if parent else {})
    found = {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "request": request | {"replay": replay}}
    return found | ({"agent_context": context} if session else {})


def tool(source, consumer, child):
    claude = {"source_request_id": source, "consumer_request_id": consumer, "child_session_id": child}
    return {
        "schema": "dynamo.request.trace.v1",
        "event_type": "tool_end",
        "tool": {"tool_call_id": "t", "claude": claude},
    }


def test_requests_without_a_session_arrive_when_they_did(tmp_path):
    workload = read(tmp_path, "dynamo-trace", lines(end("a", 5000, 9), end("b", 5250, 9, hashes=(1, 7))))
    assert waits(workload) == [(0.0, (), 0.0), (0.25, (), 0.0)]
    assert [a == b for a, b in zip(*(r.hash_ids for r in workload), strict=True)] == [True, False]


def test_requests_of_a_session_wait_for_the_one_before_as_they_did(tmp_path):
    rows = [end("a", 1000, 100, session="s"), end("b", 1500, 300, session="s"), end("c", 1600, 10, session="s")]
    assert waits(read(tmp_path, "dynamo-trace", lines(*rows))) == [
        (0.0, (), 0.0),
        (0.5, (0,), 0.4),
        (pytest.approx(0.6), (0,), 0.5),  # sent while b ran, so it did not wait for its end
    ]


def test_a_child_starts_after_a_request_of_its_parent_which_goes_on_after_its_end(tmp_path):
    rows = [
        end("first", 1000, 100, session="p"),
        end("child", 1200, 50, session="c", parent="p"),
        end("child's last", 1300, 200, session="c", parent="p"),
        end("beside", 1400, 10, session="p"),
        end("joins", 1600, 10, session="p"),
    ]
    found = waits(read(tmp_path, "dynamo-trace", lines(*rows)))
    assert [(after, delay) for _, after, delay in found] == [
        ((), 0.0),
        ((0,), 0.1),
        ((1,), 0.05),
        ((0,), 0.3),
        ((3, 2), 0.1),
    ]
    told = waits(read(tmp_path, "dynamo-trace", lines(*rows, tool("first", "beside", "c"))))
    assert told[4][1] == (3,)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([end("a", 0, 1, hashes=(1,))], "20 tokens in blocks of 16 need 2 input_sequence_hashes, not 1"),
        ([end("a", 0, 1, session="p"), end("b", 5, 1, session="c", parent="p"), tool("x", None, "c")], "source_request_id 'x' is not a request of"),
        ([{"schema": "dynamo.request.trace.v1", "event_type": "request_end"}], "request must be an object"),
        ([{"schema": "dynamo.request.trace.v1", "event_type": "tool_end"}], ": no request_end row gives trace_block_size$"),
    ],
)  # fmt: skip
def test_dynamo_traces_that_cannot_be_used_are_refused_with_their_place(tmp_path, rows, problem):
    with pytest.raises(WorkloadError, match=problem):
        read(tmp_path, "dynamo-trace", lines(*rows))


def test_failed_requests_of_a_dynamo_trace_and_other_events_are_counted(tmp_path):
    rows = [
        {"schema": "dynamo.request.trace.v1", "event_type": "request_payload"},
        end("a", 0, 1),
        end("b", 5, 1, tokens=None),
    ]
    assert read(tmp_path, "dynamo-trace", lines(*rows)).notes[1:] == (
        "ignored rows of other events than request_end, tool_end and tool_error: 1",
        "rows without prompt or response tokens left out: 1",
    )


def test_a_child_whose_spawning_request_failed_waits_for_the_one_before_it(tmp_path):
    rows = [
        end("first", 1000, 100, session="p"),
        end("failed", 1150, 10, session="p", tokens=0),
        end("child", 1200, 50, session="c", parent="p"),
        end("next", 1500, 10, session="p"),
        tool("failed", "next", "c"),
    ]
    workload = read(tmp_path, "dynamo-trace", lines(*rows))
    assert [after for _, after, _ in waits(workload)] == [(), (0,), (0, 1)]
    assert workload.notes[1:] == ("rows without prompt or response tokens left out: 1",)


def test_children_of_a_parent_that_has_no_requests_in_the_file_are_counted(tmp_path):
    rows = [
        end("child", 1200, 50, session="c", parent="elsewhere"),
        end("failed", 1100, 9, session="q", tokens=0),
        end("other child", 1300, 50, session="d", parent="q"),
        end("failed child", 1400, 9, session="e", parent="elsewhere", tokens=0),
    ]
    workload = read(tmp_path, "dynamo-trace", lines(*rows))
    assert [request.after for request in workload] == [(), ()]
    assert "sessions whose parent has no requests in the file, sent at their own times: 2" in workload.notes


def test_requests_of_a_dynamo_trace_without_an_end_are_counted(tmp_path):
    row = end("a", 1000, None, session="s")
    timed = end("b", 1500, None, session="s") | {"event_time_unix_ms": 1700}
    workload = read(tmp_path, "dynamo-trace", lines(row, timed, end("c", 1800, 5, session="s")))
    assert [round(delay, 6) for _, _, delay in waits(workload)] == [0.0, 0.5, 0.1]
    assert workload.notes[1:] == (
        "requests without total_time_ms or event_time_unix_ms, assumed to end when they begin: 1",
    )


def test_a_session_of_applied_compute_grows_by_answers_and_tool_results(tmp_path):
    workload = read(tmp_path, "applied-compute")
    assert [(r.input_length, r.output_length) for r in workload] == [(700, 10), (1010, 20), (1630, 40)]
    assert waits(workload) == [(0.0, (), 0.0), (0.0, (0,), 0.25), (0.0, (1,), 1.5)]
    one, two, three = (r.hash_ids for r in workload)
    assert (one[0], two[0]) == (three[0], one[0])
    assert not set(one[1:]) & set(two)  # its last block was not full


def test_answers_of_applied_compute_without_tokens_are_counted(tmp_path):
    change = {"assistant_response_length": [0, 20], "final_assistant_response_length": 0}
    workload = read(tmp_path, "applied-compute", lines(json.loads(SAMPLES["applied-compute"]) | change))
    assert [(r.input_length, r.output_length) for r in workload] == [(700, 1), (1001, 20), (1621, 1)]
    assert "calls without output, counted as 1 token: 2" in workload.notes


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"num_turns": 3}, "line 1: assistant_response_length must be a list of num_turns numbers"),
        ({"tool_call_latency": [0.1, -1]}, "line 1, turn 1: tool_call_latency must be at least 0, not -1"),
        ({"tool_call_output_length": [9_999_999, 1]}, "the session's prompt has grown to 10,000,709 tokens"),
    ],
)
def test_sessions_of_applied_compute_that_cannot_be_used_are_refused(tmp_path, change, problem):
    with pytest.raises(WorkloadError, match=problem):
        read(tmp_path, "applied-compute", lines(json.loads(SAMPLES["applied-compute"]) | change))


def test_token_ids_of_llmservingsim_say_what_prompts_share(tmp_path):
    workload = read(tmp_path, "llmservingsim")
    assert workload.knows_prefixes
    assert [(r.arrival_s, r.after, r.delay_s) for r in workload] == [(0.0, (), 0.0), (0.5, (), 0.0), (0.5, (1,), 0.25)]
    assert len({r.hash_ids[0] for r in workload}) == 1
    assert workload.requests[1].hash_ids[1] not in workload.requests[2].hash_ids


def test_requests_of_llmservingsim_without_token_ids_or_with_others_are_counted(tmp_path):
    rows = [{"input_toks": 40, "output_toks": 3, "arrival_time_ns": 0}]
    rows += [rows[0] | {"input_tok_ids": list(range(count))} for count in (20, 50)]
    workload = read(tmp_path, "llmservingsim", lines(*rows))
    assert not workload.knows_prefixes
    assert [len(r.hash_ids) for r in workload] == [3, 3, 3]
    assert workload.requests[1].hash_ids[0] == workload.requests[2].hash_ids[0]
    assert [note.rpartition(": ")[2] for note in workload.notes[1:]] == ["1", "2"]


def test_a_run_of_aiperf_gives_its_requests_when_they_were_released(tmp_path):
    workload = read(tmp_path, "aiperf-export")
    assert [(r.input_length, r.output_length, r.session) for r in workload] == [(64, 20, "c")]
    assert not workload.knows_prefixes
    assert workload.notes == (
        "read as aiperf-export",
        "requests of the warm-up left out: 1",
        "rows without prompt or response tokens left out: 1",
    )


def test_shards_of_a_dynamo_trace_are_one_workload(tmp_path):
    for number in range(2):
        (tmp_path / f"{number}.jsonl").write_text(lines(end(str(number), 1000 * number, 9)))
    assert [r.arrival_s for r in formats.read([tmp_path / "1.jsonl", tmp_path / "0.jsonl"])] == [0.0, 1.0]
