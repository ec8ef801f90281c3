"""Searches for the value at which limits are just met: every limit is found, with few tries, and no end is an answer."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynabench.experiment.search import Bracket
from tests.support.commands import dynabench


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


@pytest.mark.parametrize(("precision", "digits"), [(0.2, 2), (0.1, 3), (0.03, 3), (0.01, 4), (0.002, 4)])
@given(edge=st.floats(0.11, 63))
def test_values_that_are_tried_have_no_more_digits_than_the_precision_is_worth(precision, digits, edge):
    bracket = Bracket(0.1, 64.0, precision=precision, is_whole=False, sense="highest")
    tried = searched(bracket, lambda value: value <= edge)
    assert all(value == float(f"{value:.{digits}g}") for value in tried)
    assert bracket.missed / bracket.met <= (1 + precision) * (1 + 1e-9)


def rate():
    return Bracket(0.1, 64.0, precision=0.03, is_whole=False, sense="highest")


def over_repeats(make, edges, is_highest=True):
    """Search where the middle one of the repeats decides, then for each of them; return the interval, and the first search."""
    brackets = [make() for _ in range(len(edges) + 1)]
    for bracket, edge in zip(brackets, [sorted(edges)[len(edges) // 2], *edges], strict=True):
        searched(bracket, lambda value, edge=edge: value <= edge if is_highest else value >= edge)
    return brackets[0].interval(brackets[1:]), brackets[0]


def test_repeats_that_agree_leave_no_more_doubt_than_the_search_does():
    found, bracket = over_repeats(rate, [25.0, 25.0, 25.0])
    assert found == (bracket.met, bracket.missed)
    assert over_repeats(lambda: whole("lowest"), [5, 5, 5], is_highest=False)[0] == (5, 5)


def test_repeats_that_differ_give_the_interval_of_the_mean():
    (low, high), _ = over_repeats(rate, [20.0, 25.0, 31.0])
    # By hand: the mean of the logarithms is log(24.94), half the interval 4.303 * 0.219 / sqrt(3) = 0.545.
    assert low == pytest.approx(14.5, rel=0.04)
    assert high == pytest.approx(43.0, rel=0.04)
    assert over_repeats(lambda: whole("lowest"), [5, 6, 6], is_highest=False)[0] == (4, 8)


def test_an_end_of_the_search_leaves_no_interval():
    for edges in ([70, 80, 90], [8, 9, 90], [9]):
        assert over_repeats(lambda: whole("highest"), edges)[0] is None


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


def missing(value, least, most):
    """Return what is missed where small values miss one limit and large ones another."""
    return frozenset(["itl"] * (value < least) + ["ttft"] * (value > most))


@given(st.integers(1, 64), st.integers(1, 64), st.sampled_from(["lowest", None]))
def test_values_between_two_that_miss_different_limits_are_tried(least, most, sense):
    bracket, tried = whole(sense), []
    while (value := bracket.next()) is not None:
        missed = missing(value, least, most)
        bracket.learn(value, is_met=not missed, missed=missed)
        tried.append(value)
    assert len(set(tried)) == len(tried) <= 15
    if least > most:
        assert bracket.met is None
    elif least > 1 and most < 64:
        assert (bracket.met, bracket.missed, bracket.sense) == (least, least - 1, "lowest")


def test_points_of_another_trace_under_the_same_name_are_not_taken_up(tmp_path):
    trace, out = tmp_path / "t.jsonl", tmp_path / "out"
    row = {"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [1, 2]}
    lines = [json.dumps(row | {"timestamp": 100 * number}) for number in range(20)]
    trace.write_text("\n".join(lines))
    command = ("sweep", trace, "--vary", "workers=1,2", "--router-mode", "kv", "--out", out)
    assert dynabench(*command).returncode == 0
    stamps = {
        file.name: file.stat().st_mtime_ns
        for file in out.rglob("*.*")
        if file.parent.name == "points" or file.suffix == ".id"
    }
    assert dynabench(*command).returncode == 0
    assert stamps == {name: next(out.rglob(name)).stat().st_mtime_ns for name in stamps}  # nothing was done again
    trace.write_text("\n".join(lines).replace('"output_length": 4', '"output_length": 5'))  # as many bytes
    again = dynabench(*command)
    assert (again.returncode, "contains another sweep: " in again.stderr) == (2, True)
