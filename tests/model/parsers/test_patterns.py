"""Patterns that read a model's text must not backtrack, or a text of a few kilobytes is seconds of work."""

import importlib
import pkgutil
import re
from re import _parser as parser

import pytest

from serving.model import parsers
from serving.model.parsers.formats import CALLS
from serving.model.parsers.header_calls import HeaderCalls

ALPHABET = [*map(chr, range(128)), "é", "١", "\u2003", "｜"]


def patterns():
    """Return all patterns of the package, by where they are."""
    found = {f"{name}.name": form.name for name, form in CALLS.items() if isinstance(form, HeaderCalls)}
    for module in pkgutil.iter_modules(parsers.__path__):
        for name, value in vars(importlib.import_module(f"{parsers.__name__}.{module.name}")).items():
            values = value.values() if isinstance(value, dict) else [value]
            found |= {f"{module.name}.{name}.{at}": each for at, each in enumerate(values) if is_pattern(each)}
    return found


def is_pattern(value):
    return isinstance(value, re.Pattern)


def faults(parts, before=frozenset()):
    """Return the repeats that may share a text with one next to them, or hold another; and what may end the last one.

    Args:
        parts: of a parsed pattern.
        before: the characters of the repeats that may still go on where these parts begin.
    """
    found = []
    for name, value in parts:
        match str(name):
            case "MAX_REPEAT" | "MIN_REPEAT" if value[1] is parser.MAXREPEAT:
                inner, _ = faults(value[2])
                taken = characters(value[2])
                found += inner + ([value] if taken is None or taken & before else [])
                before = (before if not value[0] else frozenset()) | (taken or frozenset())
            case "MAX_REPEAT" | "MIN_REPEAT":
                inner, after = faults(value[2], before)
                found, before = found + inner, after | (before if not value[0] else frozenset())
            case "SUBPATTERN":
                inner, before = faults(value[3], before)
                found += inner
            case "BRANCH":
                each = [faults(branch, before) for branch in value[1]]
                found += [fault for inner, _ in each for fault in inner]
                before = frozenset().union(*(after for _, after in each))
            case "AT" | "ASSERT" | "ASSERT_NOT":
                continue
            case _:
                before = frozenset()
    return found, before


def characters(parts):
    """Return the characters of what is repeated; None if that is not one character."""
    if len(parts) != 1 or str(parts[0][0]) not in ("LITERAL", "NOT_LITERAL", "IN", "ANY"):
        return None
    tree = parser.parse("")
    tree.data = list(parts)
    one = re._compiler.compile(tree)
    return frozenset(character for character in ALPHABET if one.fullmatch(character))


@pytest.mark.parametrize("where", patterns())
def test_no_pattern_has_repeats_that_may_share_a_text(where):
    assert faults(parser.parse(patterns()[where].pattern))[0] == []


@pytest.mark.parametrize("pattern", [r"\s*[^x]+", r"\s*['\"]?([^'>]+?)", r"(a+)+", r"(a|b*)b+", r"a*(?:b?a*)c"])
def test_patterns_that_have_such_repeats_are_found(pattern):
    assert faults(parser.parse(pattern))[0]
