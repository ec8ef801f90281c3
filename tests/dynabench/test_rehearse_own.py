"""The user's own engine in rehearsals."""

import os
import signal
import subprocess
import sys
import time

import pytest

from dynabench.deployment.description import Deployment, Pool
from dynabench.interrupt import InterruptError
from dynabench.rehearsal.all_seeds import Plan, replay
from dynabench.rehearsal.all_seeds import _killed as killed
from dynabench.rehearsal.clients.client import Question
from dynabench.rehearsal.faults.fault import Fault
from dynabench.rehearsal.files import read
from dynabench.rehearsal.run import Rehearsal, rehearse, started
from dynabench.rehearsal.stage.own import check_own
from dynabench.rehearsal.virtual_time import watch
from dynabench.rehearsal.virtual_time.errors import StuckError
from foundation.errors import UserError
from foundation.exit_codes import INTERRUPTED
from serving.planner import PlannerConfig
from tests.support.commands import dynabench

DEPLOYMENT = Deployment(router_mode="round-robin", pools=(Pool(replicas=2),))
KILL = Fault("kill", 0.5, 1.0, "worker-1")
TOKENS = """
import asyncio

async def generate(request):
    known = request["token_ids"]
    for number in range(len(known), len(known) + request["stop_conditions"]["max_tokens"]):
        await asyncio.sleep(0.01)
        yield {"token_ids": [{token}]}
    yield {"token_ids": [], "finish_reason": "length"}
"""
NEXT, PLACE_IN_CALL = "97 + number % 26", "97 + (number - len(known)) % 26"
TEXT = """
import asyncio

async def generate(request):
    for letter in request["messages"][-1]["content"][:20]:
        await asyncio.sleep(0.01)
        yield chunk({"role": "assistant", "content": letter}, None)
    yield chunk({}, "stop")

def chunk(delta, reason):
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "mock", "choices": [choice]}
"""


def plan_with(tmp_path, kind, text, level="none"):
    (tmp_path / "engine.py").write_text(text)
    return Plan(DEPLOYMENT, level, 20, 12.0, own_engine=f"{kind}:{tmp_path / 'engine.py'}")


def with_kill(plan):
    """Kill a worker in the middle of answers that take 0.6 s."""
    asked = [Question(number, number * 0.05, [97 + number] * 8, 60) for number in range(20)]
    return Rehearsal(0, asked, [KILL], plan.own_engine)


def test_an_engine_that_continues_what_it_is_given_holds(tmp_path):
    whole = with_kill(plan_with(tmp_path, "pytok", TOKENS.replace("{token}", NEXT)))
    outcome = replay(DEPLOYMENT, whole)
    assert (outcome.violations, outcome.happened) == ([], ["kill worker-1"])
    assert len(outcome.texts) > 15
    assert outcome.digest == replay(DEPLOYMENT, whole).digest


def test_an_engine_that_begins_again_after_a_migration_is_found(tmp_path):
    outcome = replay(DEPLOYMENT, with_kill(plan_with(tmp_path, "pytok", TOKENS.replace("{token}", PLACE_IN_CALL))))
    assert {violation.invariant for violation in outcome.violations} == {"right-text"}


def test_an_engine_that_takes_chats_is_asked_in_chats(tmp_path):
    outcome = replay(DEPLOYMENT, plan_with(tmp_path, "pystr", TEXT).of(0))
    assert outcome.violations == []
    assert {len(text) for text in outcome.texts.values()} == {8, 20}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "__import__('time').sleep(0.01)",
            r"worker-\d uses time.sleep \(engine.py:7\), which virtual time does not have",
        ),
        ("__import__('threading').Thread(target=print).start()", r"worker-\d uses a thread"),
        ("await asyncio.open_unix_connection('x')", "the program calls create_unix_connection"),
    ],
)
def test_an_engine_that_takes_real_time_is_refused_though_its_request_would_only_fail(tmp_path, line, said):
    plan = plan_with(tmp_path, "pytok", TOKENS.replace("await asyncio.sleep(0.01)", line).replace("{token}", NEXT))
    before = sys.argv, sys.path
    with pytest.raises(UserError, match=f"this cannot be rehearsed: {said}"):
        rehearse(DEPLOYMENT, plan.of(0))
    assert (sys.argv, sys.path) == before


@pytest.mark.parametrize(
    ("engine", "said"),
    [("vllm:x.py", "expected pystr:FILE or pytok:FILE"), ("pytok:", "expected pystr"), ("pytok:x.py", "no file x.py")],
)
def test_what_is_no_engine_is_refused(engine, said):
    with pytest.raises(UserError, match=said):
        check_own(engine)


MODE = """
import os, random, threading, time
from serving.router import Candidates, Policy

class Mode(Policy):
    def costs(self, candidates: Candidates) -> list[float]:
        {line}
"""


