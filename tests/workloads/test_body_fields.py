"""Further fields of request bodies: a workload keeps them, counts them, and knows that tools are a part of the prompt."""

import json

import pytest

from workloads import formats
from workloads.anonymise import anonymise
from workloads.describe import advice, describe_workload
from workloads.formats import FORMATS, lost
from workloads.request import WorkloadError
from workloads.shape import ShapeConfig, shape

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CHAT = {"messages": [{"role": "user", "content": "and in Rome"}], "model": "m", "max_tokens": 10}
FIELDS = {
    "tools": [TOOL],
    "tool_choice": "required",
    "response_format": {"type": "json_object"},
    "temperature": 0.2,
    "x_unknown": None,
}
DECIDED_BY_THE_RUN = {"stream": False, "stream_options": {}, "ignore_eos": False, "priority": 3}


def batch(tmp_path, *bodies):
    file = tmp_path / "batch.jsonl"
    rows = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body} for n, body in enumerate(bodies)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return formats.read(file)


def test_a_body_s_fields_are_kept_but_not_those_that_the_client_sets(tmp_path):
    one, other = batch(tmp_path, CHAT | FIELDS | DECIDED_BY_THE_RUN, CHAT)
    assert one.extra_body == FIELDS
    assert other.extra_body is None
    assert (one.output_length, one.priority) == (10, 3)


def test_lines_of_messages_keep_their_fields_too(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps(CHAT | {"top_p": 0.9}) + "\n")
    (request,) = formats.read(file)
    assert request.extra_body == {"top_p": 0.9}


@pytest.mark.parametrize("name", ["dynabench", "openai-batch"])
def test_fields_survive_being_written(tmp_path, name):
    read = batch(tmp_path, CHAT | FIELDS, {"prompt": "Hello", "seed": 1, "max_tokens": 4})
    with (tmp_path / "again.jsonl").open("wb") as file:
        FORMATS[name].write(read, file)
    assert [each.extra_body for each in formats.read(tmp_path / "again.jsonl")] == [FIELDS, {"seed": 1}]


def test_a_format_without_room_for_fields_says_that_it_loses_them(tmp_path):
    read = batch(tmp_path, {"prompt": "Hello", "seed": 1, "temperature": 0})
    assert lost(read, "vllm-custom") == ["fields of bodies (seed, temperature)"]
    assert lost(read, "openai-batch") == []


def test_an_anonymous_workload_has_no_fields(tmp_path):
    assert anonymise(batch(tmp_path, CHAT | FIELDS)).requests[0].extra_body is None


def test_the_description_counts_fields_and_says_when_they_are_sent(tmp_path):
    read = batch(tmp_path, CHAT | FIELDS, CHAT | {"temperature": 1, "max_completion_tokens": 7})
    assert describe_workload(read).extra_body == {
        "response_format": 1, "temperature": 2, "tool_choice": 1, "tools": 1, "x_unknown": 1,
    }  # fmt: skip
    said = advice(read)[-1]
    assert said.startswith("bodies have further fields (response_format, temperature, tool_choice, tools, x_unknown); ")
    assert said.endswith("sends them with --prompts text or chat, and leaves them out with token ids")
    assert not any("fields" in hint for hint in advice(batch(tmp_path, CHAT)))


def test_a_cut_prompt_is_sent_as_tokens_so_nothing_promises_its_fields(tmp_path):
    read = shape(batch(tmp_path, CHAT | FIELDS), ShapeConfig(cap_isl=2))
    assert read.requests[0].content is None
    assert not any("fields" in hint for hint in advice(read))


def test_tools_and_tool_calls_are_a_part_of_the_prompt(tmp_path):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zurich"}' * 20}}
    turn = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "user", "content": "and in Rome"}]
    plain, tools, unused, called = (
        request.input_length
        for request in batch(
            tmp_path,
            CHAT,
            CHAT | {"tools": [TOOL] * 50},
            CHAT | {"tools": [TOOL] * 50, "tool_choice": "none"},
            CHAT | {"messages": turn},
        )
    )
    assert unused == plain
    assert tools > plain + 50 * 5
    assert called > plain + 20 * 2


def test_requests_with_the_same_tools_share_the_beginning_of_their_prompts(tmp_path):
    bodies = [CHAT | {"tools": [TOOL] * 50, "messages": [{"role": "user", "content": text}]} for text in ("one", "two")]
    first, second = batch(tmp_path, *bodies)
    assert first.hash_ids[0] == second.hash_ids[0]
    assert first.hash_ids[-1] != second.hash_ids[-1]


def test_tools_that_are_no_list_are_refused_with_their_place(tmp_path):
    with pytest.raises(WorkloadError, match="line 1, body: tools must be a list of objects"):
        batch(tmp_path, CHAT | {"tools": "weather"})


def test_a_workload_keeps_the_name_of_the_limit_that_its_file_uses(tmp_path):
    body = {"messages": CHAT["messages"], "max_completion_tokens": 9}
    (request,) = batch(tmp_path, body)
    assert (request.output_length, request.limit_field) == (9, "max_completion_tokens")
    with (tmp_path / "again.jsonl").open("wb") as file:
        FORMATS["openai-batch"].write(batch(tmp_path, body), file)
    written = json.loads((tmp_path / "again.jsonl").read_text())["body"]
    assert written == {"model": "", **body}
