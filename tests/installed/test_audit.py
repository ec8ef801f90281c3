"""Audits of a stand-in for an installed scheduler: ours behind its pipes, perhaps with one rule the other way."""

import json
import os
import random
import resource
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import structs

from dynabench.arm import Run, Settings
from dynabench.cli.audit import lines
from dynabench.deployment.core import CoreConfig
from dynabench.fidelity.audit.run import audit, audit_versions
from dynabench.fidelity.audit.scenarios import scenario
from dynabench.fidelity.audit.suspects import Explanation, suspects, with_engines
from dynabench.fidelity.audit.verify import Verification, verify_installed
from dynabench.installed.compared import (
    ENOUGH,
    Comparison,
    Release,
    comparisons,
    comparisons_file,
    note,
    refuse_unknown,
)
from dynabench.installed.process import SchedulerProcess, scheduler_process
from dynabench.virtual.run import simulate
from foundation.errors import UserError
from mocker import EngineConfig
from mocker.installed.scheduler import Scheduled
from mocker.installed.vllm_core import InstalledVllmCore
from mocker.vllm.versions import Rules
from serving.planner import PlannerConfig
from tests.installed.ours import python_with
from tests.support import commands
from tests.support.simulated import deployed
from workloads import Request, Workload


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def contended(num_requests=60, seed=5):
    """Requests of three priorities that need more blocks than there are."""
    rng, now, requests = random.Random(seed), 0.0, []
    for number in range(num_requests):
        now += rng.expovariate(100.0)
        ids = tuple(range(1000 * number, 1000 * number + 20)) if rng.random() < 0.6 else tuple(range(20))
        requests.append(Request(now, 150, rng.randint(5, 60), ids[:19], priority=rng.randrange(3)))
    return Workload("contended", 8, requests)


CONTENDED = EngineConfig(
    engine_version="0.32",
    block_size=8,
    num_gpu_blocks=50,
    max_num_batched_tokens=256,
    scheduling_policy="priority",
    scheduler_reserve_full_isl=False,
)


def settings(mode="round-robin", workers=1, engine=CONTENDED):
    return Settings(deployed(mode, workers=workers, engine=engine))


@pytest.mark.parametrize(("mode", "workers"), [("round-robin", 1), ("kv", 3)])
def test_the_same_scheduler_is_identical(tmp_path, mode, workers):
    with scheduler_process(python_with(tmp_path)) as process:
        found = audit(settings(mode, workers), contended(), process)
    assert found.difference is None
    assert found.left.num_steps == found.right.num_steps > 100
    assert found.left.record.requests.preemptions.sum() > 0
    assert [cost.left for cost in found.costs] == [cost.right for cost in found.costs]
    assert found.slower == []


def test_a_rule_that_was_changed_is_found_and_named(tmp_path):
    with scheduler_process(python_with(tmp_path, flipped="goes_on_after_victim")) as process:
        found = audit(settings(), contended(), process)
    assert found.difference is not None
    assert found.difference.what == "the tokens that are computed"
    assert found.explanations[0].rule == "goes_on_after_victim"
    assert found.explanations[0].difference is None
    assert found.costs[0].left != found.costs[0].right


def test_ours_is_audited_even_if_the_deployment_says_that_the_installed_scheduler_decides(tmp_path):
    python = python_with(tmp_path, flipped="goes_on_after_victim")
    core = CoreConfig(engine_core="vllm", engine_python=python)
    with scheduler_process(python) as process:
        found = audit(Settings(replace(settings().deployment, core=core)), contended(), process)
    assert found.difference is not None
    assert found.explanations[0].rule == "goes_on_after_victim"


def test_a_setting_with_another_default_is_found_and_named(tmp_path):
    ours = settings(engine=replace(CONTENDED, num_gpu_blocks=80, scheduler_reserve_full_isl=True))

    class Wrong:
        """An installed scheduler that ignores one setting."""

        def __init__(self, process):
            self.engine, self.release, self.forget = process.engine, process.release, process.forget
            self._new = process.new_scheduler

        def new_scheduler(self, given):
            return self._new(given | {"scheduler_reserve_full_isl": False})

    with scheduler_process(python_with(tmp_path)) as process:
        found = audit(ours, contended(), Wrong(process))
    assert found.difference is not None
    assert found.explanations[0].rule == "scheduler_reserve_full_isl"
    assert found.explanations[0].difference is None


def test_rules_that_a_workload_does_not_meet_change_nothing(tmp_path):
    ours = with_engines(settings().deployment, lambda config: replace(config, scheduling_policy="fcfs"))
    with scheduler_process(python_with(tmp_path, flipped="goes_on_after_victim")) as process:
        found = audit(Settings(ours), contended(), process)
    assert found.difference is None


