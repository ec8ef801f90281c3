"""What is done with each flag of vllm serve."""

from collections import Counter
from dataclasses import fields, is_dataclass
from pathlib import Path

from serving.stand_in import config
from serving.stand_in.vllm.flags.arguments import arguments
from serving.stand_in.vllm.flags.help import help_of
from serving.stand_in.vllm.flags.treatment import _entries, treatments


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


def test_each_setting_of_a_stand_in_is_read_by_some_part_of_it():
    """A flag that sets something that nobody reads would be dropped silently."""
    room = Path(config.__file__).parent
    makers = {room / "config.py", room / "vllm" / "settings" / "settings.py"}
    text = "\n".join(path.read_text() for path in room.rglob("*.py") if path not in makers)
    kinds = [kind for kind in vars(config).values() if is_dataclass(kind) and kind.__module__ == config.__name__]
    assert len(kinds) >= 8
    unread = [
        f"{kind.__name__}.{field.name}" for kind in kinds for field in fields(kind) if f".{field.name}" not in text
    ]
    assert unread == []
