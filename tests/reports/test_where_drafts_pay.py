"""At which sizes of a step speculation pays, in a sentence."""

import pytest

from reports.record.pools import DraftUse, Gain
from reports.summarize import summarize
from reports.verdicts.drafts import where_drafts_pay
from tests.reports.runs import run


def use(**gains):
    ratios = tuple(Gain(int(size[1:]), ratio) for size, ratio in gains.items())
    return (DraftUse("workers", 100, 300, (80, 50, 20), 12.5, ratios),)


@pytest.mark.parametrize(
    ("gains", "said"),
    [
        ({"n1": 2.03, "n16": 1.561}, "pays at every size that fits (1 to 16 sequences: 1.56x to 2.03x)"),
        (
            {"n1": 2, "n8": 1.2, "n64": 0.9, "n128": 0.85},
            "pays with up to 8 sequences, and costs more than it gives from 64 on (0.85x to 0.90x)",
        ),
        ({"n1": 1.5, "n8": 0.9, "n64": 1.2}, "costs more than it gives with 8 sequences (0.90x), and else pays"),
        ({"n1": 0.9, "n8": 0.9}, "costs more than it gives at every size (0.90x)"),
    ],
)
def test_the_sizes_at_which_drafts_cost_more_than_they_give_are_said(gains, said):
    assert where_drafts_pay({"three": use(**gains)}) == f"In steps that only decode, speculation {said}."


def test_arms_are_named_if_they_differ_by_what_they_share():
    few, many = use(n1=1.6, n64=1.1), use(n1=2.0, n64=0.9)
    arms = {"round-robin, drafts 1": few, "kv, drafts 1": few, "round-robin, drafts 5": many, "kv, drafts 5": many}
    assert where_drafts_pay(arms) == (
        "In steps that only decode, speculation pays at every size that fits (1 to 64 sequences: 1.10x to 1.60x) with drafts 1; "
        "pays with up to 1 sequence, and costs more than it gives from 64 on (0.90x) with drafts 5."
    )


def test_nothing_is_said_if_nothing_is_known():
    assert where_drafts_pay({"off": (), "live": use()}) == ""


def test_a_run_whose_arms_are_not_compared_says_it_too():
    assert "speculation pays at every size that fits" in summarize([run("off"), run("three", drafts=use(n1=2))]).verdict


def test_arms_whose_names_have_commas_are_in_quotes():
    found = summarize([run("kv, drafts 0"), run("kv, drafts 3"), run("random, drafts 0")]).verdict
    assert "'kv, drafts 0'" in found
    assert ", kv," not in found
