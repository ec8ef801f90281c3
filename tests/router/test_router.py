import random

import pytest

from serving.router import ROUTER_MODES, Mode, Prompt, PromptBlocks, Router, RouterConfig, check_registered_mode
from serving.router.decision import NoWorkersError
from serving.router.policies.policy import choose


def router(mode, num_workers=3, *, block_size=4, **settings):
    core = Router(mode, RouterConfig(**settings), block_size=block_size, rng=random.Random(1))
    for worker in range(num_workers):
        core.add_rank(worker)
    return core


def prompt(*ids, tail=0):
    return Prompt(4 * len(ids) + tail, PromptBlocks.of(ids))


def test_kv_costs_are_prefill_blocks_plus_decode_blocks():
    core = router("kv")
    core.index.store(0, ["a", "b", "c"])
    core.index.store(1, ["a"])
    decision = core.pick("r", prompt("a", "b", "c", "d", tail=2), now=0.0)
    # 18 tokens: 4.5 blocks of prefill less the overlap, and 5 blocks held.
    assert decision.costs == [4.5 - 3 + 5, 4.5 - 1 + 5, 4.5 + 5]
    assert decision.scored.found_blocks == [3, 1, 0]
    assert (decision.slot, decision.overlap_blocks) == (0, 3)


def test_what_was_sent_counts_as_load_until_it_ends():
    core = router("kv", 2)
    first = core.pick("r1", prompt("a", "b"), now=0.0).slot
    other = 1 - first
    assert core.load(first).prefill_tokens == 8
    assert core.load(first).decode_blocks == 2
    assert core.pick("r2", prompt("x", "y"), now=0.0).slot == other
    core.on_first_token("r1")
    core.on_first_token("r1")
    assert (core.load(first).prefill_tokens, core.load(first).decode_blocks) == (0, 2)
    core.on_finish("r1")
    core.on_finish("r1")
    assert (core.load(first).prefill_tokens, core.load(first).decode_blocks, core.load(first).num_requests) == (0, 0, 0)


def test_blocks_shared_by_requests_in_flight_count_once():
    core = router("kv", 1)
    core.pick("r1", prompt("a", "b", tail=1), now=0.0)
    core.pick("r2", prompt("a", "c"), now=0.0)
    assert core.load(0).decode_blocks == 4
    core.on_finish("r1")
    assert core.load(0).decode_blocks == 2


def test_weight_zero_balances_decode_blocks_alone():
    core = router("kv", 2, kv_overlap_score_weight=0.0)
    assert core.index is None
    busy = core.pick("r1", prompt("a", "b"), now=0.0).slot
    assert core.pick("r2", prompt("x"), now=0.0).slot == 1 - busy


def test_without_events_the_router_remembers_what_it_routed():
    core = router("kv", 2, use_kv_events=False)
    where = core.pick("r1", prompt("a", "b", "c"), now=0.0).slot
    core.on_finish("r1")
    decision = core.pick("r2", prompt("a", "b", "c", "d"), now=1.0)
    assert decision.scored.num_found(where) == 3
    core.on_finish("r2")
    assert core.pick("r3", prompt("a", "b"), now=200.0).scored.found_blocks == [0, 0]


def test_round_robin_takes_turns_and_least_loaded_the_emptiest():
    core = router("round-robin")
    assert [core.pick(number, prompt("a"), now=0.0).slot for number in range(5)] == [0, 1, 2, 0, 1]
    core = router("least-loaded")
    assert {core.pick(number, prompt("a"), now=0.0).slot for number in range(3)} == {0, 1, 2}


def test_ties_are_broken_at_random_and_temperature_spreads():
    rng = random.Random(0)
    assert {choose([1.0, 1.0, 2.0], 0.0, rng) for _ in range(50)} == {0, 1}
    counts = [0, 0]
    for _ in range(4000):
        counts[choose([10.0, 30.0], 0.5, rng)] += 1
    assert counts[1] / 4000 == pytest.approx(0.1192, abs=0.02)  # 1 / (1 + e^2)


def test_workers_that_failed_a_request_are_its_last_choice():
    core = router("least-loaded", num_workers=3)
    picked = [core.pick(place, prompt(1), 0.0, None, frozenset({0, 2})).slot for place in range(4)]
    assert picked == [1, 1, 1, 1]
    assert core.pick(9, prompt(1), 0.0, None, frozenset({0, 1, 2})).slot in (0, 2)


def test_a_removed_worker_is_forgotten():
    core = router("kv", 1)
    core.index.store(0, ["a"])
    core.pick("r1", prompt("a"), now=0.0)
    core.remove_rank(0)
    core.on_finish("r1")
    assert len(core.index) == 0
    with pytest.raises(NoWorkersError):
        core.pick("r2", prompt("a"), now=0.0)


@pytest.mark.parametrize("mode", [mode for mode in ROUTER_MODES if not mode.startswith("oracle-")])
def test_every_mode_has_a_description_and_picks(mode):
    assert ROUTER_MODES[mode].description
    decision = router(mode).pick("r", prompt("a"), now=0.0)
    assert len(decision.candidates) == 3


def test_an_unknown_mode_is_named():
    with pytest.raises(ValueError, match="router_mode 'best' is unknown; expected one of random"):
        router("best")


OWN = """
from serving.router import Candidates, Policy

class Mine(Policy):
    needs_load = False

    def costs(self, candidates: Candidates):
        return {costs}
"""


def own(tmp_path, costs):
    path = tmp_path / "mine.py"
    path.write_text(OWN.format(costs=costs))
    return path


def test_a_mode_of_the_users_own_is_named_by_its_file(tmp_path):
    path = own(tmp_path, "[-slot for slot in candidates.slots]")
    assert router(str(path)).pick("r", prompt("a"), now=0.0).slot == 2
    assert Mode.parse(f"{path}:Mine+eps(5)").eps == 5


def test_a_mode_of_the_users_own_must_cost_each_worker(tmp_path):
    core = router(str(own(tmp_path, "[1.0]")))
    with pytest.raises(ValueError, match="the router mode returned 1 costs for 3 workers"):
        core.pick("r", prompt("a"), now=0.0)


def test_a_worker_cannot_ask_for_a_mode_in_a_file(tmp_path):
    with pytest.raises(ValueError, match="a worker cannot ask for a mode in a file; give it to the frontend"):
        check_registered_mode(f"{own(tmp_path, '[]')}+eps(5)")
