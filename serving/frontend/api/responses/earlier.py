"""Responses that are kept: continued by later requests, read, and deleted. On JSON, so that only bounds cost memory."""

from collections.abc import Callable

import msgspec

from serving.frontend.api.conversations import Conversation, Conversations
from serving.frontend.api.errors import ApiError
from serving.frontend.api.responses.format import Fields

ESSENTIAL = ("type", "role", "content", "call_id", "name", "arguments")
"""What a chat needs of the items of an answer."""


class Continuing(msgspec.Struct):
    """What a request says of conversations; its other fields are not read."""

    input: msgspec.Raw = msgspec.Raw(b"null")
    previous_response_id: str | None = None
    store: bool | None = None

    @classmethod
    def of(cls, body: bytes | bytearray) -> "Continuing":
        """Read a request.

        Raises:
            ApiError: it is not valid.
        """
        try:
            return _decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"the request is not valid: {error or 'nested too deeply'}") from error

    def items(self, kept: Conversations, admit: Callable[[int], None]) -> bytes:
        """Return the items of the whole conversation: those of the earlier response that it continues, then its own.

        Args:
            kept: where the earlier response is.
            admit: called with the number of bytes that it adds.

        Raises:
            ApiError: the earlier response is not kept, or not admitted.
        """
        own = _items(bytes(self.input))
        if self.previous_response_id is None:
            return own
        earlier = kept.get(self.previous_response_id)
        if earlier is None:
            message = f"Previous response with id '{self.previous_response_id[:100]}' not found."
            raise ApiError(400, message, code="previous_response_not_found", param="previous_response_id")
        admit(len(earlier.items))
        return _concatenated(earlier.items, own)


def with_items(body: bytes | bytearray, items: bytes) -> bytes:
    """Return a request with these items as its input."""
    fields = _decode_fields(body)
    fields["input"] = msgspec.Raw(items)
    return msgspec.json.encode(fields)


def keep(kept: Conversations, items: bytes, response: Fields) -> bool:
    """Keep a response that is complete, for requests that continue it.

    Args:
        kept: where.
        items: the items that it answers.
        response: the response object.

    Returns:
        Whether it fits.
    """
    items = _concatenated(items, msgspec.json.encode(list(map(_essence, response["output"]))))
    return kept.keep(response["id"], Conversation(items, msgspec.json.encode(response)))


def find(kept: Conversations, id: str) -> bytes:
    """Return a response object.

    Raises:
        ApiError: it is not kept.
    """
    conversation = kept.get(id)
    if conversation is None:
        raise _absent(id)
    return conversation.response


def delete(kept: Conversations, id: str) -> bytes:
    """Forget a response; return the answer to who asked for it.

    Raises:
        ApiError: it is not kept.
    """
    if not kept.drop(id):
        raise _absent(id)
    return msgspec.json.encode({"id": id, "object": "response", "deleted": True})


def _essence(item: Fields) -> Fields:
    """Return of an item what a chat needs."""
    found = {name: value for name, value in item.items() if name in ESSENTIAL}
    if "content" in found:
        found["content"] = [{"type": part["type"], "text": part["text"]} for part in found["content"]]
    return found


def _absent(id: str) -> ApiError:
    return ApiError(404, f"Response with id '{id[:100]}' not found.", param="response_id")


def _items(input: bytes) -> bytes:
    """Return an input as a list: a text is a message."""
    if input.startswith(b"["):
        return input
    if input.startswith(b'"'):
        return b'[{"type":"message","role":"user","content":' + input + b"}]"
    if input == b"null":
        return b"[]"
    raise ApiError(400, "input: expected a text or a list of items", param="input")


def _concatenated(first: bytes, second: bytes) -> bytes:
    """Return two lists as one."""
    first, second = first.strip()[1:-1].strip(), second.strip()[1:-1].strip()
    return b"[" + first + (b"," if first and second else b"") + second + b"]"


_decode = msgspec.json.Decoder(Continuing).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
