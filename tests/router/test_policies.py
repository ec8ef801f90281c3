"""Every policy's exact score, on numbers small enough to check by hand."""

import math
import random
from pathlib import Path

import pytest

from serving.router import ROUTER_MODES, Mode, Prompt, PromptBlocks, RankState, Router, RouterConfig, policies
from serving.router.books import RankBooks
from serving.router.candidates import Candidates
from serving.router.policies.policy import choose
from serving.router.tiers import BeyondGpu

SIZE = 4


def book(num_requests=0, prefill=0, blocks=0, decoding=0, context=0, prompts=0):
    made = RankBooks()
    made.num_requests, made.prefill_tokens, made.decode_blocks = num_requests, prefill, blocks
    made.num_decoding, made.context_tokens, made.prompt_tokens = decoding, context, prompts
    return made


# 18 tokens in blocks of 4: R = 5, of which 4 are full.
PROMPT = Prompt(18, PromptBlocks.of(("a", "b", "c", "d")), session="s")
# Worker 0 has 3 blocks and much to do, worker 1 one block, worker 2 nothing and nothing to do.
BOOKS = [
    book(num_requests=4, prefill=8, blocks=20, decoding=3, context=60, prompts=75),
    book(num_requests=2, prefill=4, blocks=6, decoding=1, context=10, prompts=16),
    book(),
]
OVERLAPS = [3, 1, 0]
COSTS = {"step_base_ms": 10.0, "step_prefill_us": 1000.0, "step_decode_us": 2000.0, "step_context_ns": 100_000.0}


def costs(mode, *, prompt=PROMPT, books=BOOKS, overlaps=OVERLAPS, states=None, beyond=None, **settings):
    policy = ROUTER_MODES[mode](RouterConfig(**settings), random.Random(3))
    workers, weights = list(range(len(books))), policy.tier_weights
    candidates = Candidates(
        workers,
        books,
        dict(enumerate(overlaps)),
        prompt,
        SIZE,
        states=states and dict(enumerate(states)),
        beyond_gpu=beyond and dict(enumerate(beyond)),
        weights=weights,
    )
    return list(policy.costs(candidates))


