"""Conversations of responses that are too large to be kept, or to be continued."""

import asyncio
import json

import httpx
import pytest
from starlette.requests import Request

from serving.frontend.api.answer_format import Usage
from serving.frontend.api.errors import ApiError
from serving.frontend.api.responses.format import ResponsesFormat
from serving.frontend.api.responses.request import ResponseOptions
from serving.frontend.config import FrontendConfig
from serving.frontend.metrics import FrontendMetrics
from serving.frontend.request import RequestReader
from serving.model.parts import Content
from tests.support import speaking_engine
from tests.support.own_engines import serving_engine

HI = [{"role": "user", "content": "Hi."}]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    limits = ("--max-body-mb", 2, "--max-kept-responses-mb", 1)
    with serving_engine(speaking_engine, tmp_path_factory.mktemp("d"), 2, *limits) as url:
        yield f"{url}/v1/responses"


def _large(megabytes):
    """Return a message that is short to the engine, but not to the limits."""
    return [{"role": "user", "content": "Hi.", "id": "x" * int(megabytes * 1_000_000)}]


def _ask(url, items, **more):
    return httpx.post(url, json={"model": "agent", "input": items, **more}, timeout=60)


def test_a_continued_conversation_is_held_against_the_limit_of_a_body(url):
    first = _ask(url, _large(0.7) + HI).json()
    continued = _ask(url, _large(1.6) + HI, previous_response_id=first["id"])
    assert (continued.status_code, continued.json()["error"]["param"]) == (413, "previous_response_id")
    assert "with the conversation that it continues, the request is over 2 MiB" in continued.text
    assert _ask(url, HI, previous_response_id=first["id"]).status_code == 200


@pytest.mark.parametrize("keeps", [True, False])
def test_a_response_that_outgrows_the_memory_says_that_it_is_not_kept(keeps):
    stored = []
    format = ResponsesFormat(
        ResponseOptions(echo={"store": True}),
        seed="a",
        fingerprint="a",
        created_at=0,
        keep=lambda response: stored.append(response) or keeps,
    )
    assert json.loads(format.whole([Content("Hi.")], "stop", Usage(1, 1)))["store"] is keeps
    assert [response["id"] for response in stored] == ["resp_a"]


@pytest.mark.parametrize("megabytes", [0.2, 1.5])
def test_a_response_says_whether_it_is_kept(url, megabytes):
    response = _ask(url, _large(megabytes) + HI).json()
    is_there = httpx.get(f"{url}/{response['id']}").status_code == 200
    assert response["store"] == is_there == (megabytes < 1)


def test_a_continued_conversation_takes_room_among_the_bodies():
    async def refusal():
        reader = RequestReader(None, FrontendConfig(max_body_mb=4, max_buffered_mb=4), FrontendMetrics())
        is_held, scope = asyncio.Event(), {"type": "http", "headers": []}

        async def of_another():
            if is_held.is_set():
                await asyncio.Event().wait()
            is_held.set()
            return {"type": "http.request", "body": b"x" * (3 << 20), "more_body": True}

        async def of_ours():
            return {"type": "http.request", "body": b"{}", "more_body": False}

        def complete(body, admit):
            admit(3 << 20)
            return body

        another = asyncio.create_task(reader.read(Request(scope, of_another), "response"))
        await is_held.wait()
        await asyncio.sleep(0)
        try:
            with pytest.raises(ApiError) as caught:
                await reader.read(Request(scope, of_ours), "response", complete)
        finally:
            another.cancel()
        return caught.value.status

    assert asyncio.run(refusal()) == 503
