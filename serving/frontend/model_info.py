"""What clients of vLLM and SGLang ask for besides answers: the version, tokens of a text, facts about the model."""

from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from foundation.extras import DISTRIBUTION
from serving.frontend.prepared import Detokenized, Tokenized
from serving.frontend.request import RequestReader
from serving.frontend.served_model import ServedModel
from serving.model.card import ModelType
from serving.model.template import PLAIN, source

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ModelInfo:
    """The handlers."""

    def __init__(self, reader: RequestReader) -> None:
        self._reader = reader

    async def version(self, request: Request) -> Response:
        """GET /version, as in vLLM."""
        return json_response({"version": version(DISTRIBUTION)})

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize, as in vLLM and SGLang."""
        model, text = await self._reader.read(request, "tokenize")
        assert isinstance(text, Tokenized)
        return json_response(tokens_of(model, text))

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize; the answer has the text under both vLLM's and SGLang's name."""
        _, detokenized = await self._reader.read(request, "detokenize")
        assert isinstance(detokenized, Detokenized)
        return json_response({"prompt": detokenized.text, "text": detokenized.text})

    async def message_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens, as at Anthropic."""
        _, text = await self._reader.read(request, "message_tokens")
        assert isinstance(text, Tokenized)
        return json_response({"input_tokens": len(text.tokens)})

    async def tokenizer_info(self, request: Request) -> Response:
        """GET /tokenizer_info, as in vLLM: what lm-eval needs to know about a tokenizer that it does not have itself."""
        model = self._model(request)
        config = model.text.files.json("tokenizer_config.json")
        tokens = {name: _text(config.get(name)) for name in SPECIAL_TOKENS}
        if not model.text.files.contents:
            tokens = dict.fromkeys(SPECIAL_TOKENS, "")
        return json_response(config | tokens | {"chat_template": source(model.text.files)})

    async def model_info(self, request: Request) -> Response:
        """GET /model_info, as in SGLang, and /get_model_info, its former name."""
        model = self._model(request)
        config = model.text.files.json("config.json")
        return json_response(
            {
                "model_path": model.card.model_path or model.card.name,
                "served_model_name": model.card.name,
                "tokenizer_path": model.card.model_path or model.card.name,
                "is_generation": True,
                "max_model_len": model.card.context_length,
                "model_type": config.get("model_type"),
                "architectures": config.get("architectures"),
                "has_chat_template": source(model.text.files) != PLAIN,
                "takes_tokens": model.card.model_type is ModelType.Backend,
            }
        )

    def _model(self, request: Request) -> ServedModel:
        return self._reader.find(request.query_params.get("model"))


def _text(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def tokens_of(model: ServedModel, text: Tokenized) -> dict[str, Any]:
    """Return the tokens of a text as vLLM tells them."""
    return {
        "count": len(text.tokens),
        "max_model_len": model.card.context_length,
        "tokens": text.tokens,
        "token_strs": text.token_strs,
    }


def json_response(value: Any, status: int = 200) -> Response:
    """Return a value as an answer."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")