@pytest.mark.parametrize(
    ("mode", "settings", "expected"),
    [
        ("least-loaded", {}, [4, 2, 0]),
        ("least-tokens", {}, [8 + 60, 4 + 10, 0]),
        ("prefix-longest", {}, [-3 + 4e-6, -1 + 2e-6, 0]),
        # (Q + miss) / B + A + R
        ("kv", {}, [(8 + 6) / 4 + 25, (4 + 14) / 4 + 11, 18 / 4 + 5]),
        ("kv", {"kv_overlap_score_weight": 2.0}, [2 * 14 / 4 + 25, 2 * 18 / 4 + 11, 2 * 18 / 4 + 5]),
        ("dynamo-kv", {}, [2 + 5 - 3 + 25, 1 + 5 - 1 + 11, 5 + 5]),
        ("dynamo-kv-p8", {}, [8 * (2 + 5 - 3) + 25, 8 * 5 + 11, 8 * 5 + 5]),
        ("dynamo-kv", {"overlap_score_credit": 0.5}, [2 + 5 - 1.5 + 25, 1 + 5 - 0.5 + 11, 5 + 5]),
        # k = 1 / (1 + decay (Q - min Q) / B / R)
        (
            "dynamo-kv",
            {"overlap_score_credit_decay": 1.0},
            [7 - 3 / (1 + 2 / 5) + 25, 6 - 1 / (1 + 1 / 5) + 11, 10],
        ),
        ("dynamo-lmetric", {}, [(2 + 5 - 3) * 26, (1 + 5 - 1) * 12, 5 * 6]),
        ("lmetric", {}, [14 * 5, 18 * 3, 18]),
        ("lmetric-new", {}, [6 * 5, 14 * 3, 18]),
        ("llumnix", {}, [14 + 4e-6, 18 + 2e-6, 18]),
        ("prodstack-loadaware", {}, [(4 - 2) / 2 - 12 / 18, -4 / 18, (0 - 2) / 2]),
        ("sgl-cache-aware", {}, [-3, -1, 0]),
        ("aibrix-prefix", {}, [math.inf, 2e-6 - 1, math.inf]),
        ("eldr", {}, [4, math.inf, math.inf]),
        # Tp (Q + miss) + s (T0 + Td d + Tk C), one step
        ("jspt", COSTS, [0.014 + 0.010 + 0.006 + 0.006, 0.018 + 0.010 + 0.002 + 0.001, 0.018 + 0.010]),
        # the same in steps of 11 tokens less the decodes: ceil(14 / 8), ceil(18 / 10), ceil(18 / 11)
        ("jspt", COSTS | {"step_budget_tokens": 11}, [0.014 + 2 * 0.022, 0.018 + 2 * 0.013, 0.018 + 2 * 0.010]),
        (
            "marginal",
            COSTS | {"interference": 0.5, "expected_osl": 10},
            [
                0.036 + 0.5 * 0.001 * 6 * 3 + 10 * (0.0001 * 75 + 0.002 * 4),
                0.031 + 0.5 * 0.001 * 14 * 1 + 10 * (0.0001 * 16 + 0.002 * 2),
                0.028,
            ],
        ),
        # the same, and half of the expected answer's tokens, each slower for n requests by this one's context
        (
            "marginal-all",
            COSTS | {"interference": 0.5, "expected_osl": 10},
            [
                0.036 + 0.5 * 0.001 * 6 * 3 + 10 * (0.0001 * 75 + 0.002 * 4) + 5 * 4 * (0.0001 * 18 + 0.002),
                0.031 + 0.5 * 0.001 * 14 * 1 + 10 * (0.0001 * 16 + 0.002 * 2) + 5 * 2 * (0.0001 * 18 + 0.002),
                0.028,
            ],
        ),
    ],
)
def test_the_score_is_the_formula(mode, settings, expected):
    assert costs(mode, **settings) == pytest.approx(expected)


# Worker 1 has 2 blocks in host memory and 1 in the shared store beside the one on its GPU, worker 2 has 1 on its disks.
BEYOND = [BeyondGpu(0, 0, 0), BeyondGpu(2, 0, 1), BeyondGpu(0, 1, 0)]


@pytest.mark.parametrize(
    ("mode", "settings", "expected"),
    [
        # m = 3, 1 + 2 w_host + w_shared, w_disk
        ("kv", {}, [14 / 4 + 25, (22 - 4 * 3) / 4 + 11, (18 - 4 * 0.25) / 4 + 5]),
        (
            "kv",
            {"router_host_cache_hit_weight": 1.0, "router_disk_cache_hit_weight": 0.0, "shared_cache_multiplier": 0.25},
            [14 / 4 + 25, (22 - 4 * 3.25) / 4 + 11, 18 / 4 + 5],
        ),
        ("dynamo-kv", {}, [2 + 5 - 3 + 25, 1 + 5 - 3 + 11, 5 - 0.25 + 5]),
        # the credit is for blocks on the GPU
        ("dynamo-kv", {"overlap_score_credit": 0.5}, [2 + 5 - 1.5 + 25, 1 + 5 - 0.5 - 2 + 11, 5 - 0.25 + 5]),
        ("dynamo-lmetric", {}, [(2 + 5 - 3) * 26, (1 + 5 - 3) * 12, 4.75 * 6]),
        # 1 - load time / prefill time, never below 0
        (
            "kv-tiered",
            {"step_prefill_us": 100.0, "host_load_us_per_token": 20.0, "disk_load_us_per_token": 300.0}
            | {"shared_load_us_per_token": 60.0},
            [14 / 4 + 25, (22 - 4 * (1 + 2 * 0.8 + 0.4)) / 4 + 11, 18 / 4 + 5],
        ),
        ("llmd-weighted", {}, [-(2 * 3 / 5 + 2), -(2 * (1 + 1.6 + 1) / 5 + 2), -(2 / 5 + 2)]),
        # what need not be computed counts in full where a mode says nothing of tiers
        ("lmetric", {}, [14 * 5, 6 * 3, 14]),
        ("prefix-longest", {}, [-3 + 4e-6, -4 + 2e-6, -1]),
        # F + Tp (Q + miss) + s (T0 + Td d + Tk C)
        (
            "jspt",
            COSTS
            | {"host_load_us_per_token": 500.0, "disk_load_us_per_token": 700.0, "shared_load_us_per_token": 900.0},
            [0.036, 0.006 + 0.013 + 8 * 0.0005 + 4 * 0.0009, 0.014 + 0.010 + 4 * 0.0007],
        ),
    ],
)
def test_what_lies_beyond_the_gpu_counts_by_its_tier(mode, settings, expected):
    assert costs(mode, beyond=BEYOND, **settings) == pytest.approx(expected)


