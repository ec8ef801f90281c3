"""Tokens of a text, the text of tokens, and facts about the tokenizer."""

from starlette.requests import Request
from starlette.responses import Response

from serving.frontend.model_info import json_response, tokens_of
from serving.frontend.prepared import Detokenized, Tokenized
from serving.frontend.request import RequestReader
from serving.model.template import PLAIN, source
from serving.stand_in.served import OneModel
from serving.stand_in.vllm.paths.bodies import check_is_json

PATHS_OF_FILES = ("vocab_file", "merges_file")


class Tokens:
    """The handlers."""

    def __init__(self, reader: RequestReader, models: OneModel) -> None:
        self._reader = reader
        self._models = models

    async def on_tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        check_is_json(request)
        model, text = await self._reader.read(request, "tokenize")
        assert isinstance(text, Tokenized)
        return json_response(tokens_of(model, text))

    async def on_detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        check_is_json(request)
        _, detokenized = await self._reader.read(request, "detokenize")
        assert isinstance(detokenized, Detokenized)
        return json_response({"prompt": detokenized.text})

    async def on_count(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens."""
        check_is_json(request)
        _, text = await self._reader.read(request, "message_tokens")
        assert isinstance(text, Tokenized)
        count = len(text.tokens)
        return json_response({"input_tokens": count, "context_management": {"original_input_tokens": count}})

    async def on_tokenizer_info(self, request: Request) -> Response:
        """GET /tokenizer_info: the model's own settings of its tokenizer, and its chat template."""
        files = self._models.model.text.files
        settings = files.json("tokenizer_config.json") if files.contents else {}
        found = {name: _plain(value) for name, value in settings.items() if name not in PATHS_OF_FILES}
        found["tokenizer_class"] = found.get("tokenizer_class") or "PreTrainedTokenizerFast"
        template = source(files)
        return json_response(found | ({"chat_template": template} if template != PLAIN else {}))


def _plain(value: object) -> object:
    """Return the text of a special token, whose settings are an object."""
    return value["content"] if isinstance(value, dict) and "content" in value else value
