"""Where TTFT goes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.figures.metrics import per_request
from reports.figures.split import PARTS, Split, split_ttft
from tests.reports.runs import apart, run


def test_a_request_that_two_workers_served_has_five_parts():
    assert split_ttft([apart()]) == Split(2, 5.0, 1.0, 1.0, 1.0, 1.0, 1.0, apart=1.0)
    assert list(split_ttft([apart()]).parts) == list(PARTS)


def test_where_one_worker_does_all_the_prefill_includes_the_first_step():
    found = split_ttft([run(sent_s=[0.0, 1.0], admitted_s=[0.25, 1.25], ttft=[1.0, 2.0])])
    assert found == Split(2, 1.5, 0.25, 1.25)
    assert found.parts == {"queue": 0.25, "prefill": 1.25}


def test_a_request_that_stays_with_its_decode_worker_has_no_transfer():
    """The second has its first token 5 s after it was sent, as the first has, and waited a second."""
    found = split_ttft([apart(prefill_worker=[0, None])])
    assert found == Split(2, 5.0, 1.0, (1.0 + 4.0) / 2, 0.5, 0.5, 0.5, apart=0.5)


def test_destination_first_the_wait_for_blocks_lies_before_the_prefill():
    times = {"decode_queued_s": [0.0, 10.0], "decode_blocks_s": [0.75, 10.75], "transfer_start_s": [2.0, 12.0]}
    found = split_ttft([apart(**times)])
    assert found == Split(2, 5.0, 0.25, 1.0, 0.75, 2.0, 1.0, apart=1.0, blocks_first=True)
    assert list(found.parts) == ["decode_queue", "queue", "prefill", "transfer", "first_step"]


def test_what_travels_during_the_prefill_is_part_of_the_prefill():
    found = split_ttft([apart(transfer_start_s=[1.5, 11.5])])
    assert (found.prefill, found.decode_queue, found.transfer) == (1.0, 0.0, 2.0)


def test_the_kv_that_comes_after_the_first_token_is_not_waited_for():
    found = split_ttft([apart(first_token_s=[3.5, 13.5])])
    assert (found.transfer, found.first_step) == (0.5, 0.0)


def test_nobody_knows_where_the_ttft_of_a_server_went():
    assert split_ttft([run(admitted_s=[None, None])]) is None
    assert split_ttft([run(error=["no", "no"])]) is None


def test_repeats_are_pooled():
    assert split_ttft([apart(), apart(prefill_worker=[None, None])]).apart == 0.5


time = st.floats(0, 100) | st.none()


@given(st.lists(st.tuples(*[time] * 5, st.floats(0, 100), st.booleans()), min_size=1, max_size=5))
def test_the_parts_add_up_to_the_mean_ttft_whatever_is_known(rows):
    names = ("decode_queued_s", "decode_blocks_s", "prefill_end_s", "transfer_start_s", "transfer_end_s")
    columns = {name: [row[place] for row in rows] for place, name in enumerate(names)}
    made = run(
        ttft=[200.0] * len(rows),
        sent_s=[0.0] * len(rows),
        admitted_s=[row[5] for row in rows],
        prefill_worker=[1 if row[6] else None for row in rows],
        **columns,
    )
    found = split_ttft([made])
    assert min(found.parts.values()) >= 0
    assert sum(found.parts.values()) == pytest.approx(found.ttft)
    assert found.ttft == pytest.approx(np.nanmean(per_request(made.requests)["ttft"]))
