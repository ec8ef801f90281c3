"""The small files of a model out of a GGUF file: configuration, tokenizer and chat template, as the hub would have them."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from serving.model.errors import ModelError

LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
PATTERNS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), CONTRACTIONS + LETTERS + r"\p{N}{1,3}" + REST),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), CONTRACTIONS + LETTERS + r"\p{N}" + REST),
    **dict.fromkeys(("gpt-2", "default", "phi-2", "jina-es", "jina-de"), ""),
}
"""How text is cut before merging, by `tokenizer.ggml.pre`; empty: GPT-2's way."""

CONTROL, USER_DEFINED, UNKNOWN, BYTE = 3, 4, 2, 6
"""Token types."""


def read_gguf(path: Path, *, with_tokenizer: bool = True) -> dict[str, bytes]:
    """Return config.json, tokenizer_config.json and tokenizer.json as a GGUF file tells them.

    Raises:
        ModelError: it is no GGUF file, or its tokenizer is of a kind that we do not know.
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
        files["tokenizer.json"] = _tokenizer(path, facts, token("bos")).to_str().encode()
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
        raise ModelError(f"{path} is not a GGUF file that can be read: {error}") from error


def _tokenizer(path: Path, facts: dict[str, Any], bos: str | None) -> tokenizers.Tokenizer:
    kind = facts.get("tokenizer.ggml.model")
    if kind == "gpt2":
        made = _byte_level(path, facts)
    elif kind == "llama":
        made = _sentence_pieces(facts)
    else:
        raise ModelError(
            f"{path.name} has a tokenizer of kind {kind!r}, which cannot be taken out of it: "
            "pass --model-config with a folder or Hugging Face id that has the same tokenizer"
        )
    tokens, types = facts["tokenizer.ggml.tokens"], facts.get("tokenizer.ggml.token_type", [])
    made.add_special_tokens(
        [
            AddedToken(name, special=True, normalized=False)
            for name, type in zip(tokens, types, strict=False)
            if type in (CONTROL, UNKNOWN)
        ]
    )
    made.add_tokens(
        [
            AddedToken(name, special=False, normalized=False)
            for name, type in zip(tokens, types, strict=False)
            if type == USER_DEFINED
        ]
    )
    adds_bos = facts.get("tokenizer.ggml.add_bos_token", kind == "llama")
    if bos is not None and adds_bos:
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, made.token_to_id(bos))]
        )
    return made


def _byte_level(path: Path, facts: dict[str, Any]) -> tokenizers.Tokenizer:
    pre = facts.get("tokenizer.ggml.pre", "default")
    if pre not in PATTERNS:
        raise ModelError(
            f"{path.name} cuts text as {pre!r} (tokenizer.ggml.pre), which we do not know: "
            "pass --model-config with a folder or Hugging Face id that has the same tokenizer"
        )
    vocabulary = {name: number for number, name in enumerate(facts["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in facts.get("tokenizer.ggml.merges", [])]
    # Llama 3 takes a word that is a token as it is, however the merges would have made it.
    whole = pre in ("llama-bpe", "llama3", "llama-v3")
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=whole))
    if PATTERNS[pre]:
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(PATTERNS[pre]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def _sentence_pieces(facts: dict[str, Any]) -> tokenizers.Tokenizer:
    """SentencePiece's BPE joins the neighbours whose union has the best score; ranked by it, the unions are merges."""
    tokens, scores = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.scores"]
    vocabulary = {name: number for number, name in enumerate(tokens)}
    merges = []
    for name, score in zip(tokens, scores, strict=True):
        halves = [(name[:cut], name[cut:]) for cut in range(1, len(name))]
        known = [pair for pair in halves if pair[0] in vocabulary and pair[1] in vocabulary]
        merges += [(-score, vocabulary[left], vocabulary[right], left, right) for left, right in known]
    merges.sort(key=lambda merge: merge[:3])
    unknown = next(
        (tokens[number] for number, kind in enumerate(facts["tokenizer.ggml.token_type"]) if kind == UNKNOWN), None
    )
    made = tokenizers.Tokenizer(
        models.BPE(vocabulary, [merge[3:] for merge in merges], unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = [normalizers.Prepend("▁")] if facts.get("tokenizer.ggml.add_space_prefix", True) else []
    made.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return made