def rehearsed_mode(tmp_path, line, *flags):
    (tmp_path / "my_mode.py").write_text(MODE.format(line=line))
    words = ("--router-mode", "my_mode.py", "--workers", "2", "--requests", "5", "--faults", "none", *flags)
    return dynabench("rehearse", *words, "--seeds", "1", cwd=tmp_path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("time.sleep(0.01)", "frontend uses time.sleep (my_mode.py:7)"),
        ("threading.Thread(target=print).start()", "frontend uses a thread (my_mode.py:7)"),
        ("os._exit(3)", "frontend uses os._exit (my_mode.py:7)"),
        ("os.kill(os.getpid(), 9)", "the process that rehearsed seed 0 ended; it ran my_mode.py"),
        (
            "open('calls', 'a').write('x')\n        return [1 / (os.stat('calls').st_size < 4) for _ in range(2)]",
            "seed 0 gave two different runs; it ran my_mode.py",
        ),
    ],
)
def test_a_mode_that_cannot_be_rehearsed_is_refused_in_one_line(tmp_path, line, said):
    done = rehearsed_mode(tmp_path, line)
    *before, last = done.stderr.splitlines()
    assert done.returncode == 2
    assert said in last
    assert [line for line in before if "rehearsing:" not in line] == []


def test_of_several_rehearsals_under_way_the_one_that_ends_its_process_is_named(tmp_path):
    (tmp_path / "my_mode.py").write_text(MODE.format(line="os.kill(os.getpid(), 9)"))
    words = ("--router-mode", "my_mode.py", "--workers", "2", "--requests", "5", "--seeds", "4..6", "--jobs", "2")
    done = dynabench("rehearse", *words, "--out", "x", cwd=tmp_path)
    said = "the process that rehearsed seed 4 ended, and again when it rehearsed that seed alone; it ran my_mode.py"
    assert (done.returncode, said in done.stderr.splitlines()[-1]) == (2, True)
    assert "a process ended; rehearsing seed 4, which was under way, again, alone" in " ".join(done.stdout.split())


def test_a_seed_ends_its_process_only_if_it_does_so_alone():
    lives, ends = (str, ()), (os._exit, (3,))
    alone = "the process that rehearsed seed 7 ended, and again when it rehearsed that seed alone"
    again = []
    assert killed({3: lives, 7: ends, 8: ends}, again.append) == alone
    assert again == [3, 7]
    none = "a process that rehearsed seed 3 or 7 ended, but none did when each of these seeds was rehearsed alone"
    assert killed({3: lives, 7: lives}, again.append) == none


def test_a_process_that_ends_between_seeds_names_none():
    assert killed({}, print) == "a process ended while it rehearsed no seed"


def test_a_mode_may_use_random_numbers_and_clocks(tmp_path):
    clocks = "time.perf_counter() % 1 + time.perf_counter_ns() % 10**9"
    line = f"return [random.random() + {clocks} for _ in candidates.num_requests]"
    done = rehearsed_mode(tmp_path, line)
    assert done.returncode == 0, done.stderr


RAISED = ["raise SystemExit(3)", "raise KeyboardInterrupt", "raise ValueError('x')"]


@pytest.mark.parametrize("line", RAISED)
def test_an_engine_that_always_raises_is_a_violation(tmp_path, line):
    plan = plan_with(tmp_path, "pytok", TOKENS.replace("await asyncio.sleep(0.01)", line).replace("{token}", NEXT))
    violations = rehearse(DEPLOYMENT, plan.of(0)).violations
    assert {each.invariant for each in violations} & {"alive", "no-loss"}
    if "ValueError" not in line:
        assert "would end the process, from engine.py:7 (generate)" in str(violations[0])


@pytest.mark.parametrize(("seed", "has_broker"), [(0, False), (5, True)])
def test_a_fault_that_does_not_happen_excuses_no_loss(tmp_path, seed, has_broker):
    """With seed 5, requests go over a broker."""
    text = TOKENS.replace("await asyncio.sleep(0.01)", "raise ValueError('x')").replace("{token}", NEXT)
    plan = plan_with(tmp_path, "pytok", text)
    away = Fault("broker-away", 0.0, 10.0)
    outcome = rehearse(DEPLOYMENT, Rehearsal(seed, [Question(0, 1.0, [97] * 8, 4)], [away], plan.own_engine))
    assert outcome.num_failed == 1
    assert ("broker-away" in outcome.happened) == has_broker
    assert ("no-loss" in {each.invariant for each in outcome.violations}) == (not has_broker)


