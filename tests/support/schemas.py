"""JSON schemas for tests, as SDKs send them, and tokenizers to write their values in."""

import functools
import json

import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from serving.engines.mock.forms.fit import json_tokens
from serving.engines.mock.forms.writer import Writer
from serving.model.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from tests.support.model import CORPUS

NAMES = st.sampled_from(["name", "age", "a b", 'qu"ote', "naïve", "", "日本", "x_1", "<|im_end|>", "𝕏"])
PATTERNS = [
    "^[a-z]+$",
    r"^\d{3}-\d{4}$",
    "[A-Z]{2}",
    r"^(foo|ba[rz])+$",
    r"^\+?\d{1,15}$",
    r"\bcat\b",
    "^(?!x)[xyz]{3}$",
]
SCALARS = st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from([0.5, 1.0, "", "a", "né", "<|im_end|>"])


@functools.cache
def writers():
    """Return a writer for bytes, one for byte-level BPE, and one for a tokenizer like Llama 2's."""
    return {
        "bytes": Writer(ByteTokenizer()),
        "byte-level": Writer(HuggingFaceTokenizer(byte_level())),
        "pieces": Writer(HuggingFaceTokenizer(pieces())),
    }


def byte_level():
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    return tokenizer.to_str().encode()


def pieces():
    words = sorted({f"▁{word}" for line in CORPUS for word in line.split()})
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    vocabulary += [chr(code) for code in range(33, 127)]
    merges, seen = [], set(vocabulary)
    for word in words:
        piece = word[0]
        for letter in word[1:]:
            if piece + letter not in seen:
                merges.append((piece, letter))
                seen.add(piece + letter)
                vocabulary.append(piece + letter)
            piece += letter
    model = models.BPE(
        vocab={text: number for number, text in enumerate(vocabulary)},
        merges=merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer.to_str().encode()


def _bounded(low, high, least=0, most=6):
    """Return a strategy of two bounds that leave room, some of them left out."""
    return st.tuples(st.integers(least, most), st.integers(0, 4), st.booleans(), st.booleans()).map(
        lambda drawn: ({low: drawn[0]} if drawn[2] else {}) | ({high: drawn[0] + drawn[1]} if drawn[3] else {})
    )


def _merged(*strategies):
    return st.tuples(*strategies).map(lambda parts: {name: value for part in parts for name, value in part.items()})


NUMBERS = _merged(
    st.sampled_from([{"type": "integer"}, {"type": "number"}]),
    st.sampled_from([{}, {"minimum": -3}, {"exclusiveMinimum": 2}, {"minimum": 0.5}, {"minimum": 10**12}]),
    st.sampled_from([{}, {"multipleOf": 0.5}, {"multipleOf": 3}, {"multipleOf": 0.1}]),
) | st.sampled_from(
    [
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"type": "integer", "maximum": -7},
        {"type": "number", "minimum": 1.25, "maximum": 1.25},
        {"type": "integer", "minimum": 4, "maximum": 4},
        {"type": "number", "maximum": -1e-9},
    ]
)
TEXTS = (
    _merged(st.just({"type": "string"}), _bounded("minLength", "maxLength", most=40))
    | st.sampled_from(PATTERNS).map(lambda pattern: {"type": "string", "pattern": pattern})
    | st.sampled_from(["date-time", "date", "time", "email", "uuid", "uri", "ipv4", "ipv6", "hostname", "odd"]).map(
        lambda name: {"type": "string", "format": name}
    )
)
FIXED = st.sampled_from([{"type": "null"}, {"type": "boolean"}, {}, True]) | st.lists(
    SCALARS, min_size=1, max_size=4
).map(lambda values: {"enum": values})


