"""Planners in rehearsals: they plan on virtual time, their workers come and go, and bugs of theirs are found."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.fleet import FleetConfig
from dynabench.interrupt import Interrupt
from dynabench.planner.hands import Hands
from dynabench.planner.roster import Roster
from dynabench.planner.service import BlindError, PlannerService
from dynabench.rehearsal.all_seeds import Plan, carry_out, left_out, rehearse_all
from dynabench.rehearsal.checks.met import Met
from dynabench.rehearsal.clients.client import Answer
from dynabench.rehearsal.clients.questions import generated
from dynabench.rehearsal.faults.draw import draw
from dynabench.rehearsal.faults.fault import Fault
from dynabench.rehearsal.run import Rehearsal, rehearse
from dynabench.rehearsal.settings import RehearseConfig
from dynabench.rehearsal.stage.stage import PLANNER, SUPERVISOR, Stage, names_of
from dynabench.rehearsal.virtual_time.loop import run
from foundation.errors import UserError
from mocker import EngineConfig
from serving.frontend.config import FrontendConfig
from serving.planner import Planner, PlannerConfig
from serving.runtime.memory.network import Network
from serving.supervision.group import ProcessGroup
from tests.support.commands import dynabench

ROOT = Path(__file__).parents[2]
EAGER = {"planner": "hpa", "planner_interval_s": 0.5, "hpa_metric": "concurrency", "hpa_target": 2.0}
POLICY = """
from serving.planner import Policy, Proposal

class Mine(Policy):
    default_interval_s = 0.5
    last = 1

    def _propose_one(self, now, facts, state):
        self.last = {proposal}
        return Proposal(self.last, "because")
