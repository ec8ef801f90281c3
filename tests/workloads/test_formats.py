import gzip
import io
import json

import pytest

from workloads import Request, Workload, WorkloadError, formats
from workloads.blocks import estimate_tokens, join_ids, split_ids


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


WEKA = {
    "id": "conv", "models": ["m"], "block_size": 64, "hash_id_scope": "local", "tool_tokens": 1, "system_tokens": 1,
    "requests": [
        {"t": 0.0, "type": "n", "in": 130, "out": 5, "hash_ids": [1, 2], "api_time": 1.0},
        {"t": 1.5, "type": "subagent", "in": 64, "out": 5, "hash_ids": [9], "api_time": 4.0},
        {"t": 7.0, "type": "s", "in": 192, "out": 5, "hash_ids": [1, 2, 3], "think_time": 0.5},
    ],
}  # fmt: skip
SAMPLES = {
    "mooncake": lines({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}),
    "mooncake-sessions": lines(
        {"session_id": "a", "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
        {"session_id": "a", "input_length": 700, "output_length": 5, "hash_ids": [0, 2], "delay": 500},
    ),
    "bailian": lines(
        {"chat_id": 7, "parent_chat_id": -1, "timestamp": 61.1, "input_length": 20, "output_length": 3, "type": "text", "turn": 1, "hash_ids": [5, 6]},
        {"chat_id": 9, "parent_chat_id": 7, "timestamp": 71.1, "input_length": 40, "output_length": 3, "type": "text", "turn": 2, "hash_ids": [5, 7, 8]},
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


def test_sessions_of_mooncake_rows_follow_each_other(tmp_path):
    _, second = read(tmp_path, "mooncake-sessions")
    assert (second.session, second.after, second.delay_s, second.input_length) == ("a", (0,), 0.5, 700)


def test_delta_rows_add_to_the_last_prompt_and_answer(tmp_path):
    rows = lines(
        {"session_id": "a", "input_length": 1000, "output_length": 24, "hash_ids": [0, 1]},
        {"session_id": "a", "input_length": 300, "output_length": 5, "hash_ids": [2], "delta": True},
    )
    _, second = read(tmp_path, "mooncake-sessions", rows)
    # 1,024 tokens before: two full blocks, of which only the first was full in the first prompt.
    assert (second.input_length, second.hash_ids) == (1324, (0, 1, 2))


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


def test_weka_calls_wait_for_each_other_and_ids_are_local(tmp_path):
    two = [WEKA, WEKA | {"id": "other"}]
    workload = read(tmp_path, "weka", lines(*two))
    first, side, last = workload.requests[0], workload.requests[2], workload.requests[4]
    assert side.after == first.after == ()
    assert (last.after, last.delay_s) == ((0, 2), 0.5)
    assert last.hash_ids[:2] == first.hash_ids[:2]
    assert first.hash_ids[2] not in last.hash_ids  # a partial block without an id is its own
    assert not set(workload.requests[1].hash_ids) & set(first.hash_ids)


def test_a_conversation_is_its_turns(tmp_path):
    first, second = read(tmp_path, "sharegpt")
    assert [message["role"] for message in second.content] == ["user", "assistant", "user"]
    assert (second.session, second.after) == ("x", (0,))
    assert second.output_length == len(estimate_tokens("So long"))
    first, second = read(tmp_path, "aiperf-multi")
    assert second.input_length > first.input_length + first.output_length - 2
    assert (second.after, second.delay_s, second.output_length) == ((0,), 0.25, 7)


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
        ("mooncake", lines({"timestamp": 0, "input_length": 600, "output_length": 5}), "line 1: .*hash_ids"),
        ("mooncake-sessions", lines({"session_id": "a", "input_length": 600, "output_length": 5, "hash_ids": [1]}), "line 1: 600 tokens in blocks of 512 need 2 hash_ids, not 1"),
        ("bailian", lines({"chat_id": 1, "timestamp": -1, "input_length": 4, "output_length": 1, "hash_ids": [1]}), "timestamp must be at least 0, not -1"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,2\n", "line 2: TIMESTAMP must be a time"),
        ("burstgpt", "Timestamp,Request tokens,Response tokens\n1,x,2\n", "line 2: Request tokens must be a number, not 'x'"),
        ("weka", json.dumps(WEKA | {"requests": [{"in": 64, "out": 1, "hash_ids": [1, 2, 3]}]}), r"requests\[0\]: 64 tokens in blocks of 64 need 1 hash_ids, not 3"),
        ("openai-batch", lines({"body": {"model": "m"}}), "line 1, body: messages or prompt is missing"),
        ("vllm-custom", '{"prompt": "a"}\n{"prompt"\n', "line 2: not JSON"),
        ("sharegpt", "[]", "the format is not recognised"),
        ("mooncake", "hello\n", "neither JSON nor a CSV"),
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
    ("source", "to", "lost"),
    [
        ("bailian", "mooncake", ["sharing in blocks smaller than 512 tokens", "sessions"]),
        ("mooncake-sessions", "mooncake", ["sessions", "turns that wait for answers"]),
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
    assert formats.reblocked(formats.reblocked(workload, 64), 512).requests[0].input_length == 1100
    with pytest.raises(WorkloadError, match="neither divides the other"):
        formats.reblocked(workload, 48)
