import gzip
import io
import json
import sys
from pathlib import Path

import pytest

from tests.support.commands import run
from workloads import Request, Workload, WorkloadError, formats
from workloads.blocks import estimate_tokens, join_ids, reblocked, split_ids


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def call(t, length, ids, **more):
    return {
        "t": t,
        "type": "n",
        "model": "m",
        "in": length,
        "out": 5,
        "hash_ids": ids,
        "stop": "",
        "api_time": 1.0,
        **more,
    }


def agent(t, *calls, status="completed", duration_ms=None):
    return {
        "t": t,
        "type": "subagent",
        "agent_id": "a",
        "status": status,
        "duration_ms": duration_ms,
        "requests": list(calls),
    }


# As published: a partial last block has no id, a sub-agent's `t` is its end, and the think time behind it counts from
# the last call.
WEKA = {
    "id": "conv", "models": ["m"], "block_size": 64, "hash_id_scope": "local", "tool_tokens": 1, "system_tokens": 1,
    "requests": [
        call(0.0, 130, [1, 2]),
        agent(9.0, call(0.0, 64, [9], think_time=0.0), call(3.0, 130, [9, 10], think_time=2.0), duration_ms=7000),
        agent(6.0, call(0.0, 64, [11], think_time=0.0), duration_ms=4000),
        call(12.0, 200, [1, 2, 3], think_time=11.0),
        call(14.0, 256, [1, 2, 3, 4], think_time=1.0),
    ],
    "totals": {},
}  # fmt: skip
SAMPLES = {
    "agentic-mooncake": lines(
        {"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 16, "hash_id_scope": "local", "source": {"format": "made up", "digest": "1"}},
        {"request_id": "a", "play_id": "p", "session_id": "main", "model": "m", "input_length": 20, "output_length": 3, "hash_ids": [7, 8], "not_before_ms": 0, "dependencies": []},
        {"request_id": "b", "play_id": "p", "session_id": "main", "model": "m", "input_length": 40, "output_length": 3, "hash_ids": [7, 9, 10], "not_before_ms": 0,
         "dependencies": [{"request_id": "a", "trigger": "completion", "delay_ms": 250, "relation": "sequence"}]},
    ),
    "dynamo-trace": lines(
        {"event_type": "request_payload", "request_id": "a"},
        {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": 1790000000500, "request": {"request_id": "a", "output_tokens": 3,
         "request_received_ms": 1790000000000, "total_time_ms": 500, "replay": {"trace_block_size": 16, "input_length": 20, "input_sequence_hashes": [18446744073709551615, 5]}}},
    ),
    "applied-compute": lines(
        {"num_turns": 2, "input_prompt_length": 700, "assistant_response_length": [10, 20], "tool_call_output_length": [300, 600],
         "tool_call_latency": [0.25, 1.5], "final_assistant_response_length": 40}
    ),
    "llmservingsim": lines(
        {"input_toks": 18, "output_toks": 3, "arrival_time_ns": 1500000000, "input_tok_ids": list(range(18)), "output_tok_ids": [1, 2, 3]},
        {"session_id": "task", "arrival_time_ns": 2000000000, "sub_requests": [
            {"input_toks": 20, "output_toks": 4, "tool_duration_ns": 250000000, "input_tok_ids": [*range(16), 9, 9, 9, 9]},
            {"input_toks": 40, "output_toks": 5, "tool_duration_ns": 0, "input_tok_ids": [*range(16), *[9] * 24]}]},
    ),
    "aiperf-export": lines(
        {"metadata": {"session_num": 0, "x_correlation_id": "w", "request_start_ns": 1790000000000000000, "request_end_ns": 1790000000100000000, "benchmark_phase": "warmup"},
         "metrics": {"input_sequence_length": {"value": 9, "unit": "tokens"}, "output_sequence_length": {"value": 2, "unit": "tokens"}}},
        {"metadata": {"session_num": 1, "x_correlation_id": "c", "credit_issued_ns": 1790000001000000000, "request_start_ns": 1790000001250000000, "benchmark_phase": "profiling"},
         "metrics": {"input_sequence_length": {"value": 60, "unit": "tokens"}, "usage_prompt_tokens": {"value": 64, "unit": "tokens"}, "output_sequence_length": {"value": 20, "unit": "tokens"},
                     "time_to_first_token": {"value": 50.0, "unit": "ms"}, "request_latency": {"value": 250.0, "unit": "ms"}, "inter_chunk_latency": {"value": [200.0], "unit": "ms"}}},
        {"metadata": {"session_num": 2, "request_start_ns": 1790000002000000000, "benchmark_phase": "profiling"}, "metrics": {"error_request_count": {"value": 1, "unit": "requests"}},
         "error": {"code": 499, "type": "RequestCancellationError", "message": "cancelled"}},
    ),
    "dynabench": lines(
        {"schema": "dynabench.workload/1", "block_size": 64, "requests": 2},
        {"arrival_s": 0, "input_length": 130, "output_length": 5, "hash_ids": [0, 1, 2], "session": "a"},
        {"arrival_s": 1, "input_length": 64, "output_length": 5, "hash_ids": [0], "session": "a", "after": [0], "delay_s": 2},
    ),
    "mooncake-delta": lines(
        {"session_id": "a", "input_length": 1000, "output_length": 700, "hash_ids": [0, 1], "timestamp": 4000.0, "group_id": 3},
        {"session_id": "a", "input_length": 300, "output_length": 5, "hash_ids": [2], "delay": 500.5},
        {"session_id": "b", "input_length": 1000, "output_length": 700, "hash_ids": [0, 3], "timestamp": 5000.0, "group_id": 3},
        {"session_id": "b", "input_length": 300, "output_length": 5, "hash_ids": [4], "delay": 0.0},
    ),
    "mooncake": lines({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}),
    "mooncake-sessions": lines(
        {"session_id": "a", "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
        {"session_id": "a", "input_length": 700, "output_length": 5, "hash_ids": [0, 2], "delay": 500},
    ),
    "bailian": lines(
        {"chat_id": 7, "parent_chat_id": -1, "timestamp": 61.1, "input_length": 20, "output_length": 3, "type": "text", "turn": 1, "hash_ids": [5, 6]},
        {"chat_id": 9, "parent_chat_id": 7, "timestamp": 71.1, "input_length": 40, "output_length": 3, "type": "text", "turn": 2, "hash_ids": [5, 7, 8]},
    ),
    "dynabench-results": "arm,repeat,request,intended_s,isl,osl,finish_reason,error\n"
    "kv,0,0,3.0,374,44,length,\nkv,0,1,4.5,396,109,stop,\nkv,0,2,5.0,10,0,,lost\nrandom,0,0,3.0,374,44,length,\n",
    "vllm-bench": json.dumps(
        {"backend": "vllm", "request_rate": "inf", "request_throughput": 2.0, "total_input_tokens": 770, "input_lens": [374, 396, 10],
         "output_lens": [44, 109, 0], "start_times": [903.0, 905.5, 906.0], "queue_times": [0.0, 1.0, 0.0], "errors": ["", "", "lost"]}
    ),
    "burstgpt": "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,1,2.0,ChatGPT,472,18,490,Conversation log\n45,1,2.0,ChatGPT,1087,230,1317,Conversation log\n50,2,,GPT-4,10,0,10,API log\n",
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n",
    "openai-batch": lines(
        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 9}}
    ),
    "aiperf-multi": lines({"session_id": "s", "turns": [{"text": "one two three"}, {"text": "four", "delay": 250, "output_length": 7}]}),
    "sharegpt": json.dumps(
        [{"id": "x", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello you"}, {"from": "human", "value": "Bye"}, {"from": "gpt", "value": "So long"}]}]
    ),
    "openai-messages": lines({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}], "max_tokens": 4}),
    "vllm-custom": lines({"prompt": "Tell me", "output_tokens": 12}, {"prompt": "Tell me more"}),
    "dynamo-batch": lines({"text": "Tell me"}),
    "aiperf-single": lines({"text": "a", "timestamp": 1000}, {"text": "b", "timestamp": 3500, "output_length": 3}),
    "weka": json.dumps(WEKA),
}  # fmt: skip


