"""Texts that the mocker makes up for regular expressions."""

import re
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.engines.mock.forms.errors import FormError
from serving.engines.mock.forms.fit import choice_tokens, regex_tokens
from serving.engines.mock.forms.keywords import WorkLimit
from serving.engines.mock.forms.regex import pattern_of
from tests.support.calls import at_most
from tests.support.schemas import writers

ATOMS = st.sampled_from(
    ["a", "é", ".", r"\d", r"\w", r"\s", r"\D", "[a-f]", "[^a-z]", r"[\w.-]", r"\.", "[^\\x00-\\x7f]", r"\/"]
)
QUANTIFIERS = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?", "+?"])


def _combined(inner):
    group = inner.map(lambda text: f"({text})") | inner.map(lambda text: f"(?:{text})")
    return (
        st.lists(inner, min_size=1, max_size=3).map("".join)
        | st.tuples(group | ATOMS, QUANTIFIERS).map("".join)
        | st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})")
    )


PATTERNS = st.recursive(ATOMS, _combined, max_leaves=8)


@settings(deadline=None)
@given(PATTERNS, st.integers(0, 2**64 - 1), st.integers(0, 60))
def test_a_text_matches_its_pattern(pattern, seed, spare):
    text = pattern_of(pattern).write(Random(seed), spare, WorkLimit(), is_whole=True)
    assert re.fullmatch(pattern, text)


@settings(deadline=None)
@given(PATTERNS, st.text("a1é. bZ\n", max_size=8))
def test_matching_agrees_with_python(pattern, text):
    assert pattern_of(pattern).matches(text, WorkLimit()) == bool(re.search(pattern, text))
    assert pattern_of(pattern).matches(text, WorkLimit(), is_whole=True) == bool(re.fullmatch(pattern, text))


@pytest.mark.parametrize(
    "pattern",
    [
        r"^[^@\s]+@[^@\s]+\.[a-z]{2,}$",
        r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",
        r"^(?=.*\d)(?=.*[a-z]).{6,}$",
        r"^(?!\.)(?!.*\.\.)([a-z0-9_'+\-\.]*)[a-z0-9_+-]@([a-z0-9][a-z0-9\-]*\.)+[a-z]{2,}$",
        r"\bword\b",
        r"^[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}$",
        r"(yes|no)(, (yes|no))*",
    ],
)
def test_patterns_as_people_write_them_have_texts(pattern):
    for seed in range(20):
        assert re.search(pattern, pattern_of(pattern).write(Random(seed), seed, WorkLimit(), is_whole=False))


@pytest.mark.parametrize("tokenizer", ["bytes", "byte-level", "pieces"])
@pytest.mark.parametrize(("pattern", "least"), [("[a-z ]+", 0.9), (r"(\w+ )*end", 0.7), ("(a|b){5}", 0)])
def test_a_text_of_a_pattern_is_nearly_as_long_as_asked_and_no_longer(pattern, least, tokenizer):
    writer = writers()[tokenizer]
    for target in (20, 60, 200):
        tokens = regex_tokens(pattern, target, target, writer)
        assert least * target <= len(tokens) <= target
        assert re.fullmatch(pattern, writer.text(tokens))


def test_a_long_text_of_a_pattern_takes_few_steps():
    work = WorkLimit()
    text = pattern_of(".*").write(Random(1), 60_000, work, is_whole=True)
    assert len(text) == 60_000
    assert work.num_steps < 5_000


def test_a_text_that_takes_too_many_steps_is_refused():
    with pytest.raises(FormError, match="too long texts"):
        pattern_of("((ab|c)d)*").write(Random(1), 0, WorkLimit(1_000), is_whole=True, low=60_000)


@pytest.mark.parametrize(
    "pattern",
    [
        f"^([{''.join(chr(0x3000 + 2 * place) for place in range(4000))}a-b])*$",
        f"({'(?!x)' * 500}.)*",
    ],
    ids=["many ranges", "many lookaheads"],
)
def test_hostile_patterns_are_refused_in_bounded_work(pattern):
    with pytest.raises(FormError), at_most(3_000_000):
        regex_tokens(pattern, 1, 60_000, writers()["bytes"])


def test_lengths_and_a_pattern_hold_together():
    text = pattern_of("^[a-z]+$").write(Random(1), 0, WorkLimit(), is_whole=False, low=30, high=31)
    assert 30 <= len(text) <= 31


@pytest.mark.parametrize("pattern", ["a^b", "(?=b)a", "[^\\s\\S]"])
def test_a_pattern_without_texts_is_refused(pattern):
    with pytest.raises(FormError):
        pattern_of(pattern).write(Random(0), 9, WorkLimit(), is_whole=True)


def test_a_choice_is_one_of_the_texts():
    writer = writers()["byte-level"]
    texts = ["red", "very blue", "<|im_start|>x"]
    said = {writer.text(choice_tokens(texts[:2], seed, writer)) for seed in range(20)}
    assert said == {"red", "very blue"}
    with pytest.raises(FormError, match="does not reproduce"):
        choice_tokens(texts[2:], 0, writer)
    with pytest.raises(FormError, match="choice is empty"):
        choice_tokens([], 0, writer)