"""


def planned(most=4, **settings):
    config = PlannerConfig(**EAGER | {"hpa_down_window_s": 3.0, "max_replicas": most} | settings)
    pool = Pool(replicas=2, mocker=EngineConfig(num_gpu_blocks=40, max_num_seqs=16))
    return Deployment(router_mode="kv", pools=(pool,), planner=config)


def restless(folder):
    """Write a policy that shrinks its pool under load, too."""
    file = folder / "restless.py"
    file.write_text(POLICY.format(proposal="1 + state.loads[0].num_requests * 7 % 4"))
    return file


def rehearsed(deployment, *faults, seed=1, requests=40, rate=12.0):
    return rehearse(deployment, Rehearsal(seed, generated(seed, requests, rate), list(faults)))


def names(outcome):
    return {violation.invariant for violation in outcome.violations}


def test_a_planner_grows_a_pool_with_the_load_and_shrinks_it_after():
    outcome = rehearsed(planned())
    assert (outcome.violations, outcome.num_failed) == ([], 0)
    assert {"grow worker", "shrink worker"} <= set(outcome.happened)


@pytest.mark.parametrize(("level", "seed"), [("medium", 2), ("harsh", 3)])
def test_nothing_is_violated_whatever_goes_wrong(level, seed, tmp_path):
    _, outcome = carry_out(Plan(planned(planner=str(restless(tmp_path))), level, 40, 12.0), seed)
    assert outcome.violations == []


def test_nothing_is_violated_where_pools_share_a_budget_and_frontends_a_port():
    pools = tuple(Pool(name=role, role=role, replicas=2) for role in ("prefill", "decode"))
    config = PlannerConfig(**EAGER, hpa_down_window_s=3.0, max_gpu_budget=5)
    deployment = Deployment(router_mode="kv", pools=pools, planner=config, frontend=FrontendConfig(http_workers=2))
    _, outcome = carry_out(Plan(deployment, "medium", 40, 12.0), 7)
    assert (outcome.violations, "grow decode" in outcome.happened) == ([], True)


DIGEST = """
from tests.dynabench.test_rehearsed_planner import planned, rehearsed
outcome = rehearsed(planned())
print(outcome.digest, *outcome.happened)
"""


def test_a_seed_is_the_same_run_whatever_seed_hashes_have():
    outcome = rehearsed(planned())
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", DIGEST], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [outcome.digest, *" ".join(outcome.happened).split()]


@pytest.mark.parametrize(
    "fault",
    [
        Fault("kill", 1.0, 1.0, PLANNER),
        Fault("pause", 1.0, 14.0, PLANNER),
        Fault("partition", 1.0, 14.0, SUPERVISOR, "discovery"),
        Fault("half-open", 1.0, 14.0, "discovery", PLANNER),
        Fault("kill", 2.5, 1.0, "worker-2"),
    ],
    ids=str,
)
def test_after_a_fault_a_planner_goes_on_with_the_workers_that_it_finds(fault):
    outcome = rehearsed(planned(), fault)
    assert outcome.happened[0] == f"{fault.kind} {fault.target}"
    assert (outcome.violations, outcome.num_failed) == ([], 0)


def test_a_worker_that_does_not_come_up_is_given_up():
    said = []
    note = Roster.on_ended

    def noted(self, now, name, **facts):
        note(self, now, name, **facts)
        said.append(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Roster, "on_ended", noted)
        failing = rehearsed(planned(), Fault("start-fails", 0.0, 8.0))
    hanging = rehearsed(planned(startup_timeout_s=3.0), Fault("start-hangs", 0.0, 12.0), requests=150)
    assert failing.violations == hanging.violations == []
    assert len(said) > len(set(said)) > 0
    assert hanging.happened.count("grow worker") > 1


def found_with(owner, name, planted, deployment=None, **load):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, planted)
        return names(rehearsed(deployment or planned(), **load))


def test_a_planner_beyond_its_bounds_is_found():
    wish = Planner._wish

    def unlimited(self, pool, state, proposal):
        given = wish(self, pool, state, proposal)
        return replace(given, goal=given.goal + 4)

    assert "planned" in found_with(Planner, "_wish", unlimited)


def test_a_larger_step_is_found_whatever_the_reason_says(tmp_path, monkeypatch):
    (tmp_path / "leaps.py").write_text(POLICY.replace("because", "1 start given up").format(proposal="8"))
    deployment = planned(most=8, planner=str(tmp_path / "leaps.py"), max_scale_step=1, planner_interval_s=20.0)
    wish = Planner._wish
    assert rehearsed(deployment).violations == []

    def leaps(self, pool, state, proposal):
        return replace(wish(self, pool, state, proposal), goal=proposal.replicas)

    monkeypatch.setattr(Planner, "_wish", leaps)
    assert names(rehearsed(deployment)) == {"planned"}


def test_a_planner_that_does_not_plan_is_found_whatever_it_logs():
    async def counts(self, session):
        raise BlindError("no metrics today")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlannerService, "_note", lambda self, notes, level=0: None)
        assert "followed" in found_with(PlannerService, "_counts", counts)


def test_hands_that_fail_are_found():
    async def obey(self, given, group):
        raise ValueError("these orders make no sense")

    assert "alive" in found_with(Hands, "_obey", obey)


def test_hands_that_kill_without_draining_are_found(tmp_path):
    async def end(self, name, timeout_s):
        keeper = next(keeper for keeper, program in self._keepers.items() if program.name == name)
        self._leaving[name].set()
        self._signal(signal.SIGKILL, [name])
        await keeper
        del self._keepers[keeper], self._children[name], self._leaving[name]

    deployment = planned(planner=str(restless(tmp_path)))
    load = {"requests": 120, "rate": 40.0}
    assert rehearsed(deployment, **load).violations == []
    assert "drained" in found_with(ProcessGroup, "end", end, deployment, **load)


@pytest.mark.parametrize("by_fault", [True, False])
def test_a_worker_is_not_to_blame_if_its_parent_asks_it_to_end_after_a_fault_did(by_fault):
    async def main():
        stage = Stage(planned(), 0, Network(random.Random(0)))
        stage.start("worker-0")
        await asyncio.sleep(1.0)
        actor = stage.actors["worker-0"]
        stage.restart(actor) if by_fault else stage.signal(actor, signal.SIGTERM)
        stage.signal(actor, signal.SIGTERM)
        return actor.is_harmed

    assert run(main()) is by_fault


def test_hands_that_report_only_once_are_found():
    report, seen = Hands._report, []

    async def once(self, runtime):
        seen.append(1)
        if len(seen) < 5:
            await report(self, runtime)

    assert "followed" in found_with(Hands, "_report", once)


def test_a_policy_of_ones_own_is_rehearsed_and_one_that_wavers_found(tmp_path):
    (tmp_path / "up.py").write_text(POLICY.format(proposal="3"))
    calm = rehearsed(planned(planner=str(tmp_path / "up.py")))
    assert (calm.violations, [one for one in calm.happened if one == "grow worker"]) == ([], ["grow worker"])
    (tmp_path / "wavers.py").write_text(POLICY.format(proposal="4 - self.last"))
    assert names(rehearsed(planned(planner=str(tmp_path / "wavers.py"), planner_interval_s=4.0))) == {"settled"}


def test_advice_changes_nothing():
    outcome = rehearsed(planned(advisory=True))
    assert (outcome.violations, outcome.happened) == ([], [])


def test_faults_reach_the_planner_and_workers_that_it_may_start():
    workers, others = names_of(planned())
    assert workers == [f"worker-{number}" for number in range(5)]
    assert others == ["frontend", PLANNER, SUPERVISOR]
    drawn = [fault for seed in range(60) for fault in draw(random.Random(seed), "harsh", workers, others, 5.0)]
    hit = {(fault.kind, fault.target) for fault in drawn}
    assert {("kill", PLANNER), ("pause", PLANNER), ("restart", PLANNER), ("kill", "worker-4")} <= hit


def failed(asked_s, ended_s):
    answer = Answer(generated(0, 1, 1.0)[0])
    answer.frontend, answer.asked_s, answer.ended_s, answer.error = "frontend", asked_s, ended_s, "lost"
    return answer


def test_a_worker_that_cannot_start_again_excuses_for_longer():
    kill, stuck = Fault("kill", 1.0, 1.0, "worker-0"), Fault("start-hangs", 2.0, 30.0)
    alone = [{"worker-0"}]
    assert not Met([kill], 0.0, alone, ["frontend"], 3).excuses(failed(20.0, 21.0))
    assert Met([kill, stuck], 0.0, alone, ["frontend"], 3).excuses(failed(20.0, 21.0))


def test_what_meets_only_the_planner_excuses_nothing():
    faults = [Fault("kill", 1.0, 1.0, PLANNER), Fault("partition", 1.0, 9.0, SUPERVISOR, "discovery")]
    assert not Met(faults, 0.0, [{"worker-0"}], ["frontend"], 3).excuses(failed(2.0, 3.0))


def test_the_workers_that_were_there_decide_what_excuses():
    kill = Fault("kill", 1.0, 1.0, "worker-0")
    there = [(0.0, [{"worker-0", "worker-1"}]), (5.0, [{"worker-0"}])]
    met = Met([kill], 0.0, [{"worker-0", "worker-1"}], ["frontend"], 3, there=there)
    assert (met.excuses(failed(2.0, 3.0)), met.excuses(failed(6.0, 7.0))) == (False, True)


def test_the_command_rehearses_a_planner(tmp_path):
    (tmp_path / "mine.py").write_text(POLICY.format(proposal="3"))
    done = dynabench(
        *("rehearse", "--workers", "1", "--planner", tmp_path / "mine.py", "--seeds", "1", "--requests", "10"),
        *("--faults", "none", "--out", tmp_path / "out"),
    )
    assert (done.returncode, "happened: grow 1" in done.stderr + done.stdout) == (0, True), done.stderr
    refused = dynabench("rehearse", "--planner", "lead-time", "--seeds", "1")
    assert (refused.returncode, "needs a TTFT limit" in refused.stderr) == (2, True)


def test_the_events_of_a_fleet_are_said_to_be_left_out():
    fleet = FleetConfig(events="at 60s: +1")
    assert left_out(replace(planned(), fleet=fleet)) == [
        "fleet.events happen in `dynabench simulate` only; faults are those of --faults"
    ]


def test_a_policy_that_sleeps_is_refused_with_its_file_and_line(tmp_path):
    file = tmp_path / "sleeps.py"
    file.write_text(POLICY.format(proposal="1 + (__import__('time').sleep(0.1) or 0)"))
    with pytest.raises(UserError, match=r"planner uses time\.sleep \(sleeps\.py:\d+\)"):
        rehearsed(planned(planner=str(file)))


def test_a_policy_that_is_not_deterministic_is_named(tmp_path):
    file = tmp_path / "chance.py"
    file.write_text(POLICY.format(proposal="1 + __import__('os').urandom(1)[0] % 4"))
    plan = Plan(planned(planner=str(file)), "none", 40, 12.0)
    with Interrupt() as interrupt, pytest.raises(UserError, match=r"two different runs; it ran .*chance\.py"):
        rehearse_all(plan, RehearseConfig(seeds="1", out=tmp_path / "out"), interrupt, print)