def test_a_rule_that_only_moves_the_difference_does_not_explain_it(tmp_path):
    with scheduler_process(python_with(tmp_path, flipped="goes_on_after_victim")) as process:
        found = audit(settings(), contended(), process)
    later = found.difference._replace(step=1234, what="who is preempted")
    moved = replace(found, explanations=[Explanation("seats_all_adapters", later)])
    said = lines(moved)
    assert "no rule explains it alone" in said
    assert (
        "  with seats_all_adapters turned round, the two are the same up to step 1,234 (then who is preempted)" in said
    )
    assert "rule goes_on_after_victim explains it: turned round, the two are identical" in lines(found)

    verification = Verification("0.32.0", "0.32", 2)
    verification.add(0, found)
    verification.add(1, moved)
    assert verification.reasons == {"goes_on_after_victim": [0], "unknown": [1]}


def test_two_versions_are_compared_without_ours(tmp_path):
    other = python_with(tmp_path, version="0.32.9", flipped="goes_on_after_victim")
    with scheduler_process(python_with(tmp_path)) as first, scheduler_process(other) as second:
        found = audit_versions(settings(), contended(), first, second)
    assert [found.left.name, found.right.name] == ["vLLM 0.32.0", "vLLM 0.32.9"]
    assert found.difference is not None
    assert found.explanations == []
    worst = found.slower[0]
    assert worst.right - worst.left == max(each.right - each.left for each in found.slower) > 0


def test_random_scenarios_are_identical(tmp_path):
    plain = [
        seed
        for seed in range(12)
        if not (engine := scenario(seed, "0.32")[0].deployment.pools[0].mocker).num_speculative_tokens
        and not engine.enable_lora
    ]
    assert len(plain) > 4
    with scheduler_process(python_with(tmp_path)) as process:
        for seed in plain:
            assert audit(*scenario(seed, "0.32"), process).difference is None, f"scenario {seed}"


def test_a_simulation_has_the_same_record_with_the_installed_scheduler(tmp_path):
    ours = settings("kv", 2)
    core = CoreConfig(engine_core="vllm", engine_python=python_with(tmp_path))
    theirs = replace(ours, deployment=replace(ours.deployment, core=core))
    left, right = (simulate(Run.alone(each), contended()).requests for each in (ours, theirs))
    assert left.first_token_s.tolist() == right.first_token_s.tolist()
    assert left.done_s.tolist() == right.done_s.tolist()
    assert left.cached_tokens.tolist() == right.cached_tokens.tolist()


def test_a_version_that_nobody_compared_is_refused_until_it_is(tmp_path, cache, capsys):
    python = python_with(tmp_path, version="0.99")
    core = CoreConfig(engine_core="vllm", engine_python=python)
    run = Run.alone(replace(settings(), deployment=replace(settings().deployment, core=core)))
    with pytest.raises(
        UserError, match=r"vLLM 0.99, whose scheduler was never compared.* dynabench verify --engine-core"
    ):
        simulate(run, contended())
    with scheduler_process(python) as process:
        found = verify_installed(process, 1)
        assert note(process.release, found.comparison) == comparisons_file()
        known = json.loads(comparisons_file().read_text())["digest of 0.99 "]
        assert known["num_scenarios"] == 1
        with pytest.raises(UserError, match="compared with ours in only 1 of the 60 scenarios that are needed"):
            simulate(run, contended())
        note(process.release, structs.replace(found.comparison, num_scenarios=60))
    assert simulate(run, contended()).is_complete


def test_a_folder_in_place_of_the_comparisons_is_named_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert comparisons() == {}
    comparisons_file().mkdir(parents=True)
    with pytest.raises(UserError, match=r"engine-cores.json: cannot be read \(Is a directory\)"):
        comparisons()


def test_errors_of_the_installed_scheduler_reach_the_user(tmp_path):
    with (
        scheduler_process(python_with(tmp_path, fails_at=40)) as process,
        pytest.raises(UserError, match=r"failed: AssertionError: no more"),
    ):
        audit(settings(), contended(), process)


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("/nowhere/python", "cannot be run"),
        ("/bin/false", r"ended: exit code 1; expected a Python that has vLLM \(--engine-python\)"),
    ],
)
def test_a_python_without_an_engine_is_refused(python, message):
    with pytest.raises(UserError, match=message), scheduler_process(python):
        pass


def open_files():
    return {each.name for each in Path("/proc/self/fd").iterdir()}


