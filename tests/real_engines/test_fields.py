"""The page on endpoints and fields says of vLLM and SGLang what their own request types have."""

import importlib

import pytest

from dynabench.reference.others import fields_of
from tests.real_engines.conftest import ENGINE

TYPES = {
    "vllm": {
        "chat": "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest",
        "completion": "vllm.entrypoints.openai.completion.protocol:CompletionRequest",
        "response": "vllm.entrypoints.openai.responses.protocol:ResponsesRequest",
        "message": "vllm.entrypoints.anthropic.protocol:AnthropicMessagesRequest",
        "embedding": "vllm.entrypoints.pooling.embed.protocol:EmbeddingCompletionRequest",
    },
    "sglang": {
        "chat": "sglang.srt.entrypoints.openai.protocol:ChatCompletionRequest",
        "completion": "sglang.srt.entrypoints.openai.protocol:CompletionRequest",
        "response": "sglang.srt.entrypoints.openai.protocol:ResponsesRequest",
        "embedding": "sglang.srt.entrypoints.openai.protocol:EmbeddingRequest",
    },
}
pytestmark = pytest.mark.filterwarnings("ignore")  # of what the servers import
SERVERS = {"vllm": "vLLM", "sglang": "SGLang"}


@pytest.mark.parametrize("kind", TYPES.get(ENGINE, ()))
def test_the_fields_are_those_of_the_servers_own_types(kind):
    module, _, name = TYPES[ENGINE][kind].partition(":")
    own = getattr(importlib.import_module(module), name).model_fields
    assert set(own) == fields_of(kind, SERVERS[ENGINE])
