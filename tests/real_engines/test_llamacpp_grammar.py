"""llama.cpp's own view of the grammars that we make for it."""

import ctypes
import json
import math

import llama_cpp as llama
import pytest
import tokenizers

from serving.engines.guided import Guide
from serving.engines.llamacpp.grammar import gbnf

END = 1


@pytest.fixture(scope="module")
def vocabulary(folder):
    parameters = llama.llama_model_default_params()
    parameters.vocab_only = True
    model = llama.llama_model_load_from_file(str(folder.with_name("tiny.gguf")).encode(), parameters)
    yield llama.llama_model_get_vocab(model)
    llama.llama_model_free(model)


@pytest.fixture
def accepts(vocabulary, tokenizer: tokenizers.Tokenizer):
    """Whether a grammar allows each token of a text, and then the end."""

    def allowed(sampler, token):
        candidate = llama.llama_token_data(id=token, logit=1.0, p=0.0)
        array = llama.llama_token_data_array(data=ctypes.pointer(candidate), size=1, selected=-1, sorted=False)
        llama.llama_sampler_apply(sampler, ctypes.byref(array))
        return not math.isinf(candidate.logit)

    def accepted(grammar, text):
        sampler = llama.llama_sampler_init_grammar(vocabulary, grammar.encode(), b"root")
        assert sampler, grammar
        try:
            for token in [*tokenizer.encode(text).ids, END]:
                if not allowed(sampler, token):
                    return False
                llama.llama_sampler_accept(sampler, token)
            return True
        finally:
            llama.llama_sampler_free(sampler)

    return accepted


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        (r"[ab]{2}-\d+", ["ab-1", "bb-0199"], ["ab-", "abb-1", "ab-1 "]),
        (r"(x|yé|)\W?", ["", "x", "yé!", " "], ["xy", "yé1"]),
        (r"[^\s\"]*?\.", [".", "a[]\\."], ['".', "a b."]),
        (r"^\w{2,3}$", ["a_", "B12"], ["a", "B12_", "é1"]),
        (".{2}", ["日本", '"\\'], ["a\n", "a"]),
    ],
)
def test_a_regular_expression_matches_the_same_texts(accepts, pattern, matching, others):
    grammar = gbnf(Guide("regex", pattern))
    assert [text for text in (*matching, *others) if accepts(grammar, text)] == matching


def test_choices_are_these_texts(accepts):
    choices = ["a b", 'x"\\]', "tab\t, line\n", "日本 é"]
    grammar = gbnf(Guide("choice", choices))
    assert all(accepts(grammar, text) for text in choices)
    assert not accepts(grammar, "a b ")


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, [{"a": 7}], [{"a": 7.5}, {}]),
        ({"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 2}]}, [None, "ab"], ["abc", 1]),
        (
            {"$defs": {"n": {"enum": [1, 'é"\\\n']}}, "type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2},
            [[], [1], ['é"\\\n', 1]],
            [[2], [1, 1, 1]],
        ),
        ({"type": "string", "format": "date"}, ["2026-11-26"], ["2026-13-26"]),
    ],
)
def test_a_schema_allows_valid_answers_only(accepts, schema, valid, invalid):
    grammar = gbnf(Guide("json", schema))
    assert [answer for answer in (*valid, *invalid) if accepts(grammar, json.dumps(answer))] == valid


def test_texts_in_json_are_escaped(accepts):
    grammar = gbnf(Guide("json", {"type": "string"}))
    assert accepts(grammar, r'"a\n"')
    assert not accepts(grammar, '"a\n"')


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 3},
        {"type": "object", "required": ["a"]},
        {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}},
        {"type": ["string", "null"], "maxLength": 3},
        {"type": "string", "pattern": "^a$", "maxLength": 3},
        {"type": "array", "items": [{"type": "string"}]},
        {"properties": {"a": True}},
        {"type": "nonsense"},
        {"$ref": "https://example.com/schema"},
    ],
)
def test_a_schema_that_an_answer_could_break_is_refused(schema):
    with pytest.raises(ValueError, match=r"llama\.cpp cannot convert|is not among"):
        gbnf(Guide("json", schema))
