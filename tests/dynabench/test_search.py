"""Searches for the value at which limits are just met: every limit is found, with few tries, and no end is an answer."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynabench.experiment.search import Bracket


def searched(bracket, is_met):
    tried = []
    while (value := bracket.next()) is not None:
        assert bracket.low <= value <= bracket.high
        tried.append(value)
        bracket.learn(value, is_met=is_met(value))
    assert len(set(tried)) == len(tried)
    return tried


def whole(sense, low=0.1, high=64.0):
    return Bracket(low, high, precision=0.03, is_whole=True, sense=sense)


@pytest.mark.parametrize("edge", range(1, 65))
@pytest.mark.parametrize("knows", [True, False])
def test_the_lowest_whole_number_that_meets_is_found(edge, knows):
    bracket = whole("lowest" if knows else None)
    tried = searched(bracket, lambda value: value >= edge)
    assert len(tried) <= 13
    if edge == 1:
        assert bracket.is_at_end
        return
    assert (bracket.met, bracket.missed, bracket.sense) == (edge, edge - 1, "lowest")


@pytest.mark.parametrize("edge", range(1, 64))
@pytest.mark.parametrize("knows", [True, False])
def test_the_highest_whole_number_that_meets_is_found(edge, knows):
    bracket = whole("highest" if knows else None)
    searched(bracket, lambda value: value <= edge)
    assert (bracket.met, bracket.missed, bracket.sense) == (edge, edge + 1, "highest")


@given(st.floats(0.11, 63), st.sampled_from(["highest", "lowest", None]), st.booleans())
def test_the_edge_lies_within_the_precision(edge, sense, is_highest):
    if sense is not None:
        is_highest = sense == "highest"
    bracket = Bracket(0.1, 64.0, precision=0.03, is_whole=False, sense=sense)
    searched(bracket, lambda value: value <= edge if is_highest else value >= edge)
    inner, outer = (bracket.met, bracket.missed) if is_highest else (bracket.missed, bracket.met)
    assert inner <= edge * (1 + 1e-6)
    assert outer >= edge * (1 - 1e-6)
    assert outer / inner <= 1.03 * (1 + 1e-4)


@pytest.mark.parametrize(
    ("sense", "is_met", "met", "missed", "tried"),
    [
        ("highest", True, 64, None, [1, 2, 4, 8, 16, 32, 64]),
        ("highest", False, None, 1, [1]),
        ("lowest", True, 1, None, [1]),
        ("lowest", False, None, 64, [1, 2, 4, 8, 16, 32, 64]),
        (None, True, 64, None, [1, 64]),
        (None, False, None, 64, [1, 64]),
    ],
)
def test_where_all_values_are_alike_the_end_is_told(sense, is_met, met, missed, tried):
    bracket = whole(sense)
    assert searched(bracket, lambda value: is_met) == tried
    assert (bracket.met, bracket.missed) == (met, missed)
    assert bracket.is_at_end is is_met


@pytest.mark.parametrize("most", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("edge", [1, 2, 3, 5, 7, 9])
def test_values_that_there_cannot_be_are_the_end(most, edge):
    bracket, tried = whole("lowest"), []
    while (value := bracket.next()) is not None:
        if value > most:
            bracket.forbid(value)
            continue
        tried.append(value)
        bracket.learn(value, is_met=value >= edge)
    if edge <= most:
        assert bracket.met == edge
    else:
        assert (bracket.met, bracket.missed) == (None, most)
    assert len(tried) == len(set(tried)) <= 2 * math.ceil(math.log2(most + 1)) + 1
