"""A long prompt of token ids is read apart from its body, and nothing else changes."""

import json

import pytest

from serving.frontend.api.errors import ApiError
from serving.frontend.api.kinds import parse_request
from serving.frontend.api.long_prompt import PLACE, cut_prompt
from serving.frontend.api.openai import CompletionRequest

IDS = list(range(5000))


def body(**fields):
    return json.dumps({"model": "mock", **fields}).encode()


def test_a_long_prompt_and_the_rest_make_the_request():
    whole = body(prompt=IDS, max_tokens=3, user="me")
    cut = cut_prompt(whole)
    request = parse_request(cut.rest, CompletionRequest)
    assert cut.put_back(request)
    assert request == parse_request(whole, CompletionRequest)
    assert len(cut.rest) < 100


@pytest.mark.parametrize(
    "whole",
    [
        body(prompt=[1, 2, 3]),
        body(prompt="text" * 5000),
        body(prompt=["a", *IDS]),
        body(prompt=[*IDS, 2**32]),
        body(prompt=[IDS, IDS]),
        body(prompt=IDS)[:-2],
        body(prompt=IDS, stop_token_ids=PLACE),
    ],
    ids=["short", "text", "mixed", "too-large", "several", "unfinished", "with-the-place"],
)
def test_a_body_that_needs_a_closer_look_stays_whole(whole):
    assert cut_prompt(whole) is None


def test_ids_of_another_field_or_of_a_field_that_comes_twice_do_not_become_the_prompt():
    spaced = b', "prompt" : [ 4294967295 ]}'
    for whole in (
        body(other={"prompt": IDS}, prompt="text"),
        body(prompt=IDS)[:-1] + b', "prompt":"text"}',
        body(prompt=IDS)[:-1] + spaced,
    ):
        assert cut_prompt(whole) is None
    cut = cut_prompt(body(prompt=IDS)[:-1] + b', "prompt" : "text"}')
    assert not cut.put_back(parse_request(cut.rest, CompletionRequest))
    with pytest.raises(ApiError):
        parse_request(cut_prompt(body(max_tokens=-1, prompt=IDS)).rest, CompletionRequest)
