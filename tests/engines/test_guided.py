"""What an answer must look like, translated for engines."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.engines.guided import Guide, choice_regex, guide
from serving.engines.llamacpp.grammar import MAX_NESTING, MAX_PATTERN, gbnf
from serving.runtime.messages import CallError


def asked(**guided):
    return {"sampling_options": {"guided_decoding": guided} if guided else {}}


def test_a_request_says_what_its_answer_must_look_like_or_does_not():
    assert guide(asked(), ("json",), "it") is None
    assert guide(asked(json={"type": "object"}), ("json",), "it") == Guide("json", {"type": "object"})


def test_what_an_engine_cannot_do_is_refused_by_name():
    with pytest.raises(CallError, match=r"it cannot guide answers by regex; .* can by json, choice") as caught:
        guide(asked(regex="a"), ("json", "choice"), "it")
    assert caught.value.kind == "invalid"


@given(st.lists(st.text(min_size=1), min_size=1), st.text(min_size=1))
def test_only_the_choices_match(texts, other):
    pattern = re.compile(choice_regex(texts))
    assert all(pattern.fullmatch(text) for text in texts)
    assert bool(pattern.fullmatch(other)) == (other in texts)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"[ab]{3}-\d{2}", r'([ab]){3,3} "\x2D" ([0-9]){2,2}'),
        ("^ab?$", '"a" ("b"){0,1}'),
        ("(?:red|)", '("red" | "")'),
        ("a+?", '("a"){1,}'),
        (r"[^\s\]]é\W", r'[^ \t\n\r\x0B\x0C\x5D] "\U000000E9" [^a-zA-Z0-9_]'),
        (".", r"[^\x0A]"),
        ("[^a-c]", "[^a-c]"),
    ],
)
def test_a_regular_expression_becomes_a_grammar_for_llamacpp(pattern, expected):
    expected = expected.replace('"red"', '"r" "e" "d"')
    assert gbnf(Guide("regex", pattern)) == f"root ::= {expected}".replace('root ::= "ab', 'root ::= "a" "b')


@pytest.mark.parametrize("pattern", ["a$b", "(?i)a", "(?=a)b", "(?i:a)b", r"(a)\1", r"\bword", r"[a\D]", "(", "a{2,1}"])
def test_a_regular_expression_without_a_grammar_is_refused(pattern):
    with pytest.raises(ValueError, match=r"regular expression|not supported"):
        gbnf(Guide("regex", pattern))


@pytest.mark.parametrize("pattern", ["(" * 200 + "a|bc" + "){2}" * 200, "(?:" * 3000 + "a" + ")*" * 3000])
def test_a_regular_expression_too_deep_to_read_is_refused(pattern):
    with pytest.raises(ValueError, match=r"not a regular expression|groups inside each other"):
        gbnf(Guide("regex", pattern))


def test_a_regular_expression_too_long_to_parse_in_a_moment_is_refused():
    assert gbnf(Guide("regex", "[a]" * (MAX_PATTERN // 3)))
    with pytest.raises(ValueError, match="a regular expression of 16385 characters; at most 16384 are supported"):
        gbnf(Guide("regex", "a" * (MAX_PATTERN + 1)))


def test_choices_and_grammars_for_llamacpp():
    assert gbnf(Guide("choice", ["a", 'b c"\\'])) == r'root ::= "a" | "b\x20c\x22\x5C"'
    assert gbnf(Guide("grammar", 'root ::= "a"')) == 'root ::= "a"'


def test_a_grammar_that_would_end_llamacpps_process_is_refused():
    with pytest.raises(ValueError, match=f"more than {MAX_NESTING} groups"):
        gbnf(Guide("grammar", "root ::= " + "(" * 10_000))