def read(tmp_path, name, text=None, **options):
    file = tmp_path / f"{name}.txt"
    file.write_text(SAMPLES[name] if text is None else text)
    return formats.read(file, **options)


@pytest.mark.parametrize("name", formats.FORMATS)
def test_a_file_is_recognised(tmp_path, name):
    file = tmp_path / "file"
    file.write_text(SAMPLES[name])
    assert formats.detect(file) == name
    packed = tmp_path / "file.gz"
    packed.write_bytes(gzip.compress(SAMPLES[name].encode()))
    assert formats.detect(packed) == name
    workload = formats.read(packed)
    assert workload.requests[0].arrival_s == 0
    for request in workload:
        assert len(request.hash_ids) == -(-request.input_length // workload.block_size)


@pytest.mark.parametrize("name", formats.FORMATS)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_byte_order_mark_before_a_file_changes_nothing(tmp_path, name, suffix):
    marked = SAMPLES[name].encode("utf-8-sig")
    file = tmp_path / f"{name}.txt{suffix}"
    file.write_bytes(gzip.compress(marked) if suffix else marked)
    assert formats.detect(file) == name
    assert formats.read(file).requests == read(tmp_path, name).requests


def test_a_run_of_vllm_bench_gives_its_requests_when_they_came_to_the_client(tmp_path):
    workload = read(tmp_path, "vllm-bench")
    found = [(r.arrival_s, r.input_length, r.output_length) for r in workload]
    assert found == [(0.0, 374, 44), (1.5, 396, 109)]
    assert not workload.knows_prefixes
    assert workload.notes[-1].endswith("left out: 1")


def test_what_vllm_itself_wrote_is_read():
    workload = formats.read(Path(__file__).with_name("vllm-bench-0.32.json"))
    assert (len(workload), sum(request.input_length for request in workload)) == (30, 3016)
    assert {request.output_length for request in workload} == {20}
    assert workload.duration_s == pytest.approx(2.93, abs=0.01)  # 30 requests at 10/s
    assert workload.notes == ("read as vllm-bench",)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"start_times": None}, "start_times must be a list"),
        ({"input_lens": [374]}, "the lists of its requests differ in length"),
        ({"input_lens": [374, 1.5, 10]}, "request 1: input_lens must be a whole number, not 1.5"),
        ({"start_times": [1.0, "x", 2.0]}, "request 1: start_times must be a number, not 'x'"),
    ],
)
def test_a_run_of_vllm_bench_that_is_damaged_is_refused_with_its_place(tmp_path, change, problem):
    with pytest.raises(WorkloadError, match=problem):
        read(tmp_path, "vllm-bench", json.dumps(json.loads(SAMPLES["vllm-bench"]) | change))