@pytest.mark.parametrize("python", ["/nowhere/python", "/bin/false"])
def test_a_python_without_an_engine_leaves_no_file_open(python):
    before = open_files()
    with pytest.raises(UserError) as kept, scheduler_process(python):  # as long as it is kept, nothing is collected
        pass
    assert kept.value is not None
    assert open_files() <= before


def test_a_process_is_asked_however_many_files_are_open(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, limits[1]))
    files = []
    try:
        while not files or files[-1] < 1024:
            files.append(os.open(os.devnull, os.O_RDONLY))
        with scheduler_process(python_with(tmp_path)) as process:
            assert process.release.version == "0.32.0"
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_an_answer_that_is_cut_short_is_reported_as_the_end_of_the_process(tmp_path):
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nimport os, sys\nos.write(int(sys.argv[3]), b'\\x64\\0\\0\\0abc')\n")
    script.chmod(0o755)
    with pytest.raises(UserError, match="ended: exit code 0"), scheduler_process(str(script)):
        pass


def test_a_planner_is_refused_because_each_side_might_start_other_engines(tmp_path):
    planned = Settings(replace(settings().deployment, planner=PlannerConfig(planner="hpa")))
    with scheduler_process(python_with(tmp_path)) as process:
        for run in (
            lambda: audit(planned, contended(), process),
            lambda: audit_versions(planned, contended(), process, process),
        ):
            with pytest.raises(UserError, match="leave out planner"):
                run()


def test_what_cannot_be_run_with_an_installed_scheduler_is_refused(tmp_path):
    ours = settings(engine=replace(CONTENDED, num_host_blocks=100))
    with (
        scheduler_process(python_with(tmp_path)) as process,
        pytest.raises(ValueError, match="KV in host memory cannot be simulated with an installed scheduler yet"),
    ):
        audit(ours, contended(), process)


def test_an_adaptive_threshold_is_refused_by_a_vllm_that_has_none(monkeypatch):
    for name in ("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "0")  # the program sets them: afterwards they are as before
    from dynabench.installed.vllm_program import adapt_threshold

    old, new = SimpleNamespace(), SimpleNamespace(adaptive_long_prefill_threshold=False)
    adapt_threshold(old, is_adaptive=False)
    adapt_threshold(new, is_adaptive=True)
    assert new.adaptive_long_prefill_threshold is True
    with pytest.raises(ValueError, match="long_prefill_token_threshold_adaptive is on, which this vLLM does not have"):
        adapt_threshold(old, is_adaptive=True)


def test_a_pause_of_new_sequences_alone_is_refused_by_an_installed_core():
    core = InstalledVllmCore(CONTENDED, 50, SimpleNamespace(schedule=lambda: Scheduled([], [], [], [], 49, False)))
    assert core.schedule() is None
    core.pause = "new"
    with pytest.raises(AssertionError, match="always takes new sequences"):
        core.schedule()


def test_every_rule_can_be_turned_round():
    found = dict(suspects(settings().deployment))
    for rule in Rules._fields:
        rules = found[rule].pools[0].mocker.rules
        assert getattr(rules, rule) is not getattr(CONTENDED.rules, rule)


def test_a_shorter_comparison_does_not_replace_a_longer_one(cache):
    release = Release("vllm", "0.99.0", "digest")
    note(release, Comparison("0.99.0", "0.33", ENOUGH, ENOUGH, []))
    note(release, Comparison("0.99.0", "0.33", 1, 1, []))
    refuse_unknown(release, "python")
    note(release, Comparison("0.99.0", "0.33", ENOUGH, ENOUGH - 1, ["unknown"]))
    assert json.loads(comparisons_file().read_text())["digest"]["num_identical"] == ENOUGH - 1


def test_comparisons_that_cannot_be_read_are_said_before_any_scenario_runs(tmp_path, cache):
    comparisons_file().mkdir(parents=True)
    done = commands.dynabench(
        "verify", "--engine-core", "vllm", "--engine-python", "/nowhere/python",
        env={"XDG_CACHE_HOME": str(tmp_path / "cache")},
    )  # fmt: skip
    assert done.returncode == 2
    assert "engine-cores.json: cannot be read" in done.stderr


def test_a_program_that_is_no_python_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("dynabench.installed.process.START_S", 0.2)
    endless = tmp_path / "endless"
    endless.write_text("#!/bin/sh\nexec sleep 1000\n")
    endless.chmod(0o755)
    with pytest.raises(UserError, match=r"did not answer within 0.2 s; expected a Python that has vLLM"):
        SchedulerProcess(str(endless))
