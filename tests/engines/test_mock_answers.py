"""What the mocker says if an answer must have a form, may call tools, or is a vector."""

import json
import re

import msgspec
import numpy as np
import pytest
import uvloop

from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from serving.engines.mock.answers.author import Author
from serving.engines.mock.answers.embedding import embedding_of
from serving.engines.mock.engine import AnswerConfig, Mocker
from serving.model.files import ModelFiles
from serving.model.parsers import TOOL_CALL_PARSERS, answer_parser
from serving.model.parts import Arguments, CallStart
from serving.model.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from serving.runtime.messages import pack_u32
from serving.runtime.server import AnswerStream
from serving.worker.config import WorkerConfig
from serving.worker.protocol import PreprocessedRequest, StopConditions
from tests.serving.test_mock_engine import Reader
from tests.support.schemas import byte_level
from tests.support.waiting import in_time, until_async

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PERSON}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def asked(prompt=(1, 2, 3), *, form=None, seed=0, eos=(), so_far=(), conditions=None, **more):
    """Return a request."""
    options = {"seed": seed} | ({} if form is None else {"guided_decoding": form})
    return PreprocessedRequest(
        token_ids=pack_u32(np.array([*prompt, *so_far], np.uint32)),
        stop_conditions=StopConditions(**(conditions or {"max_tokens": 60})),
        sampling_options=options,
        eos_token_ids=list(eos),
        num_generated=len(so_far),
        **more,
    )


def plan(request, author=None):
    tokens = np.frombuffer(bytes(request.token_ids.data), "<u4")
    return (author or Author(ByteTokenizer())).plan(request, tokens, most=None)


def text(tokens):
    return ByteTokenizer().decode(tokens)


async def said(mocker, *requests):
    """Return the items and ends of the answers to some requests."""
    reader, encode = Reader(), msgspec.msgpack.encode
    for number, request in enumerate(requests):
        mocker.service(msgspec.Raw(encode(request)), AnswerStream(reader, number))
    async with in_time():
        await until_async(lambda: len(reader.ends) == len(requests))
    return reader


def with_mocker(talk, *, files=None, worker=None, **more):
    async def main():
        timing = TimingConfig(timing="constant", speedup_ratio=20.0)
        config = EngineConfig(block_size=4, num_gpu_blocks=1000)
        mocker = Mocker(WorkerConfig(**(worker or {})), config, timing, **more)
        try:
            await mocker.start(ModelFiles(files or {}))
            mocker.publish_to([])
            await talk(mocker)
        finally:
            await mocker.close()

    uvloop.run(main())


def test_a_guided_answer_is_a_value_of_the_schema_and_ends_with_eos():
    async def talk(mocker):
        reader = await said(mocker, asked(form={"json": PERSON}))
        assert set(json.loads(text(reader.tokens(0)))) == {"name", "age"}
        assert len(reader.tokens(0)) == 60
        assert reader.items[0][-1]["finish_reason"] == "stop"
        assert mocker.traits.guided_decoding == ("json", "regex", "choice")

    with_mocker(talk)


@pytest.mark.parametrize(
    ("conditions", "length", "is_whole"),
    [
        ({"max_tokens": 100, "stop_after": 50}, 50, True),
        ({"max_tokens": 100, "stop_after": 9}, 20, True),  # the shortest value
        ({"max_tokens": 12}, 12, False),
        ({"max_tokens": 80, "ignore_eos": True}, 80, True),
        ({"max_tokens": 80, "stop_after": 30, "min_tokens": 70}, 70, True),
    ],
)
def test_a_guided_answer_is_as_long_as_the_request_says(conditions, length, is_whole):
    found = plan(asked(form={"json": PERSON}, conditions=conditions))
    assert length <= len(found.output) <= length + 6 * (length == 20)
    if is_whole:
        assert isinstance(json.loads(text(found.output)), dict)
    assert (found.stop_after is None) == bool(conditions.get("ignore_eos"))
    assert (len(found.output) == found.limit and found.stop_after != len(found.output)) == (
        not is_whole or "ignore_eos" in conditions
    )


def test_without_a_limit_a_guided_answer_has_the_length_that_any_answer_has():
    conditions = {"max_tokens": 5000, "is_default_limit": True}
    lengths = {number: len(plan(asked([number], conditions=conditions)).output) for number in range(20)}
    for number, length in lengths.items():
        guided = plan(asked([number], form={"json": {"type": "string"}}, conditions=conditions)).output
        assert len(guided) == length


@pytest.mark.parametrize("form", [{"json": PERSON}, {"regex": "[a-z]+( [a-z]+)*"}, {"choice": ["red and blue"]}])
def test_a_guided_answer_that_goes_on_elsewhere_is_the_same_answer(form):
    conditions = {"max_tokens": 60, "stop_after": 40}
    whole = plan(asked(form=form, conditions=conditions)).output
    for num_before in range(1, len(whole)):
        left = {"max_tokens": 60 - num_before, "stop_after": max(40 - num_before, 1)}
        rest = plan(asked(form=form, so_far=whole[:num_before], conditions=left))
        assert whole[:num_before] + rest.output == whole
        assert rest.stop_after == len(rest.output)


