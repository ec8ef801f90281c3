"""What a plan makes of points that are known: which of several layouts it chooses, and what it says of it."""

import msgspec
import pytest

from dynabench.arm import Settings
from dynabench.capacity.findings import Findings
from dynabench.capacity.floors import Floor
from dynabench.capacity.search import Question
from dynabench.capacity.settings import PlanConfig
from dynabench.deployment.description import Deployment, Pool
from dynabench.experiment.settings import ExperimentConfig
from mocker.timing.config import TimingConfig
from reports.capacity.answer import Alternative, PlanAnswer, Ranked, grids, modes_told, sizes_told
from reports.charts import plan
from reports.figures.outcomes import Outcome
from reports.key import key_of
from tests.reports.test_sweep_report import point

SETTINGS = Settings(Deployment(pools=(Pool(timing=TimingConfig(model="Qwen/Qwen3-8B", gpu="h100")),)))
WIDE, NARROW = Question(0, 2), Question(1, 1)
"""Two workers of TP 4, and one of TP 8: they cost the same."""


@pytest.fixture
def findings():
    config = PlanConfig(tensor_parallel_size=(4, 8), max_num_batched_tokens=(2048,), loads="1,1.5,2")
    found = Findings(config, ExperimentConfig(), SETTINGS, mode="kv")
    found.search = found.new_search([Floor(), Floor()], 1)
    for question, load, margin in ((WIDE, 1, 0.1), (NARROW, 1, 0.3), (WIDE, 1.5, 0.05), (NARROW, 1.5, -0.2)):
        state = "met" if margin >= 0 else "missed"
        outcome = Outcome("ttft.p99 <= 1000 ms", state, 1 - margin, margin)
        arm = found.arm(question, load)
        found.keep(question, load, msgspec.structs.replace(point(arm.name, 0.1, **arm.changes), outcomes=[outcome]))
        if load == 1:
            found.search.learn(question, state)
    return found


def test_of_layouts_that_cost_the_same_the_one_that_holds_for_more_load_is_chosen(findings):
    findings.finished = [1.0, 1.5, 2.0]
    assert findings.best == WIDE
    assert [layout.name for layout in findings.ranked()] == ["TP 4, chunk 2048", "TP 8, chunk 2048"]
    verdict = findings.verdict(is_complete=True)
    assert "It meets the limits at 1.5x the load; TP 8, chunk 2048, which costs as much, does not." in verdict


def test_the_best_of_another_kind_is_the_one_that_holds_for_more_load(findings):
    findings.finished = [1.0, 1.5, 2.0]
    assert findings._best_among([0, 1]).startswith("the cheapest that met the limits is 8 GPUs (workers 2, TP 4, ")
    assert list(findings.other_kinds()) == []


def test_what_may_be_safer_than_the_best_is_what_met_the_limits_and_one_or_two_workers_more_the_cheapest_first(
    findings,
):
    assert findings.safer(NARROW) == [WIDE, Question(1, 2), Question(1, 3)]
    assert findings.safer(WIDE) == [NARROW, Question(0, 3), Question(0, 4)]


def test_the_cheapest_without_doubt_is_named(findings):
    assert findings.told_safer(WIDE, 3) == (
        "The cheapest one tried that certainly meets the limits is 8 GPUs (workers 2, TP 4, chunk 2048): "
        "ttft.p99 <= 1000 ms met by 10% (900 ms)."
    )
    assert findings.told_safer(None, 3).startswith("None of the 3 other layouts")


def test_while_no_other_load_is_finished_the_margin_decides(findings):
    findings.finished = [1.0]
    assert findings.best == NARROW