def test_a_run_of_vllm_bench_without_details_and_a_second_run_are_refused(tmp_path):
    whole = json.loads(SAMPLES["vllm-bench"])
    brief = {name: value for name, value in whole.items() if name not in ("start_times", "input_lens", "output_lens")}
    with pytest.raises(
        WorkloadError, match="no start_times, input_lens, output_lens; save the run with --save-detailed"
    ):
        read(tmp_path, "vllm-bench", json.dumps(brief))
    with pytest.raises(WorkloadError, match=r"line 2: a second run, .*dynabench workload merge"):
        read(tmp_path, "vllm-bench", lines(whole, whole))


def test_the_requests_of_a_run_of_ours_are_those_of_its_first_arm(tmp_path):
    workload = read(tmp_path, "dynabench-results")
    found = [(r.arrival_s, r.input_length, r.output_length, r.ends) for r in workload]
    assert found == [(0.0, 374, 44, "length"), (1.5, 396, 109, "stop")]
    assert not workload.knows_prefixes
    assert workload.notes[1:] == ("the requests of kv, repeat 0", "rows without prompt or response tokens left out: 1")


def test_sessions_of_mooncake_rows_follow_each_other(tmp_path):
    _, second = read(tmp_path, "mooncake-sessions")
    assert (second.session, second.after, second.delay_s, second.input_length) == ("a", (0,), 0.5, 700)