@pytest.mark.parametrize("form", [{"json": {"const": "red"}}, {"choice": ["red"]}])
def test_an_answer_of_which_only_the_end_was_lost_still_ends(form):
    whole = plan(asked(form=form, conditions={"max_tokens": 60, "stop_after": 40})).output
    left = {"max_tokens": 60 - len(whole), "stop_after": 1}
    rest = plan(asked(form=form, so_far=whole, conditions=left))
    assert len(rest.output) == rest.stop_after == 1
    assert text(rest.output).strip() == ""
    assert text([*whole, *rest.output]).strip() == text(whole)


def test_a_text_that_must_match_is_filled_up_with_tokens_that_have_no_text():
    conditions = {"max_tokens": 30, "ignore_eos": True}
    found = plan(asked(form={"choice": ["red"]}, conditions=conditions))
    assert len(found.output) == 30
    assert text(found.output) == "red"


def test_a_guided_answer_ends_at_a_stop_token_like_any_answer():
    conditions = {"max_tokens": 60, "stop_token_ids": [ord(",")]}
    found = plan(asked(form={"json": PERSON}, conditions=conditions))
    assert text(found.output).count(",") == 1
    assert found.stop_after == len(found.output)


def test_an_answer_with_a_form_is_made_up_while_others_go_on():
    async def talk(mocker):
        reader, encode = Reader(), msgspec.msgpack.encode
        for number, form in enumerate(({"json": {"not": {}}}, {"json": PERSON}, None)):
            mocker.service(msgspec.Raw(encode(asked(form=form))), AnswerStream(reader, number))
        assert not reader.ends  # nothing was made up in this turn of the event loop
        async with in_time():
            await until_async(lambda: len(reader.ends) == 3)
        assert [reader.ends[number].kind for number in range(3)] == ["invalid", "", ""]
        assert json.loads(text(reader.tokens(1))).keys() == {"name", "age"}

    with_mocker(talk)


def test_a_fault_in_making_up_an_answer_ends_that_request_only():
    async def talk(mocker):
        reader = await said(mocker, asked(form=5), asked(form={"json": PERSON}))  # no frontend sends a 5
        assert [reader.ends[number].kind for number in range(2)] == ["engine", ""]
        assert "AttributeError" in reader.ends[0].error

    with_mocker(talk)


def test_a_form_that_cannot_be_honoured_is_refused_by_name():
    async def talk(mocker):
        requests = [{"json": {"not": {}}}, {"grammar": "root ::= 'a'"}, {"regex": "("}, {"choice": []}]
        reader = await said(mocker, *[asked(form=form) for form in requests])
        assert {end.kind for end in reader.ends.values()} == {"invalid"}
        messages = [reader.ends[number].error for number in range(4)]
        assert '"not" is not supported' in messages[0]
        assert "guided_decoding is grammar; expected one of json, regex, choice" in messages[1]
        assert "is not understood" in messages[2]
        assert "choice is empty" in messages[3]

    with_mocker(talk)


def test_a_model_s_own_tokens_spell_the_value():
    async def talk(mocker):
        reader = await said(mocker, asked(form={"json": PERSON}, conditions={"max_tokens": 200}))
        tokens = reader.tokens(0)
        assert len(tokens) == 200
        assert set(json.loads(HuggingFaceTokenizer(byte_level()).decode(tokens))) == {"name", "age"}

    with_mocker(talk, files={"tokenizer.json": byte_level()})


def author(share, **more):
    return Author(ByteTokenizer(), AnswerConfig(tool_call_share=share), **more)


def calls_of(found):
    return [json.loads(call) for call in CALL.findall(text(found.output))]


def test_a_share_of_answers_calls_tools_with_arguments_of_their_schemas():
    conditions = {"max_tokens": 200}
    some = author(0.5)
    answers = [plan(asked([number], tools=TOOLS, conditions=conditions), some) for number in range(400)]
    called = [calls for found in answers if (calls := calls_of(found))]
    assert 150 < len(called) < 250
    assert {len(calls) for calls in called} == {1, 2}
    for calls in called:
        for call in calls:
            if call["name"] == "now":
                assert call["arguments"] == {}
            else:
                assert isinstance(call["arguments"]["name"], str) and isinstance(call["arguments"]["age"], int)


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (1.0, 30)])
def test_a_share_of_none_never_calls_and_one_of_all_always_does(share, count):
    some = author(share)
    found = [plan(asked([number], tools=TOOLS, conditions={"max_tokens": 200}), some) for number in range(30)]
    assert sum(bool(calls_of(each)) for each in found) == count


