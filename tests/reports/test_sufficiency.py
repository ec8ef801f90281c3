"""Too little data is said by name, and enough data is not."""

import numpy as np

from reports.figures.sufficiency import remarks
from reports.summarize import summarize
from reports.verdicts import headline
from tests.reports.runs import GROWN, run


def settled(count=600, workers=2, **changes):
    """A request a second that takes a second, half of its prompt cached."""
    arrivals = np.arange(count, dtype=float)
    columns = {
        "last_token_s": arrivals + 1,
        "done_s": arrivals + 1,
        "worker": np.arange(count) % workers,
        "cached_tokens": [50] * count,
    }
    return run(ttft=[0.5] * count, **columns | {"num_workers": workers} | changes)


def test_enough_data_is_not_remarked_on():
    assert remarks(settled()) == []
    assert remarks(settled(workers=20)) == []  # 30 for each


def test_few_requests_per_worker_are_said_with_the_number_that_is_enough():
    (said,) = remarks(settled(96, workers=8))
    assert said == (
        "each of 8 workers had 12 requests on average, so single placements decide its figures: use at least 240 requests "
        "(30 for each worker), with a longer trace or a larger --max-requests"
    )
    (one,) = remarks(settled(20, workers=1))
    assert one.startswith("its worker had 20 requests on average")


def test_it_is_said_in_the_summary_and_once_for_all_arms():
    summary = summarize([settled(96, workers=8), settled(96, workers=8, arm="b")])
    assert summary.as_json()["arms"]["a"]["remarks"][0].startswith("each of 8 workers had 12 requests")
    assert [said for said in headline.remarks(summary) if said.startswith("each arm: each of 8 workers")]


def test_what_differs_in_numbers_only_is_said_of_the_first_of_many_arms():
    arms = [settled(96 - number, workers=8, arm=name) for number, name in enumerate("abcd")]
    said = headline.remarks(summarize(arms))
    assert [line for line in said if "of 8 workers" in line] == [
        f"a, and 3 other arms with other numbers: {remarks(arms[0])[0]}"
    ]
    assert len([line for line in headline.remarks(summarize(arms[:2])) if "of 8 workers" in line]) == 2


def test_what_is_the_same_in_some_arms_is_said_once_with_their_names():
    """It would be wrong to say that their numbers differ."""
    arms = [settled(96 if arm in "abc" else 600, workers=8, arm=arm) for arm in "abcde"]
    said = headline.remarks(summarize(arms))
    assert [line for line in said if "of 8 workers" in line] == [f"each of a, b and c: {remarks(arms[0])[0]}"]


def test_arms_with_the_same_numbers_as_the_first_are_not_among_those_with_other_numbers():
    counts = {"a": 96, "b": 96, "c": 95, "d": 94, "e": 600}
    arms = [settled(count, workers=8, arm=arm) for arm, count in counts.items()]
    said = [line for line in headline.remarks(summarize(arms)) if "of 8 workers" in line]
    assert said == [f"each of a and b, and 2 other arms with other numbers: {remarks(arms[0])[0]}"]


def test_a_number_of_workers_that_changes_is_not_divided_by():
    assert remarks(settled(96, workers=8, fleet=GROWN)) == []


def test_a_run_of_a_few_lifetimes_was_never_steady():
    arrivals = np.arange(600) / 10
    (said,) = remarks(
        settled(intended_s=arrivals, admitted_s=arrivals, last_token_s=arrivals + 20, done_s=arrivals + 20)
    )
    assert said == (
        "requests arrived for 59.9 s, and one takes 20 s (p90), so the load was never steady: use a trace of at least 100 s "
        "(5 times that)"
    )


def test_a_closed_loop_needs_more_requests_not_seconds():
    """Streams of 10 requests that take 20 s each: two requests a stream arrive in 20 s, and six in 100 s."""
    arrivals = np.repeat([0.0, 20.0], 10)
    (said,) = remarks(
        settled(20, 1, intended_s=arrivals, done_s=arrivals + 20, worker=[None] * 20, facts={"streams": 10})
    )
    assert said == (
        "requests arrived for 20 s, and one takes 20 s (p90), so the load was never steady: use at least 60 requests, with a "
        "longer trace or a larger --max-requests"
    )
    arrivals = np.repeat(np.arange(6) * 20.0, 10)
    assert not remarks(
        settled(60, 1, intended_s=arrivals, done_s=arrivals + 20, worker=[None] * 60, facts={"streams": 10})
    )


def test_a_longer_trace_is_not_the_way_out_of_a_growing_queue():
    arrivals = np.arange(600) / 10
    waits = np.arange(600) / 10
    (said,) = remarks(settled(intended_s=arrivals, admitted_s=arrivals + waits, done_s=arrivals + waits + 1))
    assert said == (
        "requests arrived for 59.9 s, and one takes 54.9 s (p90), so the load was never steady: 62 requests waited at the "
        "start and 287 at the end, and they would become more in a longer trace: use more workers, or less load (--rate-scale)"
    )


def test_requests_that_all_come_at_once_are_a_burst_on_purpose():
    assert remarks(settled(intended_s=np.zeros(600), done_s=np.full(600, 20.0))) == []


def test_caches_that_still_fill_at_the_end_are_cold():
    (said,) = remarks(settled(cached_tokens=(np.arange(600) // 10).tolist()))
    assert said == (
        "its caches were still cold: the hit share was 9.5% in the first third of the requests, 29.5% in the second and "
        "49.5% in the last, so a longer run has more hits: use a longer trace, or start measuring later (--warmup-s)"
    )


def test_caches_that_filled_early_or_whose_hits_vary_are_not_cold():
    early = np.minimum(np.arange(600) // 4, 50)
    assert remarks(settled(cached_tokens=early.tolist())) == []
    varied = np.random.default_rng(0).integers(0, 100, 600)
    assert remarks(settled(cached_tokens=varied.tolist())) == []
    assert remarks(settled(cached_tokens=[None] * 600)) == []


def test_more_and_more_requests_in_flight_are_said_although_none_waits():
    arrivals = np.arange(600.0)
    done = arrivals + 1 + arrivals / 10
    (said,) = remarks(settled(last_token_s=done, done_s=done))
    assert said.startswith("requests in flight kept growing, from 1")
    assert "never became steady" in said


def test_a_trace_that_gets_busier_is_steady():
    arrivals = np.cumsum(np.linspace(1.5, 0.5, 600))
    assert (
        remarks(settled(intended_s=arrivals, admitted_s=arrivals, last_token_s=arrivals + 1, done_s=arrivals + 1)) == []
    )