@pytest.mark.parametrize("mode", [mode for mode in ROUTER_MODES if not mode.startswith("oracle-")])
def test_a_mode_scores_alike_whether_nothing_or_nobody_is_beyond_the_gpu(mode):
    assert costs(mode, beyond=[BeyondGpu(0, 0, 0)] * 3) == pytest.approx(costs(mode))


def test_llm_d_weighs_prefix_usage_and_queue():
    states = [RankState(0.5, 4), RankState(0.25, 0), RankState(0.0, 2)]
    expected = [-(2 * 3 / 5 + 0.5 + 0), -(2 / 5 + 0.75 + 1), -(0 + 1 + 0.5)]
    assert costs("llmd-weighted", states=states) == pytest.approx(expected)
    assert costs("llmd-weighted") == pytest.approx([-(2 * 3 / 5 + 2), -(2 / 5 + 2), -2])


def test_sglang_gives_affinity_up_when_the_fleet_is_uneven():
    uneven = [book(num_requests=100), book(num_requests=10), book(num_requests=0)]
    assert costs("sgl-cache-aware", books=uneven) == [100, 10, 0]
    assert costs("sgl-cache-aware", overlaps=[1, 0, 0]) == [4, 2, 0]  # 4 of 18 tokens is less than 30 %


def test_aibrix_takes_the_least_loaded_when_requests_differ_by_more_than_eight():
    assert costs("aibrix-prefix", books=[book(num_requests=9), book(), book()]) == [9, 0, 0]
    assert costs("aibrix-prefix", overlaps=[0, 0, 0]) == [4, 2, 0]


def test_power_of_two_looks_at_two_workers():
    found = costs("p2c")
    assert found.count(math.inf) == 1
    assert [cost for cost in found if cost < math.inf] == [
        own for own, cost in zip([4, 2, 0], found, strict=True) if cost < math.inf
    ]


def test_a_session_stays_where_it_is_when_workers_come_and_go():
    homes = {}
    for number in range(200):
        ranks = costs("session", prompt=PROMPT._replace(session=f"s{number}"))
        homes[number] = min(range(3), key=ranks.__getitem__)
    assert min(list(homes.values()).count(worker) for worker in range(3)) > 40
    moved = 0
    for number, home in homes.items():
        ranks = costs("session", prompt=PROMPT._replace(session=f"s{number}"), books=BOOKS[:2], overlaps=[0, 0])
        moved += min(range(2), key=ranks.__getitem__) != home
    assert moved == list(homes.values()).count(2)  # only those whose worker left