def test_no_tools_no_calls_and_a_form_comes_first():
    always = author(1.0)
    assert not calls_of(plan(asked(), always))
    assert not calls_of(plan(asked(tools=[]), always))
    assert isinstance(json.loads(text(plan(asked(form={"json": PERSON}, tools=TOOLS), always).output)), dict)


def test_an_answer_with_calls_is_as_long_as_asked_and_ends_behind_them():
    always = author(1.0)
    for number in range(30):
        request = asked([number], tools=TOOLS[:1], conditions={"max_tokens": 500, "stop_after": 300})
        found = plan(request, always)
        assert 270 <= len(found.output) <= 300
        assert text(found.output).endswith("</tool_call>")
        assert found.stop_after == len(found.output)


def test_the_parameters_that_refuse_a_call_are_named_with_their_tool():
    tools = [{"type": "function", "function": {"name": "odd", "parameters": {"type": "object", "not": {}}}}]
    with pytest.raises(ValueError, match='parameters of tool "odd": #: "not" is not supported'):
        plan(asked(tools=tools), author(1.0))


@pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
def test_calls_are_written_in_the_format_of_the_model(parser):
    always = author(1.0, tool_call_parser=parser)
    for number in range(10):
        request = asked([number], tools=TOOLS, conditions={"max_tokens": 600, "stop_after": 300})
        reader = answer_parser(parser, "", TOOLS)
        parts = [*reader.push(text(plan(request, always).output)), *reader.end()]
        names = [part.name for part in parts if isinstance(part, CallStart)]
        assert names and set(names) <= {"weather", "now"}
        if names == ["weather"]:
            arguments = json.loads("".join(part.text for part in parts if isinstance(part, Arguments)))
            assert isinstance(arguments["name"], str) and isinstance(arguments["age"], int)


def test_the_mocker_reports_what_it_can():
    traits = Mocker(WorkerConfig(), EngineConfig()).traits
    assert traits.tool_call_parser == "hermes"
    assert traits.has_embeddings


@pytest.mark.parametrize(
    ("config", "size"), [({}, 384), ({"hidden_size": 96}, 96), ({"text_config": {"n_embd": 40}}, 40)]
)
def test_an_embedding_is_one_unit_vector_after_the_prompt_was_computed(config, size):
    async def talk(mocker):
        reader = await said(mocker, asked(list(range(40)), is_embedding=True), asked([7], is_embedding=True))
        [item] = reader.items[0]
        assert len(item["embedding"]) == size
        assert np.linalg.norm(item["embedding"]) == pytest.approx(1)
        assert (item["token_ids"], item["finish_reason"]) == ([], "stop")
        assert item["times"]["prefill_end"] > 0
        assert reader.items[1][0]["embedding"] != item["embedding"]

    with_mocker(talk, files={"config.json": json.dumps(config).encode()})


def test_an_embedding_cannot_be_shared_between_workers():
    async def talk(mocker):
        request = asked(is_embedding=True, kv_transfer_params={"do_remote_decode": True})
        reader = await said(mocker, request)
        assert reader.ends[0].kind == "invalid"
        assert "embedding" in reader.ends[0].error

    with_mocker(talk)


TEXTS = ["The cat sat on the mat.", "The cat sat on a mat today.", "Quarterly revenue grew by eleven percent."]


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), HuggingFaceTokenizer(byte_level())])
def test_texts_that_share_words_are_more_similar_than_others(tokenizer):
    is_bytes = isinstance(tokenizer, ByteTokenizer)
    first, near, far = (
        np.array(embedding_of(tokenizer.encode(each, special=False), 384, is_bytes=is_bytes)) for each in TEXTS
    )
    assert first @ near > first @ far + 0.2


@pytest.mark.parametrize("bad", [{"not": {}}, {"properties": {"a": {"type": "strin"}}, "required": ["a"]}])
def test_a_tool_that_cannot_be_called_is_refused_whichever_tool_an_answer_calls(bad):
    tools = [*TOOLS, {"type": "function", "function": {"name": "bad", "parameters": bad}}]
    author = Author(ByteTokenizer(), AnswerConfig(tool_call_share=0.5))
    for seed in range(16):
        with pytest.raises(
            ValueError, match=r'parameters of tool "bad": #(/properties/a)?: "(not|type)" .*(supported|unknown)'
        ):
            plan(asked(seed=seed, tools=tools), author)
        plan(asked(seed=seed, tools=TOOLS), author)
        plan(asked(seed=seed, tools=tools))  # no answer calls tools


def test_without_a_limit_a_guided_answer_has_room_for_elements():
    lines = {"type": "array", "items": PERSON}
    form = {"json": {"type": "object", "properties": {"lines": lines, "more": lines}, "required": ["lines", "more"]}}
    conditions = {"max_tokens": 5000, "is_default_limit": True}
    for number in range(20):
        value = json.loads(text(plan(asked([number], form=form, conditions=conditions)).output))
        assert value["lines"] and value["more"]
