"""The picture of a rehearsal: what happened, in lanes."""

import re
from itertools import combinations, pairwise

import msgspec
import pytest

from dynabench.deployment.description import Deployment, Pool
from dynabench.rehearsal import run
from dynabench.rehearsal.checks import watch
from dynabench.rehearsal.checks.invariants import Violation
from dynabench.rehearsal.clients.client import Question, plain
from dynabench.rehearsal.faults.fault import Fault
from dynabench.rehearsal.picture import happening_of, page_of
from dynabench.rehearsal.run import Rehearsal, rehearse
from dynabench.rehearsal.stage.stage import UP_S
from dynabench.rehearsal.stage.story import Story
from reports.charts.lanes import Clock, Flaw, Happening, Lane, Passage, Stay, Trouble, svg

TWO = Deployment(router_mode="round-robin", pools=(Pool(replicas=2),))
ASKED = [Question(number, 0.1 * number, [7] * 40, 60) for number in range(4)]
KILL = Fault("kill", 0.25, 1.0, "worker-1")
LONG = Fault("delay", 0.1, 30.0, amount=0.01)


def told(deployment, *faults, questions=ASKED):
    story = Story()
    return rehearse(deployment, Rehearsal(1, questions, list(faults)), story=story), story


def happened(*faults, violations=(), deployment=TWO):
    outcome, story = told(deployment, *faults)
    assert outcome.violations == []
    return happening_of(deployment, violations, story)


def test_a_request_that_never_ends_is_drawn_until_it_is_given_up(monkeypatch):
    monkeypatch.setattr(run, "LONGEST_S", UP_S + 0.35 - ASKED[-1].at_s)
    outcome, story = told(TWO)
    assert [violation.invariant for violation in outcome.violations] == ["bounded"]
    happening = happening_of(TWO, outcome.violations, story)
    assert [len(one.stays) for one in happening.passages] == [2] * 4
    ends = [stay.end_s for one in happening.passages for stay in one.stays]
    assert ends == [pytest.approx(0.35, abs=0.01)] * len(ends)
    assert [flaw.at_s for flaw in happening.flaws] == [pytest.approx(0.35, abs=0.01)]


def test_a_request_has_a_stay_at_each_program_that_had_it():
    passages = happened(KILL).passages
    lanes = [[stay.lane for stay in one.stays] for one in passages]
    assert [one.end for one in passages] == ["answered"] * 4
    assert all(where[0] == "frontend" for where in lanes)
    moved = [one for one in passages if len(one.stays) == 3]  # those that were at worker-1 when it was killed
    assert {tuple(stay.lane for stay in one.stays) for one in moved} == {("frontend", "worker-1", "worker-0")}
    assert all(one.stays[1].end_s == pytest.approx(0.25) for one in moved)


def test_a_lane_is_empty_while_its_program_does_not_run():
    lanes = {lane.name: lane.runs for lane in happened(KILL).lanes}
    (_, died_s), (began_s, _) = lanes["worker-1"]
    assert (died_s, began_s) == (pytest.approx(0.25), pytest.approx(0.75))  # its supervisor waits 0.5 s
    assert len(lanes["worker-0"]) == len(lanes["frontend"]) == 1


def test_a_request_that_is_handed_over_is_at_both_workers():
    pools = (Pool(name="prefill", role="prefill", replicas=1), Pool(name="decode", role="decode", replicas=1))
    for one in happened(deployment=Deployment(pools=pools)).passages:
        assert [stay.lane for stay in one.stays] == ["frontend", "prefill-0", "decode-0"]


def test_a_fault_of_no_program_has_a_lane_of_its_own():
    found = happened(LONG)
    assert found.lanes[0].name == "everywhere"
    assert [(one.label, one.lanes, one.begin_s, one.end_s) for one in found.troubles] == [
        ("delay 0.01", ("everywhere",), pytest.approx(0.1), pytest.approx(30.1))
    ]


def test_a_violation_is_marked_when_it_was_seen_and_names_its_request_and_program():
    at_end, of_request = Violation("known", "worker-0 has x"), Violation("bounded", "question-2 took 9 s")
    found = happened(violations=[at_end, of_request, Violation("once", "worker-0 works twice, at 0.300 s", 0.3)])
    ended_s = found.passages[2].stays[0].end_s
    assert [(one.label, one.at_s) for one in found.flaws] == [
        ("known", pytest.approx(40.0, abs=2.0)),
        ("bounded", ended_s),
        ("once", 0.3),
    ]
    assert [one.name for one in found.passages if one.is_flawed] == ["question-2"]
    assert [lane.name for lane in found.lanes if lane.is_flawed] == ["worker-0"]


