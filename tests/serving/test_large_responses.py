"""Conversations of responses that are too large to be kept, or to be continued."""

import json

import httpx
import pytest

from serving.frontend.api.answer_format import Usage
from serving.frontend.api.responses.format import ResponsesFormat
from serving.frontend.api.responses.request import ResponseOptions
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
