import msgspec
import pytest

from serving.frontend.api.answer_format import Spaces, Usage
from serving.frontend.api.conversations import Conversation, Conversations
from serving.frontend.api.errors import ApiError
from serving.frontend.api.responses import earlier
from serving.frontend.api.responses.earlier import Continuing
from serving.frontend.api.responses.format import ResponsesFormat
from serving.frontend.api.responses.request import ResponseOptions
from serving.model.parts import CallStart, Content, Reasoning

TEN_BYTES = Conversation(b"[1,2]", b"{    }"[:5])


def _kept(*ids: str, max_number: int = 8, max_bytes: int = 1000) -> Conversations:
    kept = Conversations(max_number=max_number, max_bytes=max_bytes)
    for id in ids:
        assert kept.keep(id, TEN_BYTES)
    return kept


def _present(kept: Conversations, ids: str) -> str:
    return "".join(id for id in ids if kept.get(id) is not None)


def test_the_oldest_conversations_make_room_by_number():
    assert _present(_kept(*"abcd", max_number=2), "abcd") == "cd"


def test_the_oldest_conversations_make_room_by_size():
    kept = _kept(*"abcd", max_bytes=39)
    assert (_present(kept, "abcd"), kept.num_bytes, len(kept)) == ("bcd", 30, 3)


def test_a_conversation_that_alone_is_too_large_is_not_kept_and_drops_no_other():
    kept = _kept(*"ab", max_bytes=25)
    assert not kept.keep("c", Conversation(b"x" * 26, b""))
    assert _present(kept, "abc") == "ab"


def test_nothing_is_kept_if_no_conversation_may_be():
    kept = Conversations(max_number=0, max_bytes=1000)
    assert not kept.keep("a", TEN_BYTES)
    assert kept.num_bytes == 0


def test_a_conversation_kept_again_counts_once_and_is_the_newest():
    kept = _kept(*"aba", max_number=2)
    assert kept.num_bytes == 20
    kept.keep("c", TEN_BYTES)
    assert _present(kept, "abc") == "ac"


def test_a_dropped_conversation_gives_its_bytes_back():
    kept = _kept(*"ab")
    assert (kept.drop("a"), kept.drop("a"), kept.num_bytes) == (True, False, 10)


def _answered(kept: Conversations, body: bytes, text: str, seed: str) -> bytes:
    """Answer a request as the frontend does, and return the items that it was answered with."""
    items = Continuing.of(body).items(kept, lambda _: None)
    format = ResponsesFormat(
        ResponseOptions(echo={"model": "m"}),
        seed=seed,
        fingerprint=seed,
        created_at=0,
        keep=lambda each: earlier.keep(kept, items, each),
    )
    assert msgspec.json.decode(format.whole([Content(text)], "stop", Usage(1, 1)))["store"]
    return earlier.with_items(body, items)


def test_a_conversation_continues_with_what_was_asked_and_answered_before():
    kept = Conversations(max_number=8, max_bytes=10_000)
    _answered(kept, b'{"model": "m", "input": "one"}', "1", "a")
    _answered(
        kept,
        b'{"model": "m", "input": [{"role": "user", "content": "two"}], "previous_response_id": "resp_a"}',
        "2",
        "b",
    )
    body = _answered(
        kept, b'{"previous_response_id": "resp_b", "input": "three", "model": "m", "top_p": 0.5}', "3", "c"
    )
    request = msgspec.json.decode(body)
    texts = [
        item["content"] if isinstance(item["content"], str) else item["content"][0]["text"] for item in request["input"]
    ]
    assert texts == ["one", "1", "two", "2", "three"]
    assert (request["previous_response_id"], request["top_p"]) == ("resp_b", 0.5)


def test_a_request_may_continue_without_input():
    kept = Conversations(max_number=8, max_bytes=10_000)
    _answered(kept, b'{"model": "m", "input": " one "}', "1", "a")
    items = Continuing.of(b'{"model": "m", "previous_response_id": "resp_a"}').items(kept, lambda _: None)
    assert [item["role"] for item in msgspec.json.decode(items)] == ["user", "assistant"]


def test_continuing_an_unknown_response_is_refused_in_the_words_of_openai():
    with pytest.raises(ApiError) as caught:
        Continuing.of(b'{"input": "one", "previous_response_id": "resp_x"}').items(_kept("a"), lambda _: None)
    assert (caught.value.status, msgspec.json.decode(caught.value.body())["error"]) == (
        400,
        {
            "message": "Previous response with id 'resp_x' not found.",
            "type": "invalid_request_error",
            "param": "previous_response_id",
            "code": "previous_response_not_found",
        },
    )


@pytest.mark.parametrize(
    "body", [b"", b"[", b"[]", b"1", b'{"previous_response_id": 1}', b'{"input": 12}', b'{"input": {"a": 1}}']
)
def test_a_body_that_says_nothing_sensible_of_conversations_is_refused(body):
    with pytest.raises(ApiError) as caught:
        Continuing.of(body).items(_kept(), lambda _: None)
    assert caught.value.status == 400


def test_a_kept_response_is_read_and_deleted_once():
    kept = Conversations(max_number=8, max_bytes=10_000)
    _answered(kept, b'{"input": "one"}', "1", "a")
    assert msgspec.json.decode(earlier.find(kept, "resp_a"))["output"][0]["content"][0]["text"] == "1"
    assert msgspec.json.decode(earlier.delete(kept, "resp_a")) == {
        "id": "resp_a",
        "object": "response",
        "deleted": True,
    }
    for read in (earlier.find, earlier.delete):
        with pytest.raises(ApiError, match="Response with id 'resp_a' not found") as caught:
            read(kept, "resp_a")
        assert caught.value.status == 404


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (["\n", "\n", "a", " ", "\n"], "\n\na \n"),
        ([Reasoning("t"), "\n", CallStart("c"), "\n", CallStart("d"), "\n"], "tcd"),
        (["a", CallStart("c"), "\n", "b"], "ac\nb"),
        (["", "\n", ""], ""),
    ],
)
def test_white_space_is_left_out_only_where_it_stands_alone(parts, expected):
    spaces = Spaces()
    parts = [Content(part) if isinstance(part, str) else part for part in parts]
    assert "".join(part[0] for each in parts for part in spaces.without([each])) == expected
    assert "".join(part[0] for part in Spaces().without(parts)) == expected


def test_of_an_answer_only_what_a_chat_needs_is_kept_for_later_requests():
    kept = Conversations(max_number=8, max_bytes=10_000)
    output = [
        {"type": "reasoning", "id": "rs_1", "status": "completed", "summary": [], "encrypted_content": "x",
         "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
         "content": [{"type": "output_text", "text": "Hi.", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "status": "completed", "call_id": "c", "name": "f", "arguments": "{}"},
    ]  # fmt: skip
    assert earlier.keep(kept, b"[]", {"id": "resp_a", "output": output})
    assert msgspec.json.decode(kept.get("resp_a").items) == [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi."}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    ]
    assert msgspec.json.decode(earlier.find(kept, "resp_a"))["output"] == output