def _grown(inner):
    properties = st.dictionaries(NAMES, inner, max_size=4)
    objects = st.tuples(properties, st.sampled_from([{}, {"additionalProperties": False}])).map(
        lambda drawn: (
            {
                "type": "object",
                "properties": drawn[0],
                "required": [name for place, name in enumerate(drawn[0]) if place % 2],
            }
            | drawn[1]
        )
    )
    arrays = _merged(inner.map(lambda each: {"type": "array", "items": each}), _bounded("minItems", "maxItems"))
    tuples = st.lists(inner, min_size=1, max_size=3).map(
        lambda parts: {"type": "array", "prefixItems": parts, "minItems": len(parts), "maxItems": len(parts)}
    )
    maps = _merged(
        inner.map(lambda each: {"type": "object", "additionalProperties": each}),
        _bounded("minProperties", "maxProperties", most=4),
    )
    either = st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts})
    return objects | arrays | tuples | maps | either


SATISFIABLE = st.recursive(NUMBERS | TEXTS | FIXED, _grown, max_leaves=8)
"""Schemas that some value fits, and that the mocker must honour."""

KEYWORDS = {
    "type": st.sampled_from(["string", "object", "array", "number", ["integer", "null"], "boolean", "odd", 3]),
    "minimum": st.integers(-5, 5) | st.just("x"),
    "exclusiveMaximum": st.integers(-5, 5),
    "multipleOf": st.sampled_from([0, 0.1, 2, 3, -1]),
    "minLength": st.integers(0, 9),
    "maxLength": st.integers(-1, 9),
    "pattern": st.sampled_from([*PATTERNS, "(", r"(a)\1", "a{3}b*", "[^a]", "(?i)x", "x(?<=x)", "^a.b$"]),
    "format": st.sampled_from(["uuid", "date"]),
    "enum": st.lists(SCALARS | st.lists(SCALARS, max_size=2), max_size=5),
    "const": SCALARS,
    "minItems": st.integers(0, 4),
    "maxItems": st.integers(0, 4),
    "uniqueItems": st.booleans(),
    "minProperties": st.integers(0, 3),
    "maxProperties": st.integers(0, 3),
    "required": st.lists(NAMES, max_size=3, unique=True),
    "$ref": st.sampled_from(["#", "#/properties/name", "#/$defs/a", "http://x", 5]),
    "title": st.just("Title"),
    "x-order": st.just(1),
}


def _soup(inner):
    nested = {
        "not": inner,
        "allOf": st.lists(inner, min_size=1, max_size=3),
        "anyOf": st.lists(inner, max_size=3),
        "oneOf": st.lists(inner, max_size=3),
        "items": inner,
        "prefixItems": st.lists(inner, min_size=1, max_size=3),
        "additionalProperties": inner,
        "propertyNames": inner,
        "properties": st.dictionaries(NAMES, inner, max_size=3),
        "$defs": st.fixed_dictionaries({"a": inner}),
    }
    return _some(KEYWORDS | nested)


def _some(keywords):
    return st.lists(st.sampled_from(sorted(keywords)), max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: keywords[name] for name in names})
    )


ANYTHING = st.recursive(_some(KEYWORDS) | st.booleans(), _soup, max_leaves=8)
"""Any keywords together: many have no value, or cannot be honoured."""


WRONG = st.sampled_from([
    None, True, False, 0, 1, -1, 0.5, 1e308, 1e-300, 2**64 - 1, "string", "object", "array", "number", "date", "a+", "#",
    [], ["a"], [1], [None], [[1]], [{}], [{"type": "string"}], {}, {"a": {}}, {"type": "integer"}, {"a": 1},
])  # fmt: skip
TYPED = [
    "type", "format", "pattern", "minLength", "maxLength", "minItems", "maxItems", "items", "prefixItems", "uniqueItems",
    "properties", "required", "additionalProperties", "propertyNames", "minProperties", "maxProperties", "enum", "const",
    "anyOf", "oneOf", "allOf", "$ref", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
]  # fmt: skip
MISTYPED = st.dictionaries(st.sampled_from(TYPED), WRONG, min_size=1, max_size=4)
"""Keywords with values of any type."""


def value_of(raw, seed, target, name="bytes"):
    """Return the mocker's value of a schema, and its number of tokens."""
    writer = writers()[name]
    tokens = json_tokens(raw, seed, target, writer)
    return json.loads(writer.text(tokens)), len(tokens)
