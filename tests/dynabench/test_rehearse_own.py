"""The user's own engine in rehearsals."""

import sys

import pytest

from dynabench.deployment.description import Deployment, Pool
from dynabench.rehearsal.all_seeds import Plan, replay
from dynabench.rehearsal.clients.client import Question
from dynabench.rehearsal.faults.fault import Fault
from dynabench.rehearsal.run import Rehearsal, rehearse
from dynabench.rehearsal.stage.own import check_own
from foundation.errors import UserError

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
        ("__import__('time').sleep(0.01)", r"worker-\d uses time.sleep, which takes real time"),
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
