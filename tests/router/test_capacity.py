"""How many requests a worker may have before it is full: small histories of load reports, by hand."""

import pytest

from serving.router import Prompt, PromptBlocks
from serving.router.decision import AllFullError
from tests.router.test_router import prompt, router

LONG = Prompt(4, PromptBlocks.of(("a",)))


def report(core, worker=0, *, running=0, waiting=0, most=4, usage=0.5, now=0.0):
    core.on_load(worker, usage, waiting, num_running=running, max_num_seqs=most, now=now)


def fill(core, now=0.0, limit=1000):
    """Send requests until one is refused; return how many are in flight."""
    for number in range(limit):
        try:
            core.pick(("fill", now, number), prompt("a"), now)
        except AllFullError:
            break
    return core.load(0).num_requests


def end(core, *ids):
    """End requests that had their first token."""
    for id in ids:
        core.on_first_token(id)
        core.on_finish(id)


@pytest.mark.parametrize(("depth", "accepted"), [(0.0, 4), (0.5, 6), (1.0, 8), (2.5, 14)])
def test_as_many_may_wait_as_the_depth_allows_for_each_that_runs(depth, accepted):
    core = router("kv", 1, max_queue_depth=depth)
    report(core)
    assert fill(core) == accepted


def test_by_default_twice_max_num_seqs_are_taken_and_none_is_refused_after_one_has_ended():
    core = router("round-robin", 1)
    report(core)
    assert fill(core) == 8
    end(core, ("fill", 0.0, 0))
    core.pick("next", prompt("a"), 1.0)
    with pytest.raises(AllFullError):
        core.pick("one more", prompt("a"), 1.0)


def test_without_a_limit_or_a_report_of_max_num_seqs_nothing_is_refused():
    core = router("kv", 1, max_queue_depth=None)
    report(core, running=4, waiting=100)
    assert fill(core, limit=200) == 200
    core = router("kv", 1)
    assert fill(core, limit=200) == 200
    report(core, running=4, waiting=196, most=0)
    assert fill(core, now=1.0, limit=100) == 300


def test_a_full_worker_is_left_out_while_another_has_room():
    core = router("kv", 2)
    core.index.store(0, ["a"])
    report(core, 0, most=1)
    report(core, 1, most=2)
    assert [core.pick(number, prompt("a"), 0.0).slot for number in range(6)].count(0) == 2
    with pytest.raises(AllFullError):
        core.pick("no room", prompt("a"), 0.0)
    with pytest.raises(AllFullError):
        core.pick("no room there", prompt("a"), 0.0, only=1)


def test_what_other_routers_sent_counts():
    core = router("kv", 1)
    report(core)
    for number in range(8):
        core.book(("other router", number), 0, LONG, 4)
    with pytest.raises(AllFullError):
        core.pick("r", prompt("a"), 0.0)
    core.on_finish(("other router", 0))
    assert core.pick("r", prompt("a"), 0.0).slot == 0


def test_a_request_that_was_accepted_before_is_never_refused_but_prefers_room():
    core = router("kv", 2)
    report(core, 0, most=1)
    report(core, 1, most=1)
    for number in range(2):
        core.pick(number, prompt("a"), 0.0, only=0)
    assert core.pick("moved", prompt("a"), 0.0, is_refusable=False).slot == 1
    core.pick("another", prompt("a"), 0.0)
    assert core.pick("moved too", prompt("a"), 0.0, None, frozenset({0}), is_refusable=False).slot == 1


def test_a_burst_into_an_idle_engine_is_taken_while_its_batch_fills():
    core = router("kv", 1)
    report(core, most=256)
    for number in range(100):
        core.pick(number, prompt("a"), 0.0)
    for turn in range(1, 20):  # one prompt in a report's time, and none has ended yet
        report(core, running=turn, waiting=100 - turn, most=256, now=0.25 * turn)
        core.pick(("later", turn), prompt("a"), 0.25 * turn)


def test_when_a_batch_has_come_and_gone_with_a_queue_what_ran_at_most_is_the_capacity():
    core = router("kv", 1)
    for number in range(20):
        core.pick(number, prompt("a"), 0.0)
    report(core, running=2, waiting=18, most=256, now=1.0)
    end(core, 0, 1)
    report(core, running=3, waiting=15, most=256, now=2.0)
    assert core.pick("two ended, three ran", prompt("a"), 2.0)
    end(core, 2)
    report(core, running=2, waiting=16, most=256, now=3.0)
    with pytest.raises(AllFullError):
        core.pick("three ended", prompt("a"), 3.0)
    end(core, *range(3, 16))
    assert fill(core, now=3.0) == 6


def test_a_queue_with_no_kv_blocks_left_is_put_down_to_them_at_once():
    core = router("kv", 1)
    report(core, running=3, waiting=1, most=256, usage=0.95, now=1.0)
    assert fill(core, limit=10) == 10
    report(core, running=3, waiting=7, most=256, usage=0.95, now=1.25)
    assert fill(core, now=1.25) == 10
    end(core, *(("fill", 0.0, number) for number in range(5)))
    assert fill(core, now=1.5) == 6


def test_requests_that_never_ran_do_not_count_as_a_batch_that_has_gone():
    core = router("kv", 1)
    for number in range(20):
        core.pick(number, prompt("a"), 0.0)
    report(core, running=2, waiting=18, most=256, now=1.0)
    for number in range(10):  # clients that hung up
        core.on_finish(number)
    report(core, running=2, waiting=8, most=256, now=2.0)
    assert core.pick("next", prompt("a"), 2.0)


def learned(most=256):
    """Return a router that has learned that its worker runs two at once."""
    core = router("kv", 1)
    report(core, running=2, waiting=1, most=most, usage=1.0, now=1.0)
    report(core, running=2, waiting=1, most=most, usage=1.0, now=2.0)
    return core


def test_while_nothing_waits_more_is_tried_and_what_runs_can_run():
    core = learned()
    report(core, running=2, now=3.0, most=256)
    assert fill(core) == 8
    report(core, running=5, waiting=3, now=4.0, most=256)
    assert fill(core, now=4.0) == 10


def test_an_idle_worker_forgets_what_it_was_taken_to_run():
    core = learned()
    report(core, most=256, now=3.0)
    assert fill(core) == 512


def test_the_limit_is_never_more_than_max_num_seqs_says():
    core = learned(most=3)
    for turn in range(5):
        report(core, running=3, most=3, now=3.0 + turn)
    assert fill(core) == 6


def test_short_requests_may_wait_longer_than_one_takes():
    core = router("kv", 1)
    for number in range(100):
        core.pick(number, prompt("a"), 0.0)
    report(core, running=1, waiting=99, most=256, now=1.0)
    end(core, *range(40))
    report(core, running=1, waiting=59, most=256, now=2.0)  # 40 a second: 10 wait for a quarter of one
    end(core, *range(40, 100))
    assert fill(core, now=2.0) == 11


def test_a_worker_that_comes_back_starts_afresh():
    core = learned()
    core.remove_rank(0)
    core.add_rank(0)
    assert fill(core, limit=50) == 50


def test_the_depth_is_not_negative():
    with pytest.raises(ValueError, match="max_queue_depth must be at least 0, not -1"):
        router("kv", 1, max_queue_depth=-1)