def test_a_turn_with_a_time_of_its_own_waits_for_nothing(tmp_path):
    rows = lines(
        {"session_id": "a", "input_length": 600, "output_length": 5, "hash_ids": [0, 1], "timestamp": 7000},
        {"session_id": "a", "input_length": 700, "output_length": 5, "hash_ids": [0, 2], "timestamp": 9000},
    )
    assert [(r.arrival_s, r.after) for r in read(tmp_path, "mooncake-sessions", rows)] == [(0.0, ()), (2.0, ())]
    turns = {"turns": [{"text": "one", "timestamp": 0}, {"text": "two", "timestamp": 1500}]}
    assert [(r.arrival_s, r.after) for r in read(tmp_path, "aiperf-multi", lines(turns))] == [(0.0, ()), (1.5, ())]


def test_delta_turns_hold_the_prompts_and_answers_before(tmp_path):
    first, second, other, last = read(tmp_path, "mooncake-delta")
    assert [r.input_length for r in (first, second)] == [1000, 1000 + 700 + 300]
    assert (second.after, second.delay_s, second.arrival_s) == ((0,), 0.5005, 0.0)
    assert second.hash_ids[0] == first.hash_ids[0] == other.hash_ids[0]
    assert len(set(second.hash_ids) & set(first.hash_ids)) == 1  # the second block was half empty
    assert len(second.hash_ids) == 4
    assert set(second.hash_ids) & set(last.hash_ids) == {first.hash_ids[0]}


def test_times_begin_at_the_first_arrival_though_waiting_turns_have_none(tmp_path):
    assert [(r.session, r.arrival_s) for r in read(tmp_path, "mooncake-delta")] == [
        ("a", 0.0),
        ("a", 0.0),
        ("b", 1.0),
        ("b", 1.0),
    ]


def test_bailian_chats_share_a_session_and_16_token_blocks(tmp_path):
    workload = read(tmp_path, "bailian")
    assert workload.block_size == 16
    assert [(r.arrival_s, r.session) for r in workload] == [(0.0, "7"), (pytest.approx(10.0), "7")]


def test_azure_times_have_seven_decimals(tmp_path):
    workload = read(tmp_path, "azure")
    assert workload.requests[1].arrival_s == pytest.approx(4.314579, abs=1e-6)
    assert not set(workload.requests[0].hash_ids) & set(workload.requests[1].hash_ids)


def test_burstgpt_failures_are_left_out(tmp_path):
    assert [(r.arrival_s, r.input_length, r.session) for r in read(tmp_path, "burstgpt")] == [
        (0, 472, "1"),
        (40, 1087, "1"),
    ]


def test_weka_sub_agents_run_beside_each_other_and_the_next_call_waits_for_all(tmp_path):
    first, one, two, one_more, back, last = calls = read(tmp_path, "weka").requests
    assert [r.arrival_s for r in calls] == [0.0, 2.0, 2.0, 5.0, 12.0, 14.0]
    assert [r.after for r in (first, one, two, one_more)] == [(), (0,), (0,), (1,)]
    assert [r.delay_s for r in (one, two, one_more)] == [1.0, 1.0, 2.0]
    assert set(back.after) == {2, 3}
    assert back.delay_s == 3.0  # from the end of the longer one, 9 s, until 12 s
    assert (last.after, last.delay_s) == ((4,), 1.0)
    assert {r.session for r in calls} == {"conv"}


def test_a_weka_sub_agent_that_was_launched_only_is_not_waited_for(tmp_path):
    rows = [
        call(0.0, 64, [1]),
        agent(3.0, call(0.0, 64, [2]), status="async_launched"),
        call(5.0, 64, [1], think_time=4.0),
    ]
    _, side, last = read(tmp_path, "weka", json.dumps(WEKA | {"requests": rows}))
    assert (side.arrival_s, side.after, side.delay_s) == (3.0, (0,), 2.0)
    assert (last.after, last.delay_s) == ((0,), 4.0)


def test_a_weka_conversation_may_begin_with_sub_agents_hold_empty_ones_and_nest_them(tmp_path):
    inner = agent(2.0, call(0.0, 64, [3]), duration_ms=1000)
    rows = [
        agent(9.0, call(0.0, 64, [2]), inner, call(4.0, 64, [2]), duration_ms=9000),
        agent(9.0, duration_ms=100),
        call(10.0, 64, [1]),
    ]
    calls = read(tmp_path, "weka", json.dumps(WEKA | {"requests": rows})).requests
    assert [(r.arrival_s, r.after) for r in calls] == [(0.0, ()), (1.0, (0,)), (4.0, (1,)), (10.0, (2,))]
    assert calls[-1].delay_s == 1.0


