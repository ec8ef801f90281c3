"""What is done with each flag of vllm serve."""

from collections import Counter

from serving.stand_in.vllm.arguments import arguments
from serving.stand_in.vllm.help import help_of
from serving.stand_in.vllm.treatment import _entries, treatments


def test_each_argument_is_treated_in_exactly_one_way():
    assert Counter(name for name, _ in _entries()) == Counter(arguments().keys())


def test_what_is_refused_says_why_and_what_to_do():
    ways_out = ("leave it out", "use ", "expected ", "name ", "start ", "do not start", "put ")
    for name, (kind, about) in treatments().items():
        if kind.startswith("refused"):
            assert any(way in about for way in ways_out), name


def test_all_flags_are_in_the_help_with_their_treatment():
    text = help_of("all")
    for argument in arguments().values():
        assert all(flag in text for flag in argument.flags), argument.dest


def test_the_help_is_searched_by_group_and_by_word():
    assert "--watermark" in help_of("schedulerconfig")
    assert [line for line in help_of("max_loras").splitlines() if line.startswith("  --")] == ["  --max-loras INT"]
