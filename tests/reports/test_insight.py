"""Prompts that wait for prefill workers which have nothing to compute."""

import dataclasses

import pytest

from reports.figures.insight import COUNTED, TRUE, blocked_share, remarks
from tests.reports.runs import apart, run

HELD = {"prefill_queued_s": [0.0, 0.0], "intended_s": [0.0, 0.0], "done_s": [9.0, 20.0]}
"""Two prompts come at once to worker 0; the run ends at 20 s."""


def test_a_worker_that_computes_nothing_while_a_prompt_waits_is_out_of_blocks():
    made = apart(**HELD, admitted_s=[0.0, 11.0], prefill_end_s=[1.0, 12.0])
    assert blocked_share(made) == pytest.approx(10 / 20)  # from 1 to 11 s
    (found,) = remarks([made])
    assert found.startswith("for 50% of the run, prompts waited while prefill workers computed nothing: their blocks")


def test_a_worker_that_computes_one_prompt_while_another_waits_is_busy():
    made = apart(**HELD, admitted_s=[0.0, 11.0], prefill_end_s=[11.0, 12.0])
    assert blocked_share(made) == 0
    assert not remarks([made])


def test_a_worker_that_waits_for_prompts_is_idle():
    made = apart(prefill_queued_s=[0.0, 10.0], admitted_s=[0.0, 10.0], prefill_end_s=[1.0, 11.0])
    assert blocked_share(made) == 0


def test_prompts_that_wait_at_several_workers_count_for_each():
    made = apart(
        **HELD, prefill_worker=[0, 1], decode_blocks_s=[9.0, 9.0], admitted_s=[5.0, 0.0], prefill_end_s=[6.0, 1.0]
    )
    assert blocked_share(made) == pytest.approx(5 / 20 / 2)


def test_the_wait_for_blocks_of_a_decode_worker_is_not_the_prefill_workers():
    made = apart(**HELD, decode_blocks_s=[0.0, 11.0], admitted_s=[0.0, 11.0], prefill_end_s=[1.0, 12.0])
    assert blocked_share(made) == 0


def test_workers_that_do_everything_hold_nothing_for_others():
    assert blocked_share(run()) == 0


def test_what_happened_to_requests_is_counted_over_all_repeats_in_the_right_number():
    def said(*facts):
        return remarks([dataclasses.replace(run(), facts=each) for each in facts])

    [found] = said({"without_done": 1, "retried": 0})
    assert found.startswith("1 answer had no last event")
    [found] = said({"retried": 1})
    assert found.startswith("1 request was sent again on a new connection")
    many = said({"retried": 1, "without_usage": 1200}, {"retried": 2, "planned_answers": 1})
    assert [text[:34] for text in many[:3]] == [
        "1,200 answers had no usage: each e",
        "3 requests were sent again on a ne",
        "later turns repeated 0 answers of ",
    ]


@pytest.mark.parametrize("fact", [*COUNTED, *TRUE])
def test_each_fact_has_a_sentence(fact):
    [found] = remarks([dataclasses.replace(run(), facts={fact: 1})])
    assert not {"{", "}"} & set(found)
