"""Many ranks are scored all at once, exactly as one after another."""

import random

import pytest

from serving.router import ROUTER_MODES, Prompt, PromptBlocks, Router, RouterConfig

MODES = [mode for mode in ROUTER_MODES if not mode.startswith("oracle-")]
KNOWN = ("random", "round-robin", "p2c")
ORDERED = ("least-loaded", "least-tokens", "kv", "kv-tiered", "dynamo-kv", "dynamo-kv-p8", "llumnix", "prefix-longest")
"""The modes of which some decisions are clear without the cost of every rank: all of them, and most."""

NUM_RANKS, NUM_STEPS, BLOCK_SIZE = 9, 400, 4


def routers(mode, **settings):
    """Return one that scores its ranks one by one, and one that scores them all at once."""
    return [
        Router(mode, RouterConfig(**settings), block_size=BLOCK_SIZE, rng=random.Random(5), many_ranks=many)
        for many in (10**9, 1)
    ]


class Traffic:
    """Lets the same random things happen to routers, and compares what they choose."""

    def __init__(self, seed, routers):
        self.rng = random.Random(seed)
        self.routers = routers
        self.now = 0.0
        self.number = self.num_unscored = 0
        self.flying = []
        self.slots = []
        for _ in range(NUM_RANKS):
            self.join()

    def step(self):
        self.now += self.rng.random()
        kinds = {
            self.ask: 8,
            self.first_token: 5,
            self.end: 4,
            self.report: 1,
            self.store: 4,
            self.leave: 0.3,
            self.join: 0.3,
        }
        self.rng.choices(list(kinds), list(kinds.values()))[0]()

    def do(self, name, *arguments, **more):
        return [getattr(router, name)(*arguments, **more) for router in self.routers]

    def join(self):
        slot = self.slots[-1] + 1 if self.slots else 0
        self.slots.append(slot)
        self.do("add_rank", slot)

    def leave(self):
        if len(self.slots) > 3:
            self.do("remove_rank", self.slots.pop(self.rng.randrange(len(self.slots))))

    def prompt(self):
        group, shared, own = self.rng.randrange(3), self.rng.randrange(12), self.rng.randrange(3)
        ids = [(group, place) for place in range(shared)] + [(-self.number, place) for place in range(own)]
        tokens = BLOCK_SIZE * len(ids) + self.rng.randrange(1, BLOCK_SIZE)
        return Prompt(tokens, PromptBlocks.of(ids), session=self.rng.choice([None, "a", "b"]))

    def ask(self):
        self.number += 1
        self.flying.append(self.number)
        only = self.rng.choice([None] * 9 + self.slots[:1])
        avoid = frozenset(self.rng.sample(self.slots, self.rng.choice([0, 0, 0, 1])))
        wants_costs = self.rng.random() < 0.2
        by_one, at_once = self.do("pick", self.number, self.prompt(), self.now, only, avoid, wants_costs=wants_costs)
        assert at_once[:5] == by_one[:5]
        if len(at_once.costs):
            assert at_once.candidates == by_one.candidates
        else:
            assert not wants_costs
            assert by_one.scored.slots == at_once.scored.slots
            self.num_unscored += 1

    def first_token(self):
        if self.flying:
            self.do("on_first_token", self.rng.choice(self.flying))

    def end(self):
        if self.flying:
            self.do("on_finish", self.flying.pop(self.rng.randrange(len(self.flying))))

    def report(self):
        self.do("on_load", self.rng.choice(self.slots), self.rng.random(), self.rng.randrange(5))

    def store(self):
        slot, ids, medium = (
            self.rng.choice(self.slots),
            self.prompt().blocks.ids,
            self.rng.choice(["GPU", "CPU", "STORAGE"]),
        )
        for router in self.routers:
            if router.index is not None and medium == "GPU":
                router.index.store(slot, ids)
            elif router.index is not None:
                router.index.tiers.store(slot, medium, ids, 0, len(ids), 1)


@pytest.mark.parametrize("addition", ["", "+eps(5)", "+temp(0.2)", "+bound(1.25)", "+predict(5)", "+stale(500)"])
@pytest.mark.parametrize("mode", MODES)
def test_ranks_scored_at_once_cost_what_they_cost_one_by_one(mode, addition):
    traffic = Traffic(f"{mode}{addition}", routers(mode + addition))
    for _ in range(NUM_STEPS):
        traffic.step()
    assert traffic.number > NUM_STEPS / 5
    if mode not in KNOWN + ORDERED or addition in ("+eps(5)", "+temp(0.2)", "+stale(500)"):
        assert not traffic.num_unscored
    elif mode in KNOWN or addition != "+bound(1.25)":  # an order is of all ranks
        assert traffic.num_unscored > traffic.number / 2


def test_loads_that_rounding_makes_one_cost_are_ties():
    for size in (3, 4, 7):
        traffic = Traffic(size, [
            Router("kv", RouterConfig(kv_overlap_score_weight=0.3), block_size=size, rng=random.Random(5), many_ranks=many)
            for many in (10**9, 1)
        ])  # fmt: skip
        for _ in range(NUM_STEPS):
            traffic.step()
        assert traffic.num_unscored


def test_decay_and_tokens_that_one_step_may_compute_are_seen_alike():
    for mode, settings in (
        ("dynamo-kv", {"overlap_score_credit_decay": 1.0}),
        ("marginal", {"step_budget_tokens": 11}),
        ("kv", {"use_kv_events": True, "router_host_cache_hit_weight": 0.3}),
    ):
        traffic = Traffic(mode, routers(mode, **settings))
        for _ in range(NUM_STEPS):
            traffic.step()


def test_ranks_that_become_many_keep_what_was_booked():
    router = Router("kv", RouterConfig(), block_size=BLOCK_SIZE, rng=random.Random(5), many_ranks=3)
    for slot in range(2):
        router.add_rank(slot)
    prompt = Prompt(8, PromptBlocks.of(("a", "b")))
    first = router.pick("r1", prompt, 0.0).slot
    router.add_rank(2)
    costs = router.pick("r2", prompt, 0.0, wants_costs=True).costs
    assert list(costs) == [(8 + 8) / 4 + 2 if slot == first else 8 / 4 + 2 for slot in range(3)]


def test_a_mode_that_changes_only_the_costs_of_another_is_asked_for_them(tmp_path):
    (tmp_path / "last.py").write_text("""
from serving.router.policies.load import RoundRobin

class Last(RoundRobin):
    description = "the last"

    def costs(self, candidates):
        return [-slot for slot in candidates.slots]
""")
    for router in routers(str(tmp_path / "last.py")):
        for slot in range(4):
            router.add_rank(slot)
        assert router.pick("r", Prompt(8, PromptBlocks.of(("a", "b"))), 0.0).slot == 3


def test_a_cost_may_be_the_same_for_all(tmp_path):
    (tmp_path / "longest.py").write_text("""
from serving.router import Policy

class Longest(Policy):
    description = "most is cached there"

    def cost(self, asked, books, cached):
        return -cached.matched
""")
    for router in routers(str(tmp_path / "longest.py")):
        for slot in range(3):
            router.add_rank(slot)
        assert list(router.pick("r", Prompt(8, PromptBlocks.of(("a", "b"))), 0.0).costs) == [0, 0, 0]
