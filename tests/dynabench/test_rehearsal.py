"""What rehearsals find, and do not find, in the live code."""

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from benchmarks.mutations import BLIND, MUTATIONS
from dynabench.deployment.description import Deployment, Pool
from dynabench.rehearsal import run
from dynabench.rehearsal.all_seeds import Plan, carry_out, replay
from dynabench.rehearsal.checks.answers import of_answers, of_failures
from dynabench.rehearsal.checks.invariants import INVARIANTS
from dynabench.rehearsal.checks.met import Met
from dynabench.rehearsal.clients.client import Answer, Question
from dynabench.rehearsal.clients.questions import LONGEST, generated
from dynabench.rehearsal.faults.draw import bursts
from dynabench.rehearsal.faults.fault import Fault, Kind
from dynabench.rehearsal.run import Rehearsal
from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from serving.engines.mock import stepping
from serving.frontend.config import FrontendConfig
from serving.router.config import RouterConfig
from serving.router.follower import KvFollower
from serving.router.index import PrefixIndex
from serving.worker.config import WorkerConfig

ROOT = Path(__file__).parents[2]
SMALL = EngineConfig(num_gpu_blocks=40)
WORKERS = Deployment(
    router_mode="kv",
    pools=(Pool(replicas=4, mocker=SMALL),),
    frontend=FrontendConfig(http_workers=2, max_inflight_requests=48),
)
HANDS_OVER = Deployment(
    router_mode="kv",
    pools=(Pool(name="prefill", role="prefill", replicas=2), Pool(name="decode", role="decode", replicas=2)),
)


@pytest.mark.parametrize(("level", "seed"), [("none", 0), ("light", 1), ("medium", 2), ("harsh", 3)])
def test_nothing_is_violated(level, seed):
    _, outcome = carry_out(Plan(WORKERS, level, 30, 12.0), seed)
    assert outcome.violations == []


@pytest.mark.parametrize("seed", [4, 7])
def test_nothing_is_violated_where_requests_are_handed_over(seed):
    _, outcome = carry_out(Plan(HANDS_OVER, "medium", 30, 12.0), seed)
    assert outcome.violations == []


DIGEST = """
from tests.dynabench.test_rehearsal import WORKERS
from dynabench.rehearsal.all_seeds import Plan, carry_out
rehearsal, outcome = carry_out(Plan(WORKERS, "light", 15, 12.0), 5)
print(outcome.digest, len(rehearsal.faults))
"""


def test_a_seed_is_the_same_run_each_time_whatever_seed_hashes_have():
    rehearsal, outcome = carry_out(Plan(WORKERS, "light", 15, 12.0), 5)
    assert rehearsal.faults
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", DIGEST], capture_output=True, text=True, check=True, cwd=ROOT, env=environment
        )
        assert done.stdout.split() == [outcome.digest, str(len(rehearsal.faults))]


