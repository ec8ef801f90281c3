"""Adapter affinity: a request goes to a worker that has its LoRA adapter, unless that has much more to do than others."""

import random

import pytest

from serving.router import Prompt, PromptBlocks, Router, RouterConfig
from serving.router.policies.modes import Mode


def router(mode="least-loaded+adapter(2)", ranks=4):
    made = Router(mode, RouterConfig(), block_size=16, rng=random.Random(3))
    for slot in range(ranks):
        made.add_rank(slot)
    return made


def send(made, *adapters, ends=True):
    """Place requests of adapters, each when the one before has ended if it `ends`; return their ranks."""
    slots = []
    for number, adapter in enumerate(adapters):
        id = (adapter, number, len(made._booked))
        slots.append(made.pick(id, Prompt(20, PromptBlocks.of(()), None, adapter), 0.0).slot)
        if ends:
            made.on_finish(id)
    return slots


def test_requests_of_an_adapter_stay_at_one_worker_if_it_is_not_busy():
    first, *others = send(router(), *["a"] * 8)
    assert set(others) == {first}


def test_a_new_adapter_goes_to_a_worker_with_room_for_one_more():
    made = router(ranks=2)
    slots = dict(zip("abcd", send(made, *"abcd"), strict=True))
    assert sorted(slots.values()) == [0, 0, 1, 1]
    assert send(made, *"abcd") == [slots[name] for name in "abcd"]


def test_the_adapter_that_was_asked_for_least_recently_makes_room():
    made = router(ranks=1)
    send(made, "a", "b", "a", "c")
    assert list(made._adapters._of[0]) == ["a", "c"]


def test_an_adapter_that_keeps_its_worker_busier_than_others_is_at_several():
    slots = send(router(), *["hot"] * 40, ends=False)
    counts = [slots.count(slot) for slot in range(4)]
    assert max(counts) <= 13  # 1.25 times the mean, rounded up
    assert min(counts) > 0


def test_requests_for_the_model_itself_go_where_the_mode_sends_them():
    made = router(ranks=2)
    send(made, "a", "b")
    assert set(send(made, *[""] * 4, ends=False)) == {0, 1}


def test_a_worker_that_leaves_takes_its_adapters_along():
    made = router(ranks=2)
    (slot,) = send(made, "a")
    made.remove_rank(slot)
    assert send(made, "a") == [1 - slot]
    assert slot not in made._adapters._of


def test_any_mode_can_have_it():
    for mode in ("kv+adapter(4)", "random+adapter(1)+eps(5)", "session+bound(1.5)+adapter(8)"):
        assert Mode.parse(mode).adapter >= 1


@pytest.mark.parametrize("number", ["0", "1.5"])
def test_a_number_of_slots_that_no_worker_has_is_refused(number):
    with pytest.raises(ValueError, match=r"adapter\(.*\); expected a whole number of at least 1, as --max-loras"):
        Mode.parse(f"kv+adapter({number})")