@pytest.mark.parametrize(
    ("finished", "said"),
    [
        ([], "Interrupted: fewer may be enough;"),
        ([1.0], "Interrupted: 1x is finished; 1.5x and 2x are not;"),
        ([1.0, 1.5], "Interrupted: 1x and 1.5x are finished; 2x is not;"),
    ],
)
def test_an_interrupt_says_which_loads_are_finished(findings, finished, said):
    findings.finished = finished
    assert said in findings.verdict(is_complete=False)
    assert findings.verdict(is_complete=False, is_examined=False).endswith("How certain this is was not examined.")


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ((0.5, 0.4), "The router mode random has the lowest mean TTFT, 20% below that of kv."),
        (
            (0.41, 0.4),
            "The router mode random has the lowest mean TTFT, but kv is within 5% of it; another seed may reverse the order.",
        ),
        ((0.5, 0.5), "The router modes kv and random have the same mean TTFT; no other mode has a lower one."),
        ((0.5, None), ""),
    ],
)
def test_the_best_router_mode_is_named(times, said):
    named = zip(("kv", "random"), times, strict=True)
    assert modes_told([Alternative(name, 2, 2, [], time, "met") for name, time in named]) == said


def test_gpus_of_a_single_worker_are_not_put_down_to_the_work():
    config = PlanConfig(tensor_parallel_size=(4,), max_num_batched_tokens=(2048,), max_gpus=2)
    found = Findings(config, ExperimentConfig(), SETTINGS, mode="kv")
    for floor, why in (
        (1, "needs at least 4, even with a single worker."),
        (2, "needs at least 8, because the requests keep"),
    ):
        found.search = found.new_search([Floor(floor)], 1)
        assert why in found.verdict(is_complete=True)


def test_a_plan_names_the_smallest_tiers_that_cost_no_more():
    layouts = [
        Ranked(f"{size} {gpu}", {"kv_offloading_size": size, "gpu": gpu}, gpus)
        for gpu, by_size in (("h100", (8, 4, 4)), ("h200", (2, 2, 2)))
        for size, gpus in zip((0, 64, 256), by_size, strict=True)
    ]
    assert sizes_told(layouts) == (
        "Smallest kv_offloading_size within 5% of each lowest cost: 0 (2 GPUs; more helps little) with gpu h200; "
        "64 (4 GPUs) with gpu h100."
    )
    assert sizes_told(layouts[:1]) == ""


def test_a_number_of_workers_below_which_others_were_not_tried_is_an_upper_bound(findings):
    findings.search.learn(Question(0, 4), "met")
    findings.search.layouts[0].states.pop(2)
    bounds = {layout.name: layout.is_upper_bound for layout in findings.ranked()}
    assert bounds == {"TP 8, chunk 2048": False, "TP 4, chunk 2048": True}
    assert findings._best_among([0]).endswith(", and fewer were not tried")


def test_an_upper_bound_is_shown_as_one_wherever_its_gpus_are():
    met = [Outcome("ttft.p99 <= 1000 ms", "met", 0.5, 0.5)]
    layouts = [
        Ranked("a", {}, gpus=8, workers=2, cost=20, outcomes=met),
        Ranked("b", {}, gpus=16, workers=4, cost=40, outcomes=met, is_upper_bound=True),
    ]
    answer = PlanAnswer("", "t", "s", True, "v", ["ttft.p99 <= 1000 ms"], layouts, [], [], [], [], [], 0, 1.0)
    [grid] = grids(answer)
    assert [cells[:3] for _, cells in grid.rows] == [["8", "2", "20"], ["<= 16", "<= 4", "<= 40"]]
    assert "<= 16: fewer than 16 may be enough" in grid.note
    chart = plan.layouts(answer, key_of(["a", "b"]))
    assert {"8", "at most 16"} <= {text.text for text in chart.canvas.texts}


def test_what_ties_with_the_best_is_said(findings):
    assert " with it, in cost and in headroom." not in findings.verdict(is_complete=True)
    findings.keep(WIDE, 1, msgspec.structs.replace(findings.known(WIDE), outcomes=findings.known(NARROW).outcomes))
    verdict = findings.verdict(is_complete=True)
    assert verdict.startswith("8 GPUs (workers 2, TP 4, ")
    assert " 8 GPUs (workers 1, TP 8, chunk 2048) ties with it, in cost and in headroom." in verdict


def test_the_best_of_another_kind_is_named_beside_what_may_be_cheaper_and_was_not_searched_to_its_end(findings):
    findings.search.learn(Question(0, 4), "met")
    findings.search.layouts[0].states.pop(2)
    findings.search.layouts[1].states.clear()
    assert findings._best_among([0, 1]).endswith(
        "; TP 8, chunk 2048, which was not searched to its end, needs at least 8 GPUs"
    )
