"""Detokenizing, stop strings, and what else ends a text."""

import json
from itertools import accumulate

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from serving.frontend.generation.stops import StopMatcher
from serving.frontend.generation.text import ChoiceText
from serving.model.errors import ModelError
from serving.model.files import ModelFiles
from serving.model.template import ChatTemplate, TemplateError
from serving.model.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from tests.support.model import CORPUS, write_model


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("m") / "tiny")
    return HuggingFaceTokenizer((folder / "tokenizer.json").read_bytes())


@pytest.fixture(scope="module")
def with_fallback():
    """A tokenizer as SentencePiece makes them: word marks, and bytes for what it does not know."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    )
    facts = json.loads(tokenizer.to_str())
    facts["added_tokens"] = []
    return HuggingFaceTokenizer(json.dumps(facts).encode())


def spell(tokenizer, text, sizes):
    """Detokenize a text in pieces; return them, and the whole."""
    detokenizer = tokenizer.detokenizer()
    tokens = tokenizer.encode(text, special=False).tolist()
    pieces, at = [], 0
    for size in (*sizes, len(tokens)):
        part = tokens[at : at + size]
        at += size
        escaped = detokenizer.escaped(part)
        if escaped is None:
            pieces += detokenizer.texts(part)
        else:
            pieces += [msgspec.json.decode(b'"' + piece + b'"') for piece in escaped]
    return pieces, "".join(pieces) + detokenizer.flush()


@given(st.text(max_size=60), st.lists(st.integers(0, 7), max_size=12))
def test_pieces_are_whole_characters_and_make_up_the_text(byte_level, text, sizes):
    for tokenizer in (byte_level, ByteTokenizer()):
        pieces, whole = spell(tokenizer, text, sizes)
        assert whole == text
        assert not any("\ufffd" in piece for piece in pieces if "\ufffd" not in text)


@given(st.text(st.sampled_from("once upon a time ünd 🙂 日本"), max_size=30))
def test_the_same_for_tokenizers_with_byte_fallback(with_fallback, text):
    pieces, whole = spell(with_fallback, text, [1, 2, 1])
    assert not any("\ufffd" in piece for piece in pieces)
    expected = with_fallback._tokenizer.decode(with_fallback.encode(text, special=False).tolist())
    assert whole == expected


def test_special_tokens_have_no_text(byte_level):
    marked = byte_level.encode("<|im_start|>hello<|im_end|>", special=False).tolist()
    assert "".join(byte_level.detokenizer().texts(marked)) == "hello"


def test_special_tokens_that_are_markers_have_text(byte_level):
    marked = byte_level.encode("<|im_start|>hello<|im_end|>", special=False).tolist()
    visible = frozenset({"<|im_start|>", "<tool_call>"})
    for _ in range(2):
        assert "".join(byte_level.detokenizer(visible).texts(marked)) == "<|im_start|>hello"
        assert b"".join(byte_level.detokenizer(visible).escaped(marked)) == b"<|im_start|>hello"
        assert "".join(byte_level.detokenizer().texts(marked)) == "hello"


@pytest.mark.parametrize(
    ("visible", "text"), [([], "once a time"), (["[A]"], "[A] once a time"), (["[A]", "[B]"], "[A] once[B] a time")]
)
def test_the_same_for_a_decoder_without_a_table(with_fallback, visible, text):
    facts = json.loads(with_fallback._tokenizer.to_str())
    size = with_fallback._tokenizer.get_vocab_size()
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    facts["added_tokens"] = [{"id": size + n, "content": name} | plain for n, name in enumerate(("[A]", "[B]"))]
    tokenizer = HuggingFaceTokenizer(json.dumps(facts).encode())
    tokens = tokenizer.encode("[A]once[B]a time", special=False).tolist()
    assert {size, size + 1} <= set(tokens)
    assert "".join(tokenizer.detokenizer(frozenset(visible)).texts(tokens)) == text


def test_a_broken_tokenizer_is_told():
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be used"):
        HuggingFaceTokenizer(b"{}")


@given(
    st.lists(st.text(st.sampled_from("ab"), max_size=3), max_size=12),
    st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_passes_up_to_the_first_stop_string_and_nothing_is_lost(pieces, stops):
    matcher = StopMatcher(stops)
    out = ""
    for piece in pieces:
        out += matcher.push(piece)
        if matcher.has_stopped:
            break
        assert not any(stop in out for stop in stops)
    out += matcher.flush()
    text = "".join(pieces)
    found = [text.find(stop) for stop in stops if stop in text]
    if matcher.has_stopped:
        assert found
        assert text.startswith(out)
        assert not any(stop in out for stop in stops)
    else:
        assert not found
        assert out == text


@given(
    st.lists(st.text(st.sampled_from("ab"), max_size=3), max_size=12),
    st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 12),
)
def test_a_stop_string_counts_where_it_ends_beyond_the_least_number_of_tokens(pieces, stops, least):
    matcher = StopMatcher(stops)
    out = ""
    for number, piece in enumerate(pieces):
        out += matcher.push(piece, may_stop=number >= least)
        if matcher.has_stopped:
            break
    out += matcher.flush()
    text, free = "".join(pieces), len("".join(pieces[:least]))
    ends = [place for place in range(free + 1, len(text) + 1) if text[:place].endswith(tuple(stops))]
    if ends:
        piece_end = next(end for end in map(len, accumulate(pieces)) if end >= ends[0])
        seen = text[:piece_end]
        starts = [seen.find(stop, max(free - len(stop) + 1, 0)) for stop in stops]
        assert out == text[: min(start for start in starts if start >= 0)]
    else:
        assert out == text


def text(**settings):
    """Return the text of a choice whose tokens are bytes."""
    return ChoiceText(ByteTokenizer().detokenizer(), **settings)


def test_each_token_has_a_piece_escaped_for_json():
    assert text().push([*b'a"b\n']) == [b"a", b'\\"', b"b", b"\\n"]


def test_a_character_of_several_tokens_comes_with_its_last():
    choice = text()
    assert choice.push([0xC3]) == [b""]
    assert choice.push([0xA9, ord("!")]) == ["é".encode(), b"!"]
    assert choice.num_tokens == 3


def test_half_a_character_is_given_at_the_end():
    assert text(max_tokens=1).push([0xC3]) == ["\ufffd".encode()]


def test_a_text_ends_at_its_limit_of_tokens():
    choice = text(max_tokens=3)
    assert choice.push([*b"ab"]) == [b"a", b"b"]
    assert not choice.finish_reason
    assert choice.push([*b"cde"]) == [b"c"]
    assert (choice.finish_reason, choice.num_tokens) == ("length", 3)


def test_the_engines_own_reason_counts_at_the_limit_too():
    choice = text(max_tokens=2)
    choice.push([*b"ab"], "stop")
    assert choice.finish_reason == "stop"


def test_a_token_that_ends_the_text_is_no_part_of_it_but_counts_as_in_vllm():
    choice = text(end_token_ids=[0], min_tokens=2)
    assert choice.push([0, ord("a"), ord("b"), 0, ord("c")]) == [b"\\u0000", b"a", b"b"]
    assert (choice.finish_reason, choice.num_tokens) == ("stop", 4)


def test_a_token_after_a_stop_string_is_not_counted():
    choice = text(stops=["b"], end_token_ids=[0])
    assert choice.push([ord("a"), ord("b"), 0]) == [b"a", b""]
    assert (choice.finish_reason, choice.num_tokens) == ("stop", 2)


def test_a_stop_string_across_tokens_ends_the_text_before_it():
    choice = text(stops=["cd"])
    assert choice.push([*b"abc"]) == [b"a", b"b", b""]
    assert choice.push([*b"de"]) == [b""]
    assert (choice.finish_reason, choice.num_tokens) == ("stop", 4)


def test_what_was_held_back_comes_with_the_last_piece():
    choice = text(stops=["cd"])
    assert choice.push([*b"abc"], "length") == [b"a", b"b", b"c"]
    choice = text(stops=["cd"])
    choice.push([*b"abc"])
    assert choice.push([], "stop") == [b"c"]
    assert choice.num_tokens == 3


def test_text_that_an_engine_gives_is_matched_as_it_is():
    choice = text(stops=["END"], max_tokens=1)
    assert choice.push_texts(["once E", "ND upon"]) == [b"once ", b""]
    assert (choice.finish_reason, choice.num_tokens) == ("stop", 2)


def template(source, **config):
    files = {"chat_template.jinja": source.encode(), "tokenizer_config.json": msgspec.json.encode(config)}
    return ChatTemplate(ModelFiles(files))


MESSAGES = [{"role": "user", "content": "hi"}]


def test_templates_see_the_models_own_tokens():
    shown = template("{{ bos_token }}{{ messages[0].content | tojson }}", bos_token={"content": "<s>"})
    assert shown.render(MESSAGES, None) == '<s>"hi"'


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% set _ = messages.append(1) %}",
        "{{ raise_exception('no') }}",
        "{% for i in range(100000000) %}xxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_templates_run_in_a_sandbox_and_may_refuse(source):
    with pytest.raises(TemplateError):
        template(source).render(MESSAGES, None)


def test_a_template_that_is_none_is_told():
    with pytest.raises(ModelError, match="chat template is not valid"):
        template("{% if %}")
