"""`dynabench rehearse`: what is rehearsed, what is said, and what is left of a failure."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.file import read_deployment
from dynabench.interrupt import Interrupt
from dynabench.rehearsal.all_seeds import (
    Plan,
    carry_out,
    check_workload,
    lines,
    refused,
    rehearse_all,
    replay,
    run_rehearsal,
)
from dynabench.rehearsal.checks.invariants import Violation
from dynabench.rehearsal.clients.client import Question
from dynabench.rehearsal.clients.limits import Limits
from dynabench.rehearsal.clients.questions import generated, taken
from dynabench.rehearsal.faults.fault import Fault, Kind
from dynabench.rehearsal.files import read
from dynabench.rehearsal.news import Item, News
from dynabench.rehearsal.run import Rehearsal, rehearse, started
from dynabench.rehearsal.settings import RehearseConfig
from dynabench.rehearsal.shrink import shrunk, size
from dynabench.rehearsal.stage.stage import PLANNER, SUPERVISOR, names_of
from dynabench.terminal import Terminal
from foundation.errors import UserError
from mocker import EngineConfig, SglangConfig, TrtllmConfig
from serving.router.books import RankBooks
from tests.support.commands import dynabench, in_process
from workloads import Request, Workload, WorkloadError


@pytest.mark.parametrize(("text", "numbers"), [("3", range(3)), ("5..7", range(5, 7))])
def test_seeds_are_a_number_or_a_range(text, numbers):
    assert RehearseConfig(seeds=text).numbers == numbers


@pytest.mark.parametrize("text", ["0", "7..5", "many", "-1"])
def test_seeds_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="expected a number such as 200"):
        RehearseConfig(seeds=text)


def test_the_requests_of_a_seed_are_the_same_each_time_and_of_another_seed_are_not():
    assert generated(1, 20, 10.0) == generated(1, 20, 10.0) != generated(2, 20, 10.0)
    assert [asked.number for asked in generated(1, 20, 10.0)] == list(range(20))


def test_requests_of_a_workload_come_at_its_times():
    requests = [Request(2.0 * number, 32, 4, (number, number)) for number in range(10)]
    found = taken(Workload("w", 16, requests), 3, 4)
    assert [asked.at_s for asked in found] == [0.0, 2.0, 4.0, 6.0]
    assert all(len(asked.prompt) == 32 and asked.max_tokens == 4 for asked in found)


def test_a_rehearsal_shrinks_to_what_it_fails_by():
    faults = [Fault("kill", float(number), 1.0, f"worker-{number}") for number in range(7)]
    whole = Rehearsal(1, generated(1, 30, 10.0), faults)

    def fails(smaller):
        return {"worker-2", "worker-5"} <= {fault.target for fault in smaller.faults} and any(
            asked.number == 17 for asked in smaller.questions
        )

    found = shrunk(whole, fails)
    assert [fault.target for fault in found.faults] == ["worker-2", "worker-5"]
    assert [asked.number for asked in found.questions] == [17]


def test_each_try_to_make_a_rehearsal_smaller_is_reported_with_the_least_so_far():
    whole, seen = Rehearsal(1, generated(1, 4, 10.0), [Fault("kill", 0.0, 1.0, "worker-0")]), []
    found = shrunk(
        whole, lambda some: len(some.questions) > 1, lambda least, number: seen.append((number, size(least)))
    )
    assert seen[:4] == [
        (1, "1 fault and 4 requests"),  # the first request alone
        (2, "1 fault and 4 requests"),
        (3, "0 faults and 4 requests"),
        (4, "0 faults and 2 requests"),
    ]
    assert size(found) == "0 faults and 2 requests"


def test_what_always_fails_shrinks_in_one_try():
    whole, seen = Rehearsal(1, generated(1, 60, 10.0), [Fault("kill", 0.0, 1.0, "worker-0")]), []
    found = shrunk(whole, lambda _: True, lambda _, number: seen.append(number))
    assert (size(found), seen) == ("0 faults and 1 request", [1])


def test_what_was_said_last_is_heard():
    heard = []
    with News(lambda *violation: heard.append(violation), lambda *_: None) as news:
        news.teller.tell(Item(7, "alive", "x"))
    assert heard == [(7, Violation("alive", "x"))]


def test_a_violation_is_reported_before_it_is_made_smaller(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(RankBooks, "remove", lambda *_, **__: None)
    settings = RehearseConfig(seeds="1", requests=3, faults="none", jobs=1, out=tmp_path / "out")
    plan = Plan(DEPLOYMENT, settings.faults, settings.requests, settings.rate)
    with Interrupt() as interrupt:
        rehearse_all(
            *(plan, settings, interrupt, lambda _: said.append("written")),
            on_violations=lambda seed, found: said.append((seed, found.invariant)),
            on_try=lambda seed, size, number: said.append(number),
        )
    assert said == [(0, "released"), 1, "written"]


ROOT = Path(__file__).parents[2]
OF_CI = (
    ROOT / "examples/deployment.yaml",
    ROOT / "examples/prefill_decode.yaml",
    *sorted(ROOT.glob(".ci/rehearsed/*.yaml")),
)


@pytest.mark.parametrize("file", OF_CI, ids=lambda file: file.stem)
def test_what_ci_rehearses_can_be_rehearsed(file):
    _, outcome = carry_out(Plan(read_deployment(file), "medium", 10, 12.0), 1)
    assert outcome.violations == []
    assert len(outcome.texts) > 0


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("file", sorted(ROOT.glob("examples/*.yaml")), ids=lambda file: file.stem)
def test_every_example_can_be_rehearsed(file, seed):
    _, outcome = carry_out(Plan(read_deployment(file), "medium", 10, 12.0), seed)
    assert outcome.violations == []
    assert len(outcome.texts) > 0


def test_the_example_with_a_planner_can_be_rehearsed_as_it_is():
    assert names_of(read_deployment(ROOT / "examples/planner.yaml"))[1][-2:] == [PLANNER, SUPERVISOR]


def test_one_process_and_two_rehearse_the_same(tmp_path):
    done = [
        dynabench("rehearse", "--seeds", "3", "--requests", "10", "--jobs", jobs, "--out", tmp_path / "o")
        for jobs in ("1", "2")
    ]
    assert done[0].stdout == done[1].stdout
    assert "3 seeds, 0 violations" in done[0].stdout


DEPLOYMENT = Deployment(router_mode="kv")


def carried_out(tmp_path, **config):
    failed = []
    settings = RehearseConfig(jobs=1, out=tmp_path / "out", **config)
    plan = Plan(DEPLOYMENT, settings.faults, settings.requests, settings.rate)
    with Interrupt() as interrupt:
        return rehearse_all(plan, settings, interrupt, failed.append), failed


def test_what_holds_leaves_nothing_behind(tmp_path):
    found, failed = carried_out(tmp_path, seeds="2", requests=20)
    assert (found.num_seeds, found.num_requests, failed) == (2, 69, []), "two of 20, and an overload of 29"
    assert not (tmp_path / "out").exists()
    assert list(lines(found))[-1] == "2 seeds, 0 violations"
    stopped = found._replace(is_complete=False)
    assert list(lines(stopped))[-1] == "2 seeds, 0 violations; interrupted: the other seeds did not run"


def test_a_planted_bug_is_found_shrunk_and_replayed(tmp_path, monkeypatch):
    remove = RankBooks.remove

    def forgets(self, *arguments, prompt_tokens, **options):
        if prompt_tokens < 100:  # of a long prompt, the request stays booked
            remove(self, *arguments, prompt_tokens=prompt_tokens, **options)

    monkeypatch.setattr(RankBooks, "remove", forgets)
    found, (failed,) = carried_out(tmp_path, seeds="1", requests=20, faults="light")
    assert {violation.invariant for violation in failed.violations} == {"released"}
    assert (len(failed.smaller.questions), failed.smaller.faults) == (1, [])
    assert "released: " in failed.picture.read_text()
    deployment, rehearsal = read(failed.file)
    assert (deployment, rehearsal) == (DEPLOYMENT, failed.smaller)
    monkeypatch.undo()
    assert replay(deployment, rehearsal, failed.file).violations == []
    assert "Every invariant held." in failed.picture.read_text()
    assert list(lines(found))[-1] == "1 seed, 1 with violations (released)"


def test_a_file_that_is_no_rehearsal_is_refused(tmp_path):
    (tmp_path / "x.json").write_text('{"schema": "other"}')
    with pytest.raises(UserError, match=r"is no rehearsal: its schema is 'other'"):
        read(tmp_path / "x.json")
    for text in ("null", "[]", '{"schema": "dynabench.rehearsal/1"}', "{"):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(UserError, match=r"x\.json is no rehearsal: (expected an object|it has no|Input data|JSON)"):
            read(tmp_path / "x.json")
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read(tmp_path / "y.json")


@pytest.mark.parametrize("name", ["u.jsonl.gz", "u.jsonl", "u.csv", "u.parquet"])
def test_a_workload_in_place_of_the_deployment_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(b"{}"))
    with pytest.raises(UserError, match=f"the first argument is a deployment, and .*{name} is a workload; expected"):
        in_process("rehearse", str(tmp_path / name), "--seeds", "1")


def test_the_command_says_what_happened(tmp_path):
    done = dynabench("rehearse", "--seeds", "2", "--requests", "15", "--out", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["violations"] == {}
    assert len(said["happened"]) > 1
    assert list(said["happened"]) == sorted(said["happened"])
    assert set(said["happened"]) <= {*get_args(Kind)}
    assert "2 seeds, 0 violations" in done.stderr
    refused = dynabench("rehearse", "--engine", "vllm", "--seeds", "1")
    assert refused.returncode == 2


@pytest.mark.parametrize(
    "pool",
    [
        Pool(mocker=EngineConfig(max_model_len=64)),
        Pool(engine_type="sglang", sglang=SglangConfig(context_length=64)),
        Pool(engine_type="trtllm", trtllm=TrtllmConfig(max_num_tokens=64)),
    ],
    ids=["vllm", "sglang", "trtllm"],
)
def test_generated_requests_fit_the_model(pool):
    deployment = Deployment(pools=(replace(pool, replicas=2),))
    _, outcome = carry_out(Plan(deployment, "none", 20, 12.0, limits=started(deployment)), 0)
    assert (outcome.violations, outcome.num_failed) == ([], 0)


def test_a_context_in_which_nothing_can_be_asked_is_refused():
    done = dynabench("rehearse", "--max-model-len", "8", "--seeds", "1")
    assert (done.returncode, done.stderr) == (
        2,
        "dynabench: prompts may have 7 tokens: too few to ask anything; expected 8 or more\n",
    )


def of_lengths(*lengths):
    return Workload("w", 16, [Request(0.1 * n, *both, tuple(range(99))) for n, both in enumerate(lengths)])


SHORT = Deployment(pools=(Pool(replicas=2, mocker=EngineConfig(max_model_len=64)),))


def test_requests_of_a_workload_that_do_not_fit_are_refused_as_they_must_be():
    plan = Plan(SHORT, "none", 9, 12.0, of_lengths((32, 4), (64, 4), (60, 40), (8, 80)), limits=started(SHORT))
    assert [(asked.is_too_long, asked.max_tokens) for asked in plan.of(0).questions] == [
        (False, 4),
        (True, 4),
        (False, 4),  # cut, as a server cuts it
        (True, 80),
    ]
    check_workload(plan)
    assert refused(plan) == ["2 of 4 requests do not fit the context of 64 tokens; they must be refused (HTTP 400)"]
    _, outcome = carry_out(plan, 0)
    assert (outcome.violations, outcome.num_requests, outcome.num_failed) == ([], 4, 0)


def test_a_prompt_of_a_workload_that_leaves_no_room_is_left_out():
    limits = Limits(room=40)
    asked = taken(of_lengths((32, 20), (40, 4), (41, 4), (8, 4)), 0, 9, limits=limits)
    assert [(each.number, each.max_tokens) for each in asked] == [(0, 8), (3, 4)]
    with pytest.raises(UserError, match="w: no prompt leaves room for an answer in 40 tokens"):
        taken(of_lengths((48, 4)), 0, 9, limits=limits)


def test_a_request_that_is_answered_although_it_does_not_fit_is_a_violation():
    asked = [Question(0, 0.0, [97] * 8, 4, is_too_long=True)]
    [violation] = rehearse(DEPLOYMENT, Rehearsal(0, asked, [])).violations
    assert str(violation) == "counted: question-0 was answered, and does not fit its model"


@pytest.mark.parametrize(
    ("lengths", "mocker", "said"),
    [
        ((99, 4), EngineConfig(max_model_len=64), "w: no request fits the context of 64 tokens"),
        (
            (99, 4),
            EngineConfig(num_gpu_blocks=6, block_size=16),
            "request 0 has 99 prompt and 4 output tokens, more than",
        ),
    ],
)
def test_a_workload_that_simulate_refuses_is_refused(lengths, mocker, said):
    deployment = Deployment(pools=(Pool(mocker=mocker),))
    with pytest.raises(WorkloadError, match=said):
        check_workload(Plan(deployment, "none", 9, 12.0, of_lengths(lengths), limits=started(deployment)))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--num-speculative-tokens", "3"),
            "worker-0 does not start: num_speculative_tokens is 3, with nothing about acceptance",
        ),
        (("--drafting-ms", "3"), "drafting_ms is 3, but num_speculative_tokens is 0"),
        (("--max-tokens-per-mm-item", "300"), "images are not sent to workers that are served"),
        (("--model-path", "/nowhere"), "worker-0 does not start: /nowhere does not exist"),
    ],
)
def test_what_serve_refuses_is_refused_before_any_seed(words, said):
    done = dynabench("rehearse", *words, "--seeds", "2")
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_encoder_is_refused_wherever_the_rehearsal_is_called():
    pool = Pool(mocker=EngineConfig(max_tokens_per_mm_item=300))
    with pytest.raises(UserError, match="images are not sent to workers that are served"):
        run_rehearsal(Deployment(pools=(pool,)), (), RehearseConfig(seeds="1"), console=Terminal(quiet=True))


@pytest.mark.parametrize("engine", ["echo_core", "echo_full"])
def test_engines_that_echo_are_asked_what_they_take(engine):
    deployment = Deployment(pools=(Pool(replicas=2, engine=engine),))
    _, outcome = carry_out(Plan(deployment, "none", 5, 12.0, limits=started(deployment)), 0)
    assert (outcome.violations, outcome.num_failed, len(outcome.texts)) == ([], 0, 5)