@pytest.mark.parametrize(
    ("name", "invariant"), [("lost-release", "booked"), ("no-removals", "known"), ("double-end", "ends-once")]
)
def test_a_planted_bug_is_found(name, invariant):
    command = [sys.executable, "benchmarks/mutations.py", "--hunt", name, "--seeds", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert invariant in json.loads(done.stdout)["all"]


def test_a_router_that_is_a_program_of_its_own_is_looked_into(monkeypatch):
    monkeypatch.setattr(PrefixIndex, "evict", lambda index, slot, ids: None)
    _, outcome = carry_out(Plan(replace(WORKERS, standalone_router=True), "none", 150, 12.0), 0)
    assert outcome.violations
    assert all(one.invariant == "known" and one.what.startswith("router ") for one in outcome.violations)


@pytest.mark.parametrize("mutation", [*MUTATIONS, *BLIND], ids=lambda mutation: mutation.name)
def test_what_a_planted_bug_replaces_is_there_once(mutation):
    spec = importlib.util.find_spec(mutation.module)
    assert spec is not None
    assert Path(spec.origin).read_text().count(mutation.old) == 1


def deaths(outcome):
    """Return whom faults killed."""
    events = [event.partition(" ") for event in outcome.happened]
    return [name for kind, _, name in events if kind in ("kill", "lose-machine")]


@pytest.mark.parametrize(("num_deaths", "num_failed"), [(3, 0), (4, 1)])
def test_a_request_whose_workers_die_one_after_the_other_goes_on_as_often_as_it_may_migrate(num_deaths, num_failed):
    chase = Fault("chase", 0.0, 10.0, amount=num_deaths)
    outcome = replay(WORKERS, Rehearsal(0, [Question(0, 0.01, [97] * 40, 60)], [chase]))
    assert (outcome.violations, outcome.num_failed) == ([], num_failed)
    assert len(deaths(outcome)) == num_deaths


HASTY = [Fault("lose-events", 0.0, 4.0, amount=0.3), Fault("early-timeout", 0.0, 4.0, "frontend-0", amount=0.9)]


def test_a_snapshot_that_comes_too_late_is_asked_for_again(monkeypatch):
    asked = [Question(number, number * 0.08, [97 + number % 12] * 640, 5) for number in range(40)]
    assert replay(WORKERS, Rehearsal(0, asked, HASTY)).violations == []
    monkeypatch.setattr(KvFollower, "on_no_snapshot", lambda *_: None)
    found = replay(WORKERS, Rehearsal(0, asked, HASTY)).violations
    assert {violation.invariant for violation in found} == {"known"}


def test_many_prompts_continue_others_and_none_grows_forever():
    prompts = [asked.prompt for asked in generated(3, 300, 12.0)]
    later = [
        prompt
        for number, prompt in enumerate(prompts)
        if any(prompt[: len(before)] == before for before in prompts[:number])
    ]
    assert 90 <= len(later) <= 160
    assert max(map(len, prompts)) <= LONGEST + 150


def test_a_worker_that_dies_while_its_kv_is_read_costs_no_answer():
    chase = Fault("chase", 0.0, 10.0, amount=1)
    slowly = replace(HANDS_OVER, transfer=replace(HANDS_OVER.transfer, bandwidth_gb_s=0.2))
    outcome = replay(slowly, Rehearsal(0, [Question(0, 0.01, [97] * 200, 20)], [chase]))
    assert (outcome.violations, outcome.num_failed) == ([], 0)
    assert [name.rpartition("-")[0] for name in deaths(outcome)] == ["prefill"]


def test_kv_that_a_broken_connection_withdraws_is_computed_again():
    """The prefill worker withdraws it while its decode worker is cut off and does not know of the request yet."""
    faults = [
        Fault("partition", 0.0, 9.5, "frontend", "decode-0"),
        Fault("partition", 0.0, 9.5, "frontend", "decode-1"),
        Fault("reset", 0.8, 0.0, "prefill-0", "frontend"),
        Fault("reset", 0.8, 0.0, "prefill-1", "frontend"),
    ]
    outcome = replay(HANDS_OVER, Rehearsal(0, [Question(0, 0.01, [97] * 100, 20, model="mock")], faults))
    assert (outcome.violations, outcome.num_failed) == ([], 0)


# What invariants say


def answer(number=0, *, asked_s=100.0, ended_s=101.0, status=200, error=""):
    found = Answer(Question(number, 0.0, [1, 2, 3], 4))
    found.frontend, found.asked_s, found.ended_s, found.status, found.error = (
        *("frontend", asked_s, ended_s),
        *(status, error),
    )
    return found


def met(*faults):
    return Met(faults, 100.0, [{"worker-0", "worker-1"}], ["frontend"], 1)


def names(violations):
    return [violation.invariant for violation in violations]


KILL, OTHER = Fault("kill", 0.5, 1.0, "worker-0"), Fault("kill", 0.6, 1.0, "worker-1")


@pytest.mark.parametrize(
    ("faults", "excused"),
    [
        ([], False),
        ([KILL], False),
        ([Fault("delay", 0.5, 1.0, amount=0.1)], False),
        ([KILL, Fault("reset", 0.6, 0.0, "worker-0", "frontend")], True),  # more than it may migrate
        ([Fault("kill", 0.5, 1.0, "frontend")], True),
        ([Fault("kill", 50.0, 1.0, "worker-0"), Fault("kill", 50.0, 1.0, "worker-1")], False),  # later
        ([KILL, OTHER], True),
    ],
)
def test_a_request_may_fail_only_if_it_could_not_be_saved(faults, excused):
    failed = of_failures([answer(error="the worker is gone")], met(*faults), {"frontend": 10})
    assert names(failed) == ([] if excused else ["no-loss"])


def test_a_request_may_fail_if_all_workers_of_its_model_are_gone_while_another_model_has_some():
    pools = tuple(Pool(name=name, worker=WorkerConfig(model_name=name, migration_limit=3)) for name in ("one", "other"))
    asked = [Question(number, 0.1 * number, [97] * 20, 40, model="one") for number in range(20)]
    outcome = replay(Deployment(pools=pools), Rehearsal(0, asked, [Fault("kill", 0.55, 1.0, "one-0")]))
    assert (outcome.violations, outcome.num_failed > 0) == ([], True)


def test_a_request_may_return_to_where_it_failed_while_only_another_model_has_others():
    pools = (
        Pool(name="one", replicas=2, worker=WorkerConfig(model_name="one", migration_limit=3)),
        Pool(name="other", worker=WorkerConfig(model_name="other", migration_limit=3)),
    )
    faults = [
        Fault("half-open", 1.0, 26.0, "frontend", "one-0"),
        Fault("partition", 1.0, 9.8, "frontend", "one-1"),
        Fault("reset", 2.5, 0.0, "one-1", "frontend"),
    ]
    asked = [Question(0, 2.0, [97] * 200, 60, model="one")]
    assert replay(Deployment(router_mode="kv", pools=pools), Rehearsal(0, asked, faults)).violations == []


def test_frontends_forget_workers_that_are_gone_although_nobody_asks_for_their_metrics():
    deployment = replace(WORKERS, frontend=FrontendConfig(), pools=(Pool(replicas=3, mocker=SMALL),))
    asked = [Question(number, number * 0.1, [97 + number % 12] * 20, 3) for number in range(300)]
    deaths = [Fault("restart", 0.5 + number, 3.0, f"worker-{number % 3}") for number in range(30)]
    assert replay(deployment, Rehearsal(0, asked, deaths)).violations == []


def test_a_frontend_refuses_only_when_it_is_full():
    refused = answer(9, status=429, error="HTTP 429")
    assert names(of_failures([refused], met(), {"frontend": 1})) == ["shed"]
    assert names(of_failures([refused, answer(1, ended_s=103.0)], met(), {"frontend": 1})) == []


def test_a_request_that_takes_longer_than_its_faults_explain_is_late():
    slow = answer(ended_s=110.0)
    slow.num_ends, slow.has_left = 1, True
    assert names(of_answers([slow], {}, met())) == ["bounded"]
    assert names(of_answers([slow], {}, met(Fault("pause", 0.5, 20.0, "worker-0")))) == []


def test_the_work_of_engines_that_had_a_request_is_no_delay():
    slow = answer(ended_s=110.0)
    slow.num_ends, slow.has_left = 1, True
    assert names(of_answers([slow], {}, met()._replace(worked_s={slow.question.id: 6.5}))) == []
    assert names(of_answers([slow], {}, met()._replace(worked_s={slow.question.id: 5.5}))) == ["bounded"]
    assert names(of_answers([slow], {}, met()._replace(worked_s={"question-7": 6.5}))) == ["bounded"]


SLOW = (Pool(replicas=2, timing=TimingConfig(speedup_ratio=0.1)),)


def test_long_answers_at_slow_engines_are_within_their_bound():
    asked = [Question(number, 0.1 * number, [97 + number] * 100, 150) for number in range(4)]
    outcome = replay(Deployment(pools=SLOW), Rehearsal(0, asked, []))
    assert (outcome.violations, len(outcome.texts)) == ([], 4)


def test_long_answers_that_move_to_another_worker_are_within_their_bound():
    asked = [Question(number, 0.1 * number, [97 + number] * 100, 150) for number in range(4)]
    kill = Fault("kill", 7.0, 0.5, "worker-0")
    outcome = replay(
        Deployment(pools=(replace(SLOW[0], worker=WorkerConfig(migration_limit=3)),)), Rehearsal(0, asked, [kill])
    )
    assert (outcome.violations, len(outcome.texts)) == ([], 4)


def test_requests_that_wait_behind_an_overload_are_within_their_bound():
    pool = replace(SLOW[0], replicas=1, mocker=EngineConfig(max_num_seqs=4))
    deployment = Deployment(pools=(pool,), router=RouterConfig(max_queue_depth=None))
    asked = [Question(number, 0.1 * number, [97 + number] * 30, 20) for number in range(2)]
    outcome = replay(deployment, Rehearsal(0, asked, [Fault("overload", 0.1, 0.0, amount=30)]))
    assert (outcome.violations, len(outcome.texts)) == ([], 32)


@pytest.mark.parametrize("engine", ["echo_core", "echo_full"])
def test_nothing_is_violated_by_engines_that_nobody_looks_into(engine):
    _, outcome = carry_out(Plan(Deployment(pools=(Pool(engine=engine, replicas=2),)), "light", 15, 12.0), 2)
    assert outcome.violations == []


def test_long_answers_of_engines_that_nobody_looks_into_are_within_their_bound():
    asked = [Question(0, 0.0, [97] * 600, 600, is_chat=True)]
    outcome = replay(Deployment(pools=(Pool(engine="echo_full"),)), Rehearsal(0, asked, []))
    assert (outcome.violations, len(outcome.texts)) == ([], 1)


def test_a_request_that_waits_at_an_idle_engine_is_late(monkeypatch):
    async def sleeps(wake_s, bell):
        await bell.wait()
        await asyncio.sleep(5.0)

    monkeypatch.setattr(stepping, "_wait", sleeps)
    asked = [Question(0, 0.0, [97] * 100, 20)]
    assert set(names(replay(Deployment(), Rehearsal(0, asked, [])).violations)) == {"bounded"}


def test_requests_that_come_late_do_not_make_a_rehearsal_too_long(monkeypatch):
    monkeypatch.setattr(run, "LONGEST_S", 55.0)
    asked = [Question(number, number * 20.0, [97] * 10, 3) for number in range(2)]
    assert replay(Deployment(), Rehearsal(0, asked, [])).violations == []


def test_an_overload_asks_what_was_asked_before_at_once():
    asked = [Question(number, float(number), [number], 3, leaves_after=1) for number in range(3)]
    found = bursts([Fault("overload", 1.5, 0.0, amount=2), KILL, Fault("overload", 2.5, 0.0, amount=1)], asked)
    assert [(one.number, one.at_s, one.prompt, one.leaves_after) for one in found] == [
        (3, 1.5, [0], None),
        (4, 1.5, [0], None),
        (5, 2.5, [2], None),
    ]


def test_the_page_has_every_invariant_and_every_kind_of_fault():
    page = (ROOT / "docs/rehearsal.md").read_text()
    assert [name for name, said in INVARIANTS.items() if f"| `{name}` | {said} |" not in page] == []
    assert [kind for kind in get_args(Kind) if f"`{kind}`" not in page] == []
