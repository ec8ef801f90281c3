"""The live code on virtual time and the fast simulation do the same, request by request."""

import random

import pytest
from msgspec.structs import replace

from dynabench.arm import Run, Settings
from dynabench.deployment.description import Deployment
from dynabench.rehearsal.agreement import differences, rehearsed
from dynabench.virtual.run import simulate
from mocker import EngineConfig
from reports.record.records import Requests
from serving.router.hashing import block_hashes, sequence_hashes
from serving.worker import load_reports
from tests.support.benchmarks import program
from workloads import Request, Workload
from workloads.tokens import prompt_tokens

agreement = program("agreement_of_simulations")
CASES = {case.name: case for case in agreement.cases(40)}


@pytest.mark.parametrize("name", CASES)
def test_both_simulations_do_the_same_with_each_request(name):
    case = CASES[name]
    ours, theirs = agreement.carried_out(case)
    assert len(ours) == len(case.workload)
    assert agreement.unexpected(case, differences(ours, theirs)) == []


def test_a_difference_names_the_first_request_and_how_far_they_are_apart():
    ours = Requests.of(intended_s=[0.0, 1.0, 2.0], isl=[4] * 3, osl=[2] * 3, worker=[0, 1, 1], first_token_s=[1, 2, 3])
    theirs = Requests.of(
        intended_s=[0.0, 1.0, 2.0], isl=[4] * 3, osl=[2] * 3, worker=[0, 0, None], first_token_s=[1, 2.0000001, 3]
    )
    [found] = differences(ours, theirs)
    assert (found.column, found.num_requests, found.request, found.rehearsed, found.simulated) == ("worker", 2, 1, 1, 0)
    assert str(found) == "worker differs in 2 requests by up to 1; the first is request 1: 1 rehearsed, 0 simulated"


def test_a_request_that_fails_in_one_of_them_is_a_difference():
    ours, theirs = (Requests.of(intended_s=[0.0], isl=[4], osl=[2], error=[error]) for error in ("HTTP 500", ""))
    assert [found.column for found in differences(ours, theirs)] == ["succeeded"]


# What the reasons say is all there is: without it, the two are the same.


@pytest.mark.parametrize("mode", ["chwbl", "dualmap"])
def test_modes_that_hash_blocks_choose_alike_if_the_blocks_have_the_same_names(mode):
    workload = agreement.made(40)
    run = Run.alone(Settings(agreement.deployed(mode)))
    theirs = simulate(run, as_live_code_names_blocks(workload, size=EngineConfig().block_size))
    assert differences(rehearsed(run, workload).requests, theirs.requests) == []


def test_a_mode_that_reads_load_reports_chooses_alike_if_they_come_at_once(monkeypatch):
    run, workload = Run.alone(Settings(agreement.deployed("llmd-weighted"))), agreement.busy(60)
    theirs = simulate(run, workload).requests
    assert differences(rehearsed(run, workload).requests, theirs)
    monkeypatch.setattr(load_reports, "REPORT_S", 0.001)
    assert differences(rehearsed(run, workload).requests, theirs) == []


def as_live_code_names_blocks(workload: Workload, *, size: int) -> Workload:
    """Return a workload whose ids are the hashes of its prompts' blocks; those that are not full have a name of their own."""
    rng = random.Random(0)

    def named(request: Request) -> Request:
        tokens = prompt_tokens(request, workload.block_size, salt="").astype("<u4")
        names = list(sequence_hashes(block_hashes(tokens, size)))
        rest = [rng.getrandbits(62) for _ in range(-(-len(tokens) // size) - len(names))]
        return replace(request, hash_ids=(*names, *rest))

    return Workload(workload.name, size, [named(request) for request in workload.requests])


def test_turns_are_sent_when_they_are_due_after_think_times():
    # The last request is far away; until then each answer makes another turn due, a little later than the one before.
    turns = [
        Request(0.001 * stream, 32, 4, (stream, stream), session=f"s{stream}", after=(), delay_s=0.0)
        for stream in range(4)
    ]
    for turn in range(1, 4):
        turns += [
            Request(
                0.0,
                32,
                4,
                (stream, turn),
                session=f"s{stream}",
                after=(4 * (turn - 1) + stream,),
                delay_s=0.3 + 0.1 * stream,
            )
            for stream in range(4)
        ]
    turns.append(Request(60.0, 32, 4, (9, 9)))
    record = rehearsed(Run.alone(Settings(Deployment())), Workload("w", 16, turns))
    assert record.requests.succeeded.all()
    assert float((record.requests.sent_s - record.requests.intended_s).max()) < 0.002
