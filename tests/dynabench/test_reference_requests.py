"""The page on endpoints and fields: what it says of OpenAI and Anthropic is what their SDKs have."""

import ast
import typing
from importlib.metadata import version
from pathlib import Path

import pytest
from anthropic.types import message_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

import serving.frontend
from dynabench.reference.others import ENDPOINTS, SDKS, fields_of
from dynabench.reference.requests import endpoints_here, page
from serving.frontend.api.fields import names_of
from serving.frontend.api.kinds import KINDS, WITHOUT_EFFECT

TYPES = {
    "chat": ("OpenAI", chat_create_params.CompletionCreateParamsStreaming),
    "completion": ("OpenAI", completion_create_params.CompletionCreateParamsStreaming),
    "response": ("OpenAI", response_create_params.ResponseCreateParamsStreaming),
    "embedding": ("OpenAI", embedding_create_params.EmbeddingCreateParams),
    "message": ("Anthropic", message_create_params.MessageCreateParamsStreaming),
}


@pytest.mark.parametrize("kind", TYPES)
def test_the_fields_are_those_of_the_sdks(kind):
    server, parameters = TYPES[kind]
    package, described = SDKS[server]
    theirs, ours = set(typing.get_type_hints(parameters)), fields_of(kind, server)
    assert theirs == ours, (
        f"{package} is {version(package)}, and FIELDS in dynabench/reference/others.py describes {described}: there, "
        f"add {sorted(theirs - ours)} to {server}'s fields of {kind!r}, remove {sorted(ours - theirs)}, set the version "
        "in SDKS, and run `python -m dynabench.reference docs/reference`"
    )


def test_every_endpoint_here_is_on_the_page():
    assert endpoints_here() <= ENDPOINTS.keys()


def test_fields_without_effect_are_fields_of_their_requests():
    unknown = {kind: names - names_of(KINDS[kind].type) for kind, names in WITHOUT_EFFECT.items()}
    assert not any(unknown.values()), unknown


def test_nothing_reads_a_field_without_effect():
    """A response repeats its own, and Anthropic's user id becomes a chat's: both within the requests' own methods."""
    names = WITHOUT_EFFECT["completion"] | WITHOUT_EFFECT["chat"]
    read = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path in Path(serving.frontend.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in names and isinstance(node.ctx, ast.Load)
        if ast.unparse(node.value).split(".")[-1] in ("request", "options", "chat", "parsed")
    ]
    assert read == []


def test_the_page_says_which_fields_have_no_effect():
    _, _, chat = page().partition("## Fields of /v1/chat/completions")
    assert "| `store` | accepted, no effect |" in chat.partition("\n## ")[0]
    _, _, responses = page().partition("## Fields of /v1/responses")
    assert "| `store` | yes |" in responses.partition("\n## ")[0]


def test_a_field_of_which_one_value_is_taken_is_not_simply_yes():
    row = next(line for line in page().split("\n") if line.startswith("| `dimensions` |"))
    assert row.startswith("| `dimensions` | only the model's own size |")