def test_a_weka_call_without_output_is_one_of_a_token_and_noted(tmp_path):
    workload = read(tmp_path, "weka", json.dumps(WEKA | {"requests": [call(0.0, 64, [1]) | {"out": 0}]}))
    assert workload.requests[0].output_length == 1
    assert "calls without output, counted as 1 token: 1" in workload.notes


def test_weka_ids_are_local_and_a_partial_block_has_its_own(tmp_path):
    workload = read(tmp_path, "weka", lines(WEKA, WEKA | {"id": "other"}))
    one, two = ([r for r in workload if r.session == name] for name in ("conv", "other"))
    assert one[-1].hash_ids[:2] == one[0].hash_ids[:2]
    assert one[0].hash_ids[2] not in one[-1].hash_ids
    assert not {id for r in one for id in r.hash_ids} & {id for r in two for id in r.hash_ids}


def test_long_conversations_one_a_line_are_lines(tmp_path):
    long = WEKA | {"requests": [call(float(n), 64 * 500, list(range(500))) for n in range(60)]}
    text = lines(long, long | {"id": "other"})
    assert len(text.split("\n")[0]) > 1 << 16
    assert len(read(tmp_path, "weka", text)) == 120
    with pytest.raises(WorkloadError, match=r"line 2, requests\[0\]: in must be at least 1, not -1"):
        read(tmp_path, "weka", lines(long, WEKA | {"requests": [call(0.0, -1, [])]}))


def test_a_conversation_is_its_turns(tmp_path):
    first, second = read(tmp_path, "sharegpt")
    assert [message["role"] for message in second.content] == ["user", "assistant", "user"]
    assert (second.session, second.after) == ("x", (0,))
    assert second.output_length == len(estimate_tokens("So long"))
    first, second = read(tmp_path, "aiperf-multi")
    assert second.input_length > first.input_length + first.output_length - 2
    assert (second.after, second.delay_s, second.output_length) == ((0,), 0.25, 7)


def test_calls_of_functions_are_the_model_s(tmp_path):
    turns = [("human", "Book it"), ("function_call", "book()"), ("observation", "done"), ("gpt", "It is booked")]
    rows = lines({"conversations": [{"from": who, "value": text} for who, text in turns]})
    _, second = read(tmp_path, "sharegpt", rows)
    assert [message["role"] for message in second.content] == ["user", "assistant", "user"]


def test_azure_times_of_2024_have_an_offset_and_some_no_fraction(tmp_path):
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2024-05-12 00:00:00.001500+00:00,10,5\r\n"
        "2024-05-12 02:00:01+02:00,10,5\r\n2024-05-12 00:00:02.5+00:00,10,0\r\n"
    )
    workload = read(tmp_path, "azure", text)
    assert [r.arrival_s for r in workload] == [0.0, pytest.approx(0.9985)]
    assert "rows without prompt or response tokens left out: 1" in workload.notes


def test_burstgpt_s_first_files_have_no_sessions(tmp_path):
    text = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,API log\n"
    assert [(r.input_length, r.session) for r in read(tmp_path, "burstgpt", text)] == [(472, "")]


def test_a_burstgpt_session_of_any_name_is_one_cell(tmp_path):
    names = ["plain", "team,7", 'a "b"']
    buffer = io.BytesIO()
    requests = [Request(float(place), 10, 5, (), name) for place, name in enumerate(names)]
    formats.write(Workload("w", 16, requests), "burstgpt", buffer)
    assert [r.session for r in read(tmp_path, "burstgpt", buffer.getvalue().decode())] == names


def test_bailian_ids_that_name_tokens_only_share_what_has_the_same_start(tmp_path):
    row = {"parent_chat_id": 3, "input_length": 32, "output_length": 1, "timestamp": 0.0}
    one, two = read(
        tmp_path, "bailian", lines(row | {"chat_id": 7, "hash_ids": [1, 5]}, row | {"chat_id": 8, "hash_ids": [2, 5]})
    )
    assert not set(one.hash_ids) & set(two.hash_ids)
    assert one.session == two.session == "3"  # their parent is not in the file


