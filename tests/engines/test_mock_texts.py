"""What the mocker's answers say where they are free."""

import json

import numpy as np
import pytest

from serving.engines.mock.answers.author import Author
from serving.engines.mock.engine import AnswerConfig
from serving.model.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from tests.engines.test_mock_answers import asked, plan, text
from tests.support.schemas import byte_level

OPEN = {"max_tokens": 1000, "is_default_limit": True}
PROMPT = tuple(b"How are you?")


def author(answers, tokenizer=None, **more):
    return Author(tokenizer or ByteTokenizer(), AnswerConfig(answers=str(answers), **more))


def pairs(tmp_path, *found):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in found))
    return path


def test_an_echo_is_the_prompt_and_then_ends_unless_its_limit_is_shorter():
    said = plan(asked(PROMPT, conditions=OPEN), author("echo"))
    assert (text(said.output), said.stop_after) == ("How are you?", 12)
    short = plan(asked(PROMPT, conditions={"max_tokens": 3}), author("echo"))
    assert (text(short.output), short.limit) == ("How", 3)
    on = plan(asked(PROMPT, conditions={"max_tokens": 15, "ignore_eos": True}), author("echo"))
    assert (text(on.output), on.stop_after) == ("How are you?How", None)
    least = plan(asked(PROMPT, conditions={"max_tokens": 30, "min_tokens": 14}), author("echo"))
    assert text(least.output) == "How are you?Ho"


def test_lines_of_a_file_follow_each_other_from_one_that_prompt_and_seed_choose(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("One line.\n\n  Two lines.  \nThree.\n")
    whole = "One line. Two lines. Three. "
    found = {
        text(plan(asked((1, seed), seed=seed, conditions={"max_tokens": 56}), author(path)).output)
        for seed in range(30)
    }
    assert found == {(whole[at:] + whole + whole)[:56] for at in (0, 10, 21)}
    first = plan(asked(seed=3), author(path))
    assert first == plan(asked(seed=3), author(path))


def test_a_recorded_answer_goes_to_its_prompt_and_ends_with_stop(tmp_path):
    path = pairs(tmp_path, ("How are you?", "Fine, thanks."), ("What?", "That."))
    said = plan(asked(PROMPT, conditions={"max_tokens": 100}), author(path))
    assert (text(said.output), said.stop_after) == ("Fine, thanks.", 13)
    cut = plan(asked(PROMPT, conditions={"max_tokens": 4}), author(path))
    assert text(cut.output) == "Fine"


def test_a_recorded_answer_is_looked_up_once(tmp_path):
    class Counting(ByteTokenizer):
        num_decoded = 0

        def decode(self, tokens):
            self.num_decoded += 1
            return super().decode(tokens)

    counting = Counting()
    said = plan(asked(PROMPT, conditions=OPEN), author(pairs(tmp_path, ("How are you?", "Fine.")), counting))
    assert (text(said.output), counting.num_decoded) == ("Fine.", 1)


def test_in_a_chat_the_prompt_that_comes_last_counts_and_the_longest_of_those(tmp_path):
    path = pairs(tmp_path, ("are you?", "A"), ("How are you?", "B"), ("What?", "C"))
    chat = tuple(b"user: What? assistant: C user: How are you? assistant:")
    assert text(plan(asked(chat), author(path)).output) == "B"


def test_any_other_prompt_gets_one_of_the_answers(tmp_path):
    path = pairs(tmp_path, ("a?", "A"), ("b?", "B"))
    found = {text(plan(asked((1, number)), author(path)).output) for number in range(30)}
    assert found == {"A", "B"}


def test_answers_are_written_in_the_models_tokens(tmp_path):
    tokenizer = HuggingFaceTokenizer(byte_level())
    path = pairs(tmp_path, ("How are you?", "Fine, thanks."))
    prompt = tokenizer.encode("How are you?", special=False).tolist()
    said = plan(asked(prompt, conditions=OPEN), author(path, tokenizer))
    assert tokenizer.decode(said.output) == "Fine, thanks."


@pytest.mark.parametrize("answers", ["echo", "lines.txt", "pairs.jsonl"])
def test_an_answer_goes_on_elsewhere_with_the_same_token(tmp_path, answers):
    (tmp_path / "lines.txt").write_text("One line.\nTwo lines.\n")
    pairs(tmp_path, ("How are you?", "Fine, thanks."))
    author_ = author(answers if answers == "echo" else tmp_path / answers, output_tokens="11")
    whole = plan(asked(PROMPT, conditions=OPEN), author_)
    for done in range(1, len(whole.output)):
        rest = plan(asked(PROMPT, so_far=whole.output[:done], conditions=OPEN), author_)
        assert whole.output[:done] + rest.output == whole.output
        assert rest.stop_after == whole.stop_after - done


def test_forms_and_tools_are_as_ever(tmp_path):
    path = pairs(tmp_path, ("How are you?", "Fine, thanks."))
    said = plan(asked(PROMPT, form={"choice": ["yes", "no"]}), author(path))
    assert text(said.output) in ("yes", "no")


def test_lengths_are_drawn_where_the_client_sets_none():
    writer = author("random", output_tokens="100:20")
    requests = [asked((1, number), conditions=OPEN) for number in range(1000)]
    lengths = [plan(request, writer).stop_after for request in requests]
    assert np.mean(lengths) == pytest.approx(100, abs=3)
    assert np.std(lengths) == pytest.approx(20, abs=2)
    assert lengths == [plan(request, writer).stop_after for request in requests]
    limited = plan(asked(conditions={"max_tokens": 60}), writer)
    assert (len(limited.output), limited.stop_after) == (60, None)
    assert {plan(request, author("random", output_tokens="7")).stop_after for request in requests[:50]} == {7}


@pytest.mark.parametrize("text", ["0", "0.4", "a", "10:", "10:b", "-3", "10:5:2"])
def test_lengths_that_make_no_sense_are_refused(text):
    with pytest.raises(ValueError, match=r"output_tokens is .*; expected MEAN or MEAN:STDDEV"):
        AnswerConfig(output_tokens=text)


def test_a_file_that_cannot_be_used_is_refused_in_one_line(tmp_path):
    with pytest.raises(
        ValueError, match=r"answers is .*nothing; expected random, echo or a file that can be read: No such"
    ):
        author(tmp_path / "nothing")
    (tmp_path / "empty").write_text("\n \n")
    with pytest.raises(ValueError, match=r"empty, which is empty; expected at least one line"):
        author(tmp_path / "empty")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"it is not UTF-8"):
        author(tmp_path / "bytes")
    (tmp_path / "odd.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a"}\n')
    with pytest.raises(ValueError, match=r"odd\.jsonl:2: expected \{\"prompt\": TEXT, \"answer\": TEXT\}"):
        author(tmp_path / "odd.jsonl")