def test_what_is_seen_while_it_runs_is_dated_from_when_requests_could_be_sent(monkeypatch):
    monkeypatch.setattr(watch, "_busy", lambda frontend, limit: [Violation("shed", frontend.program.name)])
    outcome, _ = told(TWO)
    assert outcome.violations == [Violation("shed", "frontend, at 0.000 s", 0.0)]


def test_time_is_in_proportion_and_breaks_have_one_width():
    clock = Clock([0.0, 1.0, 2.0, 42.0, 43.0, 1000.0], 0.0, 1000.0)
    assert clock.x(1.0) - clock.x(0.0) == pytest.approx(clock.x(2.0) - clock.x(1.0))
    (first, *first_ends), (second, *second_ends) = clock.breaks()
    assert (first, second) == (40.0, 957.0)
    places = [clock.x(at_s) for at_s in (-1.0, 0.0, 0.5, 2.0, 20.0, 42.0, 42.5, 500.0, 1000.0, 2000.0)]
    assert places == sorted(places)
    assert (places[0], places[-1]) == (0.0, 1000.0)
    assert first_ends[1] - first_ends[0] < 100
    assert second_ends[1] - second_ends[0] < 100


def test_labels_of_time_keep_their_distance():
    spots = sorted(Clock([0.0, 0.3, 5.0, 5.2, 30.0, 70.0], 100.0, 1100.0).ticks())
    assert min(later - earlier for earlier, later in pairwise(spots)) >= 40


def crowd(count):
    passages = [
        Passage(
            f"question-{number}",
            ("answered", "failed", "left", "refused")[number % 4],
            "its story",
            [Stay("frontend", 0.01 * number, 1.0 + 0.02 * number), Stay(f"worker-{number % 3}", 0.01 * number, 1.0)],
            0.02 * number,
        )
        for number in range(count)
    ]
    names = ("frontend", "worker-0", "worker-1", "worker-2")
    return Happening([Lane(name, [(-5.0, 90.0)]) for name in names], passages, [], [Flaw("released", 60.0)])


@pytest.mark.parametrize("count", [3, 60, 400])
def test_a_picture_has_room_for_every_request(count):
    drawn = svg(crowd(count), lambda colour: colour)
    assert drawn.count("<title>its story</title>") == count
    height = float(re.search(r'viewBox="0 0 1120 (\d+)"', drawn)[1])
    assert 150 < height < 800
    assert all(float(y) <= height for y in re.findall(r'y\d?="([\d.]+)"', drawn))


@pytest.mark.parametrize("count", [3, 12])
def test_lines_with_names_do_not_hide_each_other(count):
    drawn = svg(crowd(count), lambda colour: colour)
    spots = [(float(x), float(y)) for x, y in re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*>question-', drawn)]
    assert len(spots) == count
    assert all(abs(a[0] - b[0]) > 60 or abs(a[1] - b[1]) > 10 for a, b in combinations(spots, 2))


def test_names_of_faults_in_one_lane_do_not_hide_each_other():
    troubles = [Trouble("lose-events 0.1", ("frontend",), 0.1, 0.2), Trouble("delay 0.2", ("frontend",), 0.15, 0.15)]
    drawn = svg(Happening([Lane("frontend", [(0.0, 1.0)])], [], troubles, []), lambda colour: colour)
    heights = re.findall(r'y="([\d.]+)"[^>]*>(?:lose|delay)', drawn)
    assert len(heights) == len(set(heights)) == 2


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ('{"error":{"message":"no \\"x\\" here","type":"server_error","param":null,"code":null}}', 'no "x" here'),
        ("error in the stream: {'message': 'it is gone', 'param': None}", "error in the stream: it is gone"),
        ("Not Found", "Not Found"),
    ],
)
def test_errors_are_shown_without_the_json_around_them(said, message):
    assert plain(said) == message


def test_a_narrow_page_begins_where_something_did_not_hold():
    assert svg(crowd(3), lambda colour: colour).count("data-flaw") == 1
    outcome, story = told(TWO, KILL)
    page = page_of(TWO, msgspec.structs.replace(outcome, violations=[Violation("released", "x")]), story, "x")
    assert re.search(r"querySelector\(.\[data-flaw\]", page)


def test_the_page_says_what_did_not_hold_and_how_to_replay_it():
    outcome, story = told(TWO, KILL)
    broken = type(outcome)(1, [Violation("released", "worker-0 has <1> used blocks")], "d1", 50.0, {}, 4, 0, [])
    page = page_of(TWO, broken, story, "dynabench rehearse --replay out/seed-1.json")
    for said in ("released: worker-0 has &lt;1&gt; used blocks", "when all requests are over, none is booked",
                 "kill worker-1, at 0.250 s, for 1.000 s", "--replay out/seed-1.json", "question-3"):  # fmt: skip
        assert said in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "Every invariant held." in page_of(TWO, outcome, story, "x")
