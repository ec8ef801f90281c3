"""The page on endpoints and fields: what it says of OpenAI and Anthropic is what their SDKs have."""

import typing

import pytest
from anthropic.types import message_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from dynabench.reference.others import ENDPOINTS, fields_of
from dynabench.reference.requests import endpoints_here

SDKS = {
    "chat": ("OpenAI", chat_create_params.CompletionCreateParamsStreaming),
    "completion": ("OpenAI", completion_create_params.CompletionCreateParamsStreaming),
    "response": ("OpenAI", response_create_params.ResponseCreateParamsStreaming),
    "embedding": ("OpenAI", embedding_create_params.EmbeddingCreateParams),
    "message": ("Anthropic", message_create_params.MessageCreateParamsStreaming),
}


@pytest.mark.parametrize("kind", SDKS)
def test_the_fields_are_those_of_the_sdks(kind):
    server, parameters = SDKS[kind]
    missing = set(typing.get_type_hints(parameters)) - fields_of(kind, server)
    assert not missing, f"{server}'s SDK has new fields: add them to dynabench/reference/others.py"


def test_every_endpoint_here_is_on_the_page():
    assert endpoints_here() <= ENDPOINTS.keys()