def test_bounded_hashing_skips_full_workers():
    free = costs("chwbl", books=[book(), book(), book()])
    home = min(range(3), key=free.__getitem__)
    full = [book(num_requests=3 if worker == home else 1) for worker in range(3)]
    # ceil(1.25 (5 + 1) / 3) = 3: the home is full
    assert costs("chwbl", books=full)[home] == math.inf
    longer = Prompt(4000, PromptBlocks.of(tuple(range(1000))))
    same_start = Prompt(4000, PromptBlocks.of((*range(600), *range(5000, 5400))))
    assert costs("chwbl", prompt=longer) == costs("chwbl", prompt=same_start)  # 1024 tokens are 256 blocks


def test_dualmap_leaves_the_prefix_when_it_would_wait_too_long():
    idle = [book(), book()]
    assert costs("dualmap", books=idle, overlaps=[3, 0]) == [0.0, 1.0]
    busy = [book(prefill=10_000), book()]
    assert costs("dualmap", books=busy, overlaps=[3, 0], ttft_slo_s=0.05, **COSTS) == [1.0, 0.0]


def test_preble_exploits_what_is_cached_and_explores_otherwise():
    policy = ROUTER_MODES["preble-e2"](RouterConfig(**COSTS, expected_osl=1), random.Random(0))
    even = [book(), book(), book()]

    def candidates(overlaps, now):
        return Candidates([0, 1, 2], even, dict(enumerate(overlaps)), PROMPT, SIZE, now=now)

    first = candidates([3, 0, 0], 0.0)
    assert policy.costs(first) == [0.0, math.inf, math.inf]
    explored = candidates([2, 0, 0], 0.0)  # 8 of 18 tokens: less is cached than not
    assert list(policy.costs(explored)) == pytest.approx([0.010, 0.018, 0.018])
    policy.routed(explored, 0)
    again = policy.costs(candidates([2, 0, 0], 1.0))
    assert again[0] == pytest.approx(0.020)  # its prefill time stays in the window ...
    assert policy.costs(candidates([2, 0, 0], 200.0))[0] == pytest.approx(0.010)  # ... for three minutes


def test_modes_take_additions():
    mode = Mode.parse("lmetric+eps(5)+temp(0.5)+stale(250)")
    assert (mode.base, mode.eps, mode.temp, mode.stale, mode.late) == ("lmetric", 5.0, 0.5, 250.0, 0.0)
    for name, problem in (
        ("best", "router_mode 'best' is unknown"),
        ("kv+fast(1)", r"'fast\(1\)' cannot be added"),
        ("kv+eps", "'eps' cannot be added"),
        ("kv+wspt(1)", r"add late"),
        ("kv+bound(" + "9" * 400 + ")", r"bound\(9+\)' is out of range; expected a number from 0 to 1,000,000,000"),
        ("kv+eps(" + "9" * 400 + ")", r"eps\(9+\)' is out of range; expected a number from 0 to 1,000,000,000"),
    ):
        with pytest.raises(ValueError, match=problem):
            Mode.parse(name)


def test_tolerance_takes_any_within_a_share_of_the_range():
    rng = random.Random(1)
    assert {choose([0.0, 4.0, 100.0], 0.0, rng, 0.05) for _ in range(50)} == {0, 1}
    assert {choose([0.0, math.inf, 1.0], 1.0, rng) for _ in range(50)} == {0, 2}


def router(mode, workers=2, **settings):
    core = Router(mode, RouterConfig(**settings), block_size=SIZE, rng=random.Random(1))
    for worker in range(workers):
        core.add_rank(worker)
    return core


@pytest.mark.parametrize("kind", [*ROUTER_MODES.values()], ids=list(ROUTER_MODES))
def test_a_mode_of_ones_own_may_derive_from_any_mode(kind, tmp_path):
    # Compiled (DYNABENCH_COMPILE=1 .ci/installed tests/router), a class refuses this unless it is marked.
    (tmp_path / "mine.py").write_text(
        f"from {kind.__module__} import {kind.__name__}\n"
        f"class Mine({kind.__name__}):\n"
        "    def costs(self, candidates):\n"
        "        return [float(-slot) for slot in candidates.slots]\n"
    )
    core = router(f"{tmp_path / 'mine.py'}:Mine", 3)
    assert isinstance(core.policy, kind)
    assert core.pick("r", Prompt(8, PromptBlocks.of(("x", "y"))), now=0.0).slot == 2


