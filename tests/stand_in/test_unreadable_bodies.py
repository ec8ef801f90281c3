"""Bodies that Python itself cannot read are refused: they are no fault of the server."""

import asyncio

import pytest

from serving.stand_in.config import ApiConfig
from tests.stand_in.support import running

DIGITS = b'{"model": "tiny", "prompt": "a", "messages": [], "max_tokens": ' + b"9" * 5000 + b"}"
DEEP = b"[" * 100_000


@pytest.mark.parametrize("body", [DIGITS, DEEP])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/scale_elastic_ep"])
def test_numbers_of_too_many_digits_and_deep_values_are_refused(path, body):
    async def ask():
        async with running(api=ApiConfig()) as client:
            return await client.post(path, content=body, headers={"content-type": "application/json"})

    refused = asyncio.run(ask())
    assert (refused.status_code, refused.json()) == (400, {"detail": "There was an error parsing the body"})