@pytest.mark.parametrize(
    ("prompts", "named"),
    [
        ([[1, 2, 3], [1, 4, 5]], [(1, 2, 3), (1, 4, 5)]),
        ([[1, 2, 1], [1, 2, 5]], [(0, 1, 2), (0, 1, 3)]),  # at two places of one prompt
        ([[1, 2, 3], [2, 3, 4]], [(0, 1, 2), (3, 4, 5)]),  # at two depths
        ([[1, 2, 3], [4, 2, 3]], [(0, 1, 2), (3, 4, 5)]),  # at one depth, behind others
    ],
)
def test_an_id_that_repeats_behind_other_ids_names_another_block(tmp_path, prompts, named):
    row = {"timestamp": 0, "input_length": 48, "output_length": 1}
    (tmp_path / "a.jsonl").write_text(lines(*[row | {"hash_ids": ids} for ids in prompts]))
    workload = formats.read(tmp_path / "a.jsonl", block_size=16)
    assert [request.hash_ids for request in workload] == named
    assert ("an id that follows different ids names different blocks" in workload.notes) == (named[0] != (1, 2, 3))


def test_a_batch_may_hold_chats_and_prompts(tmp_path):
    rows = [
        {"body": {"messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 7}},
        {"body": {"prompt": "Hi"}},
    ]
    chat, prompt = read(tmp_path, "openai-batch", lines(*rows), default_osl=33)
    assert (chat.content, chat.output_length) == ([{"role": "user", "content": "Hi"}], 7)
    assert (prompt.content, prompt.output_length) == ("Hi", 33)


def test_parts_of_a_message_are_read_as_one_text(tmp_path):
    parts = [
        {"type": "text", "text": "What is "},
        {"type": "image_url", "image_url": {}},
        {"type": "text", "text": "this?"},
    ]
    split, whole = (lines({"messages": [{"role": "user", "content": said}]}) for said in (parts, "What is this?"))
    (one,), (other,) = read(tmp_path, "openai-messages", split), read(tmp_path, "openai-messages", whole)
    assert (one.input_length, one.hash_ids) == (other.input_length, other.hash_ids)
    assert one.content == [{"role": "user", "content": parts}]


def test_dynamo_prompts_are_answered_with_as_many_tokens_as_are_asked_for(tmp_path):
    (request,) = read(tmp_path, "dynamo-batch", default_osl=50)
    assert (request.content, request.output_length, request.arrival_s, request.after) == ("Tell me", 50, 0.0, ())


def test_rows_of_an_aiperf_session_follow_each_other(tmp_path):
    rows = lines(
        {"session_id": "s", "text": "one", "timestamp": 500},
        {"text": "of no session", "timestamp": 750, "output_length": 9},
        {"session_id": "s", "texts": ["tw", {"contents": ["o"]}], "delay": 250},
    )
    found = [(r.session, r.after, r.delay_s, r.arrival_s, r.content) for r in read(tmp_path, "aiperf-single", rows)]
    assert found == [
        ("s", (), 0.0, 0.0, "one"),
        ("s", (0,), 0.25, 0.0, "two"),
        ("", (), 0.0, 0.25, "of no session"),
    ]


def test_speakers_that_are_not_named_take_turns(tmp_path):
    rows = lines({"conversations": [{"value": "Hi"}, {"value": "Hello"}, {"content": "Bye"}, {"content": "So long"}]})
    assert [len(request.content) for request in read(tmp_path, "sharegpt", rows)] == [1, 3]


def test_texts_share_blocks_where_they_share_words(tmp_path):
    start = "the same words again and again " * 20
    workload = read(tmp_path, "vllm-custom", lines({"prompt": start + "one"}, {"prompt": start + "two"}))
    one, two = (request.hash_ids for request in workload)
    shared = sum(a == b for a, b in zip(one, two, strict=True))
    assert shared == len(one) - 1
    assert "token counts estimated from the text" in workload.notes
    exact = read(tmp_path, "vllm-custom", encode=lambda text: list(text.encode()))
    assert exact.requests[0].input_length == len("Tell me")


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("mooncake", lines({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": 7}), "line 1: hash_ids must be a list"),
        ("mooncake-sessions", lines({"session_id": "a", "input_length": 600, "output_length": 5, "hash_ids": [1]}), "line 1: 600 tokens in blocks of 512 need 2 hash_ids, not 1"),
        ("bailian", lines({"chat_id": 1, "timestamp": -1, "input_length": 4, "output_length": 1, "hash_ids": [1]}), "timestamp must be at least 0, not -1"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,2\n", "line 2: TIMESTAMP must be a time"),
        ("burstgpt", "Timestamp,Request tokens,Response tokens\n1,x,2\n", "line 2: Request tokens must be a number, not 'x'"),
        ("weka", json.dumps(WEKA | {"requests": [{"agent_id": "x", "type": "subagent"}]}), r"requests\[0\]: requests must be a list of objects"),
        ("weka", json.dumps(WEKA | {"requests": [{"in": 64, "out": 1, "hash_ids": [1, 2, 3]}]}), r"requests\[0\]: 64 tokens in blocks of 64 need 1 hash_ids, not 3"),
        ("openai-batch", lines({"url": "/v1/embeddings", "body": {"input": "x"}}), "line 1: url '/v1/embeddings' is not supported; expected /v1/chat/completions or /v1/completions"),
        ("openai-batch", lines({"url": "/v1/responses", "body": {"input": "x"}}), "line 1: url '/v1/responses' is not supported"),
        ("openai-batch", lines({"body": {"model": "m"}}), "line 1, body: messages or prompt is missing"),
        ("vllm-custom", '{"prompt": "a"}\n{"prompt"\n', "line 2: not JSON"),
        ("sharegpt", "[]", "the format is not recognised"),
        ("mooncake", "hello\n", "neither JSON nor a known CSV"),
    ],
)  # fmt: skip
def test_bad_files_are_refused_with_their_place(tmp_path, name, text, problem):
    with pytest.raises(WorkloadError, match=problem):
        read(tmp_path, name, text)


def written(workload, name):
    buffer = io.BytesIO()
    formats.write(workload, name, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("name", [name for name, format in formats.FORMATS.items() if format.write])
def test_what_is_written_is_read_back(tmp_path, name):
    source = "vllm-custom" if "text" in formats.FORMATS[name].keeps else name
    before = read(tmp_path, source)
    assert formats.lost(before, name) == []
    file = tmp_path / "again"
    file.write_bytes(written(before, name))
    after = formats.read(file, format=name)
    same = ("input_length", "output_length", "session", "after", "delay_s", "arrival_s")
    for one, two in zip(before, after, strict=True):
        for field in same:
            if field != "session" or name != "bailian":  # chats are renumbered
                assert (
                    getattr(one, field) == pytest.approx(getattr(two, field))
                    if field == "arrival_s"
                    else getattr(one, field) == getattr(two, field)
                )
    shared = [[[a == b for b in two.hash_ids] for a in one.hash_ids] for w in (before, after) for one in w for two in w]
    assert shared[: len(shared) // 2] == shared[len(shared) // 2 :]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("dynabench", SAMPLES["dynabench"].replace('"session"', '"priority": 7, "session"')),
        ("mooncake", lines({"timestamp": 0, "input_length": 6, "output_length": 5, "hash_ids": [0], "priority": 7})),
        ("mooncake-sessions", SAMPLES["mooncake-sessions"].replace('"session_id"', '"priority": 7, "session_id"')),
        ("bailian", SAMPLES["bailian"].replace('"chat_id"', '"priority": 7, "chat_id"')),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens,priority\n2023-11-16 18:15:46.6805900,374,44,7\n"),
        ("burstgpt", "Timestamp,Request tokens,Response tokens,priority\n5,472,18,7\n"),
        ("vllm-custom", lines({"prompt": "Tell me", "output_tokens": 12, "priority": 7})),
        ("openai-batch", lines({"body": {"prompt": "Tell me", "priority": 7}})),
    ],
)
def test_what_can_be_written_keeps_priorities(tmp_path, name, text):
    before = read(tmp_path, name, text)
    (tmp_path / "again").write_bytes(written(before, name))
    for workload in (before, formats.read(tmp_path / "again")):
        assert {request.priority for request in workload} == {7}
    assert "priorities" in formats.FORMATS[name].keeps


@pytest.mark.parametrize("name", ["mooncake-delta", "aiperf-single", "openai-messages", "dynamo-batch"])
def test_rows_that_are_only_read_may_have_a_priority(tmp_path, name):
    rows = [json.loads(line) | {"priority": 7} for line in SAMPLES[name].splitlines()]
    assert {request.priority for request in read(tmp_path, name, lines(*rows), format=name)} == {7}


def test_a_log_s_column_of_priorities_is_named_like_others(tmp_path):
    rows = "ts,in,out,class\n0,600,5,3\n1,600,5,\n"
    workload = read(tmp_path, "azure", rows, columns="arrival=ts,input=in,output=out,priority=class")
    assert [request.priority for request in workload] == [3, 0]


@pytest.mark.parametrize("separator", [";", "\t"])
def test_columns_may_be_separated_by_something_else_than_commas(tmp_path, separator):
    text = SAMPLES["burstgpt"].replace(",", separator)
    (tmp_path / "file").write_text(text)
    assert formats.detect(tmp_path / "file") == "burstgpt"
    assert formats.read(tmp_path / "file").requests == read(tmp_path, "burstgpt").requests


def test_a_csv_file_with_only_some_columns_of_a_format_is_not_of_that_format(tmp_path):
    (tmp_path / "file").write_text("Timestamp,My Request tokens,Response tokens\n5,472,18\n")
    with pytest.raises(WorkloadError, match="the format is not recognised"):
        formats.detect(tmp_path / "file")


@pytest.mark.parametrize(
    ("source", "to", "lost"),
    [
        ("bailian", "mooncake", ["sharing in blocks smaller than 512 tokens", "sessions"]),
        ("mooncake-sessions", "mooncake", ["sessions", "turns that wait for answers"]),
        ("weka", "mooncake-sessions", ["requests that wait for several others, or for one other than the turn before"]),
        ("sharegpt", "openai-batch", ["sessions", "turns that wait for answers"]),
        ("aiperf-single", "azure", ["texts"]),
    ],
)
def test_what_a_format_cannot_tell_is_named(tmp_path, source, to, lost):
    assert set(lost) <= set(formats.lost(read(tmp_path, source), to))


def test_texts_cannot_be_made_up(tmp_path):
    with pytest.raises(WorkloadError, match="has no texts"):
        formats.lost(read(tmp_path, "mooncake"), "openai-batch")


def test_blocks_split_and_join_without_loss():
    whole = (3, 8, 9)
    fine = split_ids(whole, 1100, 512, 16)
    assert len(fine) == 69
    assert fine[:32] == split_ids((3,), 512, 512, 16)
    coarse = join_ids(fine, 1100, 16, 512)
    assert len(coarse) == 3
    other = join_ids(split_ids((3, 8, 7), 1100, 512, 16), 1100, 16, 512)
    assert [a == b for a, b in zip(coarse, other, strict=True)] == [True, True, False]
    workload = Workload("w", 512, [Request(0.0, 1100, 1, whole)])
    assert reblocked(reblocked(workload, 64), 512).requests[0].input_length == 1100
    with pytest.raises(WorkloadError, match="neither size divides the other"):
        reblocked(workload, 48)


def test_the_docs_list_every_format_with_what_it_was_tried_on():
    docs = " ".join((Path(__file__).parents[2] / "docs" / "workloads.md").read_text().split())
    for name, format in formats.FORMATS.items():
        how = "read and written" if format.write else "read"
        assert f"- `{name}` ({how}): {format.description}; {format.tried}." in docs, name


def test_formats_are_at_hand_without_numpy_and_its_like():
    heavy = ["joblib", "numpy", "pandas", "pyarrow", "scipy"]
    code = f"import sys, workloads.formats, workloads.shape; print([name for name in {heavy} if name in sys.modules])"
    assert run(sys.executable, "-c", code).stdout == "[]\n"


def test_conversations_of_sharegpt_without_a_request_are_counted(tmp_path):
    said = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]
    file = tmp_path / "x.json"
    file.write_text(json.dumps([{"conversations": turns} for turns in (said, [], said[1:])]))
    workload = formats.read([file])
    assert len(workload) == 1
    assert "conversations without an answer to anything left out: 2" in workload.notes