def test_ctrl_c_is_no_violation(tmp_path):
    line = "__import__('signal').raise_signal(2)"
    plan = plan_with(tmp_path, "pytok", TOKENS.replace("await asyncio.sleep(0.01)", line).replace("{token}", NEXT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(InterruptError):
            rehearse(DEPLOYMENT, plan.of(0))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


POLICY = """
from serving.planner import Policy

class Mine(Policy):
    default_interval_s = 0.5

    def _propose_one(self, now, facts, state):
        {line}
"""


@pytest.mark.parametrize("line", RAISED[:2])
def test_a_planner_policy_that_would_end_its_process_is_a_violation(tmp_path, line):
    (tmp_path / "policy.py").write_text(POLICY.format(line=line))
    config = PlannerConfig(planner=str(tmp_path / "policy.py"), max_replicas=4)
    deployment = Deployment(router_mode="kv", pools=(Pool(replicas=2),), planner=config)
    [violation] = rehearse(deployment, Rehearsal(0, [Question(0, 0.0, [97] * 8, 4)], [])).violations
    assert "would end the process, from policy.py:8" in str(violation)


def test_an_engine_that_would_end_its_process_as_it_starts_is_refused(tmp_path):
    plan = plan_with(tmp_path, "pytok", "raise KeyboardInterrupt")
    with pytest.raises(UserError, match=r"the deployment does not start: .* would end the process, from engine.py:1"):
        started(DEPLOYMENT, plan.own_engine)


def test_a_deployment_that_waits_or_computes_forever_at_its_start_is_refused(tmp_path, monkeypatch):
    def stuck(*_):
        raise StuckError("code runs without end")

    monkeypatch.setattr("dynabench.rehearsal.run._apart", lambda main, *_: (main.close(), stuck()))
    with pytest.raises(UserError, match="does not start: code runs without end"):
        started(DEPLOYMENT)


@pytest.mark.parametrize("line", ["raise ValueError('x')", "raise SystemExit(3)", "raise KeyboardInterrupt"])
def test_a_mode_that_always_raises_is_a_violation_with_one_request_that_is_replayed_anywhere(tmp_path, line):
    done = rehearsed_mode(tmp_path, line)
    assert done.returncode == 1
    deployment, rehearsal = read(tmp_path / "rehearsal/seed-0.json")
    assert len(rehearsal.questions) == 1
    text = (tmp_path / "rehearsal/seed-0.json").read_text()
    assert "../my_mode.py" in text
    assert str(tmp_path) not in text
    assert replay(deployment, rehearsal).violations
    (tmp_path / "my_mode.py").unlink()
    with pytest.raises(UserError, match=r"seed-0\.json needs \.\./my_mode\.py, and there is no"):
        read(tmp_path / "rehearsal/seed-0.json")


def test_a_mode_that_never_returns_ends_its_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "LOOKS_S", 0.5)
    monkeypatch.setattr(watch, "STUCK_S", 2.0)  # after twice as long, this process is killed
    (tmp_path / "my_mode.py").write_text(MODE.format(line="while True: pass"))
    deployment = Deployment(router_mode=str(tmp_path / "my_mode.py"))
    outcome = rehearse(deployment, Rehearsal(0, [Question(0, 0.0, [97] * 8, 4)], []))
    assert outcome.is_stuck
    assert "my_mode.py:7 (Mode.costs)" in str(outcome.violations[0])


ENDLESS = "open('begun', 'a').close()\n        while True: pass"


def interrupted(folder, *words):
    """Send a signal to a command once its mode computes, and return its exit code and its number."""
    command = [sys.executable, "-m", "dynabench", "rehearse", *words]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, start_new_session=True) as running:
        try:
            for _ in range(1200):
                if (folder / "begun").exists():
                    break
                time.sleep(0.05)
            assert (folder / "begun").exists()
            running.send_signal(signal.SIGTERM)
            running.communicate(timeout=60)
        except BaseException:
            os.killpg(running.pid, signal.SIGKILL)
            raise
    return running.returncode, running.pid


def test_one_signal_ends_a_mode_that_never_returns_and_its_processes(tmp_path):
    (tmp_path / "my_mode.py").write_text(MODE.format(line=ENDLESS))
    flags = ("--router-mode", "my_mode.py", "--faults", "none", "--jobs", "2", "--seeds", "3")
    code, number = interrupted(tmp_path, *flags)
    assert code == INTERRUPTED
    with pytest.raises(ProcessLookupError):
        for _ in range(600):  # init takes a while to collect what has ended
            os.killpg(number, 0)
            time.sleep(0.1)


def test_one_signal_ends_a_replay(tmp_path):
    rehearsed_mode(tmp_path, "raise ValueError('x')")
    (tmp_path / "my_mode.py").write_text(MODE.format(line=ENDLESS))
    code, _ = interrupted(tmp_path, "--replay", "rehearsal/seed-0.json")
    assert code == INTERRUPTED
