"""The small files of a model, read from a GGUF file: configuration, tokenizer and chat template, as on the hub."""

import json
from pathlib import Path
from typing import Any

from serving.model.errors import ModelError
from serving.model.gguf_tokenizer import build_tokenizer


def read_gguf(path: Path, *, with_tokenizer: bool = True) -> dict[str, bytes]:
    """Return config.json, tokenizer_config.json and tokenizer.json as a GGUF file describes them.

    Raises:
        ModelError: it is not a GGUF file, or its tokenizer is of a kind that is not supported.
    """
    facts = _metadata(path, with_tokenizer)
    arch = facts.get("general.architecture", "")
    tokens: list[str] = facts.get("tokenizer.ggml.tokens", [])

    def token(name: str) -> str | None:
        number = facts.get(f"tokenizer.ggml.{name}_token_id")
        return tokens[number] if number is not None and number < len(tokens) else None

    ends = [facts.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    config = {
        "model_type": arch,
        "max_position_embeddings": facts.get(f"{arch}.context_length"),
        "vocab_size": len(tokens) or None,
        "eos_token_id": sorted({int(end) for end in ends if end is not None}),
    }
    names = {
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "chat_template": facts.get("tokenizer.chat_template"),
    }
    files = {"config.json": _json(config), "tokenizer_config.json": _json(names)}
    if with_tokenizer:
        files["tokenizer.json"] = build_tokenizer(path, facts, token("bos")).to_str().encode()
    return files


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps({name: part for name, part in value.items() if part is not None}).encode()


def _metadata(path: Path, with_tokenizer: bool) -> dict[str, Any]:
    from gguf import GGUFReader

    lists = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type", "tokenizer.ggml.scores")
    try:
        fields = GGUFReader(path).fields
        return {
            name: field.contents()
            for name, field in fields.items()
            if not name.startswith("GGUF.") and (name not in lists or with_tokenizer or name == "tokenizer.ggml.tokens")
        }
    except (ValueError, OSError, KeyError, IndexError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not a readable GGUF file: {error}") from error