@pytest.mark.parametrize("kind", [*ROUTER_MODES.values()], ids=list(ROUTER_MODES))
def test_a_mode_is_marked_so_that_others_may_derive_from_it(kind):
    source = Path(policies.__path__[0], f"{kind.__module__.rpartition('.')[2]}.py").read_text()
    assert f"@mypyc_attr(allow_interpreted_subclasses=True)\nclass {kind.__name__}(" in source


def test_stale_loads_are_those_of_the_last_poll():
    core = router("least-tokens+stale(1000)", 3)
    prompt = Prompt(8, PromptBlocks.of(("x", "y")))
    assert {core.pick(number, prompt, now=0.1 * number).slot for number in range(9)} >= {0, 1, 2}  # all look idle
    loads = [core.load(worker).num_requests for worker in range(3)]
    after = core.pick("next", prompt, now=2.0).slot
    assert loads[after] == min(loads)


def test_stale_reports_of_the_workers_are_those_of_the_last_poll():
    core, prompt = router("llmd-weighted+stale(1000)", 2), Prompt(8, PromptBlocks.of(("x", "y")))

    def report(waiting):
        for worker, count in enumerate(waiting):
            core.on_load(worker, 0.0, count)

    report([9, 0])
    assert core.pick("first", prompt, now=0.0).slot == 1
    report([0, 9])
    assert core.peek(prompt, now=0.9).slot == 1
    assert core.pick("within", prompt, now=0.9).slot == 1
    core.add_rank(2)
    core.on_load(2, 0.0, 0)
    assert (
        core.peek(prompt, now=0.95).costs[2] == core.peek(prompt, now=0.95).costs[1]
    )  # a new one's report is its first
    core.remove_rank(2)
    assert core.pick("after", prompt, now=1.0).slot == 0


def test_a_predicted_prefix_counts_until_it_expires():
    core = router("prefix-longest+predict(5)")
    prompt = Prompt(8, PromptBlocks.of(("x", "y")))
    home = core.pick("r1", prompt, now=0.0)
    assert core.pick("r2", prompt, now=1.0).scored.num_found(home.slot) == 2
    assert core.pick("r3", prompt, now=20.0).best_blocks == 0


def released(core, now):
    """Return the requests that wait at the router no longer."""
    ids = []
    while (held := core.next_held(now)) is not None and core.release(held[0], now) is not None:
        ids.append(held[0])
    return ids


def test_late_binding_holds_requests_until_the_queue_is_short():
    core = router("llumnix+late(8)", 1)
    long, short = Prompt(12, PromptBlocks.of(("a", "b", "c"))), Prompt(4, PromptBlocks.of(("z",)))
    assert core.place("r1", long, 0.0).slot == 0
    assert core.place("r2", long, 0.1) is None
    assert core.place("r3", short, 0.2) is None
    assert core.num_held == 2
    assert released(core, 0.3) == []
    core.on_first_token("r1")
    assert released(core, 0.4) == ["r2"]  # whose 12 tokens fill the queue again
    core.on_first_token("r2")
    assert released(core, 0.5) == ["r3"]


def test_held_requests_go_by_size_and_age():
    core = router("llumnix+late(8)+wspt(0.001)", 1)
    long, short = Prompt(12, PromptBlocks.of(("a", "b", "c"))), Prompt(4, PromptBlocks.of(("z",)))
    core.place("r1", long, 0.0)
    core.place("r2", long, 0.1)
    core.place("r3", short, 0.2)
    core.on_first_token("r1")
    assert released(core, 0.4) == ["r3", "r2"]
