"""The tokenizer that a GGUF file's metadata describes, as one of the tokenizers library."""

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
"""How text is split before merging, by `tokenizer.ggml.pre`; empty: as in GPT-2."""

CONTROL, USER_DEFINED, UNKNOWN, BYTE = 3, 4, 2, 6
"""Token types."""


def build_tokenizer(path: Path, facts: dict[str, Any], bos: str | None) -> tokenizers.Tokenizer:
    """Build the tokenizer that a GGUF file's metadata describes.

    Raises:
        ModelError: its kind is not supported.
    """
    kind = facts.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(path, facts)
    elif kind == "llama":
        tokenizer = _sentence_pieces(facts)
    else:
        raise ModelError(
            f"{path.name} has a tokenizer of kind {kind!r}, which is not supported: "
            "pass --model-config with a folder or Hugging Face id that has the same tokenizer"
        )
    types = list(zip(facts["tokenizer.ggml.tokens"], facts.get("tokenizer.ggml.token_type", []), strict=False))
    special = [name for name, type in types if type in (CONTROL, UNKNOWN)]
    added = [name for name, type in types if type == USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in added])
    adds_bos = facts.get("tokenizer.ggml.add_bos_token", kind == "llama")
    if bos is not None and adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer


def _byte_level(path: Path, facts: dict[str, Any]) -> tokenizers.Tokenizer:
    pre = facts.get("tokenizer.ggml.pre", "default")
    if pre not in PATTERNS:
        raise ModelError(
            f"{path.name} cuts text as {pre!r} (tokenizer.ggml.pre), which is not supported: "
            "pass --model-config with a folder or Hugging Face id that has the same tokenizer"
        )
    vocabulary = {name: number for number, name in enumerate(facts["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in facts.get("tokenizer.ggml.merges", [])]
    # Llama 3 uses a word that is a token as it is, whatever the merges would produce.
    whole = pre in ("llama-bpe", "llama3", "llama-v3")
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=whole))
    if PATTERNS[pre]:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(PATTERNS[pre]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_pieces(facts: dict[str, Any]) -> tokenizers.Tokenizer:
    """SentencePiece's BPE joins the neighbours with the best-scored union, so the unions ranked by score are merges."""
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
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, [merge[3:] for merge in merges], unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = [normalizers.Prepend("▁")] if facts.get("tokenizer.ggml.add_space_prefix", True) else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer
