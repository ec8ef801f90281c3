"""Answers as bytes: events, log-probabilities, errors."""

import json

from serving.frontend.api.errors import ApiError, failed_call
from serving.frontend.api.logprobs import LogprobsFormat, TokenLogprob, name_tokens
from serving.frontend.api.sse import ChoiceFormat, CompletionFormat, annotation, error_event, escape, unescape, usage
from serving.model.tokenizer import ByteTokenizer


def parsed(events):
    """Return what a client reads of some events."""
    *bodies, rest = events.split(b"\n\n")
    assert not rest
    return [json.loads(body.removeprefix(b"data: ")) for body in bodies]


def choice(*, is_chat=False):
    return ChoiceFormat(CompletionFormat("7", "m", is_chat=is_chat), 2)


def test_tokens_joined_from_a_template_are_the_events_one_by_one():
    joined = parsed(choice().tokens([b"once", escape(' "upon"\n')]))
    assert joined == parsed(choice().token(b"once", None) + choice().token(escape(' "upon"\n'), None))
    assert [event["choices"][0]["text"] for event in joined] == ["once", ' "upon"\n']
    assert joined[0]["choices"][0]["index"] == 2


def test_a_chat_begins_with_its_role_and_ends_with_its_reason():
    (first,) = parsed(choice(is_chat=True).first())
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    (last,) = parsed(choice(is_chat=True).last("stop", nvext={"worker_id": 1}))
    assert last["choices"][0] == {"index": 2, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert last["nvext"] == {"worker_id": 1}
    assert choice().first() == b""


def test_each_kind_of_event_can_hold_the_usage_so_far():
    format, so_far = choice(is_chat=True), usage(4, 1, 0)
    events = format.first(so_far) + format.token(b"x", None, usage=so_far) + format.last("stop", usage=so_far)
    assert [event["usage"]["total_tokens"] for event in parsed(events)] == [5, 5, 5]


def test_annotations_and_errors_are_events_too():
    assert annotation("token_ids", [1, 2]) == b"event: token_ids\n: [1,2]\n\n"
    (error,) = parsed(error_event(failed_call("it is gone", "lost")))
    assert error["error"] == {"message": "it is gone", "type": "server_error", "param": None, "code": None}


def test_the_kind_of_a_failed_call_decides_the_status():
    kinds = ["full", "draining", "invalid", "lost", "engine", "anything"]
    assert [failed_call("", kind).status for kind in kinds] == [429, 503, 400, 502, 500, 500]
    assert ApiError(429, "").headers == {"retry-after": "1"}


def test_texts_come_back_from_json_as_they_were():
    assert unescape(escape('a "b"\n\\ é')) == 'a "b"\n\\ é'


TOKENS = [TokenLogprob("on", None, None), TokenLogprob("ce", -0.5, [{"token": "ce", "logprob": -0.5, "bytes": [99]}])]


def test_log_probabilities_of_a_completion_are_columns_with_offsets():
    format = LogprobsFormat(is_chat=False)
    assert format.value(TOKENS) == {
        "tokens": ["on", "ce"],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, {"ce": -0.5}],
        "text_offset": [0, 2],
    }
    assert format.value(TOKENS[:1])["text_offset"] == [4]


def test_log_probabilities_of_a_chat_are_one_entry_a_token():
    (first, second) = LogprobsFormat(is_chat=True).value(TOKENS)["content"]
    assert first == {"token": "on", "logprob": None, "bytes": [111, 110], "top_logprobs": []}
    assert second["top_logprobs"] == TOKENS[1].top


def test_likeliest_tokens_may_come_with_their_ids_or_named():
    named = {"token": "h", "logprob": -1.0, "bytes": [104]}
    assert name_tokens([(104, -1.0), named], ByteTokenizer()) == [named, named]
    assert name_tokens(None, ByteTokenizer()) is None
