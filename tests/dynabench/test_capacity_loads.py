"""Which of equally cheap layouts a plan chooses, and what it simulates at more load to know that."""

import msgspec
import pytest

from dynabench.arm import Settings
from dynabench.capacity.estimate import num_left, told
from dynabench.capacity.findings import Findings
from dynabench.capacity.floors import Floor
from dynabench.capacity.loads import choose, search_at
from dynabench.capacity.search import Question
from dynabench.capacity.settings import PlanConfig
from dynabench.deployment.description import Deployment, Pool
from dynabench.experiment.settings import ExperimentConfig
from mocker.timing.config import TimingConfig
from reports.figures.outcomes import Outcome
from tests.reports.test_sweep_report import point

SETTINGS = Settings(Deployment(pools=(Pool(timing=TimingConfig(model="Qwen/Qwen3-8B", gpu="h100")),)))
WIDE, NARROW = Question(0, 2), Question(1, 1)
"""Two workers of TP 4, and one of TP 8: they cost the same."""
FLOORS = [Floor(2), Floor()]


class Answers:
    """Answers a plan's questions from a table of what each layout holds to."""

    def __init__(self, found, holds_to, margins):
        self.found, self._holds_to, self._margins = found, holds_to, margins
        self.asked = []
        for question in holds_to:
            self.point(found, question, 1.0)
            found.search.learn(question, "met")
        found.finished = [1.0]
        self.asked.clear()

    def point(self, found, question, load):
        self.asked.append((question, load))
        is_met = load <= self._holds_to.get(question, 10)  # what is larger holds
        margin = self._margins.get(question, 0.1) if is_met else -0.1
        outcome = Outcome("ttft.p99 <= 1000 ms", "met" if is_met else "missed", 1 - margin, margin)
        arm = found.arm(question, load)
        answer = msgspec.structs.replace(point(arm.name, 0.1, **arm.changes), outcomes=[outcome])
        found.keep(question, load, answer)
        return answer

    def floors(self, found, load, places=None):
        return FLOORS if places is None else [FLOORS[place] for place in places]

    def compare(self, arms, at):
        """Nothing is simulated in advance."""

    def drive(self, found, search, load):
        while (question := search.next()) is not None:
            answer = self.point(found, question, load)
            search.learn(question, answer.state, answer.outcomes)


@pytest.fixture
def found():
    config = PlanConfig(tensor_parallel_size=(4, 8), max_num_batched_tokens=(2048,), loads="1,1.5,2")
    findings = Findings(config, ExperimentConfig(), SETTINGS, mode="kv")
    findings.search = findings.new_search(FLOORS, 1)
    return findings


def test_the_one_with_most_headroom_is_asked_first_and_the_first_that_takes_the_highest_load_is_chosen(found):
    answers = Answers(found, {WIDE: 1.5, NARROW: 1.5}, {WIDE: 0.1, NARROW: 0.3})
    assert choose(answers, found) == NARROW
    assert answers.asked == [(NARROW, 2.0), (WIDE, 2.0), (NARROW, 1.5)], "what WIDE does at 1.5x decides nothing"


def test_one_with_less_headroom_is_chosen_for_the_load_that_it_takes(found):
    answers = Answers(found, {WIDE: 2, NARROW: 1.5}, {WIDE: 0.1, NARROW: 0.3})
    assert choose(answers, found) == WIDE
    assert answers.asked == [(NARROW, 2.0), (WIDE, 2.0)]


def test_if_none_takes_more_load_the_one_with_the_most_headroom_is_chosen(found):
    assert choose(Answers(found, {WIDE: 1, NARROW: 1}, {WIDE: 0.1, NARROW: 0.3}), found) == NARROW


def test_a_single_cheapest_layout_is_compared_with_nothing(found):
    answers = Answers(found, {WIDE: 2}, {})
    assert (choose(answers, found), answers.asked) == (WIDE, [])


def test_where_the_chosen_layout_takes_the_load_nothing_else_is_simulated(found):
    answers = Answers(found, {WIDE: 1.5, NARROW: 1.5}, {WIDE: 0.1, NARROW: 0.3})
    search = search_at(answers, found, 1.5, NARROW, FLOORS)
    assert answers.asked == [(NARROW, 1.5)]
    assert search.best == NARROW


def test_where_it_does_not_more_workers_are_searched_for(found):
    answers = Answers(found, {WIDE: 1.5, NARROW: 1.5}, {WIDE: 0.1, NARROW: 0.3})
    search = search_at(answers, found, 2.0, NARROW, FLOORS)
    assert answers.asked[0] == (NARROW, 2.0)
    assert search.best == Question(0, 3), "12 GPUs; two workers of TP 8 would take 16"


def test_what_was_chosen_without_need_of_more_runs_says_why(found):
    answers = Answers(found, {WIDE: 1.5, NARROW: 1.5}, {WIDE: 0.1, NARROW: 0.3})
    choose(answers, found)
    found.finished = [1.0, 1.5, 2.0]
    assert (
        "Of the 2 layouts that cost this much, it has the most headroom, and none was found to take more load."
        in found.verdict(is_complete=True)
    )


def test_how_long_a_plan_takes_is_told_from_what_a_simulation_took(found):
    assert num_left(found, found.search, num_modes=1) == 2 + 2 * 2 + 3, "layouts, two more loads, headroom"
    assert told(10, 1.25) == "about 12 s left"
    assert told(200, 1.25) == "about 4 min left"
