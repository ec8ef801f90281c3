"""A prompt of thousands of token ids, taken out of its body: all that is checked about a body would read them again."""

from typing import NamedTuple

import msgspec

from serving.frontend.api.openai import CompletionRequest, TokenId

LONG_BYTES = 4096
"""Shorter bodies are read in one piece."""

NAME = b'"prompt":'
PLACE = [2**32 - 1]
"""Stands for the prompt in the rest of the body."""

_decode_ids = msgspec.json.Decoder(list[TokenId]).decode


class LongPrompt(NamedTuple):
    """A prompt, and the body without it."""

    tokens: list[int]
    rest: bytes

    def put_back(self, request: object) -> bool:
        """Give the prompt to the request that the rest was read as; return whether it belongs there."""
        if not isinstance(request, CompletionRequest) or request.prompt != PLACE:
            return False
        request.prompt = self.tokens  # type: ignore[assignment]
        return True


def cut_prompt(body: bytes | bytearray) -> LongPrompt | None:
    """Take a long prompt of token ids out of a body; None if there is none, or the body needs a closer look."""
    if len(body) < LONG_BYTES or (name := body.find(NAME)) < 0:
        return None
    start = body.find(b"[", name)
    end = body.find(b"]", start) + 1
    place = msgspec.json.encode(PLACE)
    if not name < start < end or end - start < LONG_BYTES or body[name + len(NAME) : start].strip():
        return None
    before, after = bytes(body[:start]), bytes(body[end:])
    if NAME in after or place.strip(b"[]") in before + after:
        return None  # whose prompt it is, or where it goes, takes a closer look
    try:
        return LongPrompt(_decode_ids(memoryview(body)[start:end]), before + place + after)
    except msgspec.MsgspecError:
        return None
