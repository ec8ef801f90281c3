"""SGLang's schedulers as cores: what holds whichever scheduler is behind the pipes."""

import json
import random
from dataclasses import replace

import pytest

from dynabench.arm import Run, Settings
from dynabench.deployment.core import CoreConfig
from dynabench.deployment.description import Deployment, Pool
from dynabench.fidelity.audit.run import audit
from dynabench.fidelity.audit.scenarios import sglang_scenario
from dynabench.fidelity.audit.suspects import suspects
from dynabench.fidelity.audit.verify import verify_installed
from dynabench.installed.process import scheduler_process
from dynabench.virtual.run import simulate
from foundation.errors import UserError
from mocker import BlockChain, Sequence, SglangConfig
from mocker.families import new_engine
from mocker.installed.scheduler import Scheduled, Updated
from mocker.step_log import StepLog
from mocker.timing.constant import Constant
from tests.installed.ours import SglangEngine, python_with
from tests.installed.test_audit import contended
from tests.support import commands

TIGHT = SglangConfig(page_size=4, max_total_tokens=800, max_running_requests=8, schedule_conservativeness=0.02)


def settings(mode="round-robin", workers=1, engine=TIGHT):
    pool = Pool(engine_type="sglang", replicas=workers, sglang=engine)
    return Settings(Deployment(pools=(pool,), router_mode=mode))


@pytest.fixture
def process(tmp_path):
    with scheduler_process(python_with(tmp_path, version="0.5.23"), "sglang") as process:
        yield process


@pytest.mark.parametrize(("mode", "workers"), [("round-robin", 1), ("kv", 3)])
def test_the_same_scheduler_is_identical(process, mode, workers):
    found = audit(settings(mode, workers, replace(TIGHT, page_size=8)), contended(), process)
    assert found.difference is None
    assert [found.left.name, found.right.name] == ["our rules of 0.5.23", "SGLang 0.5.23"]
    assert found.left.num_steps == found.right.num_steps > 100
    assert [cost.left for cost in found.costs] == [cost.right for cost in found.costs]
    left, right = (side.record.requests for side in (found.left, found.right))
    assert left.cached_tokens.tolist() == right.cached_tokens.tolist()
    assert left.cached_tokens.sum() > 0


def test_random_scenarios_are_identical(process):
    num_preemptions = 0
    for seed in range(25):
        found = audit(*sglang_scenario(seed), process)
        assert found.difference is None, f"scenario {seed}: {found.difference}"
        num_preemptions += int(found.left.record.requests.preemptions.sum())
    assert num_preemptions > 10


def test_a_setting_that_the_other_one_ignores_is_found_and_named(process):
    class Wrong:
        engine, release, forget = process.engine, process.release, process.forget

        @staticmethod
        def new_scheduler(given):
            return process.new_scheduler(given | {"enable_mixed_chunk": True})

    found = audit(settings(), contended(), Wrong())
    assert found.difference is not None
    assert found.explanations[0].rule == "enable_mixed_chunk"
    assert found.explanations[0].difference is None


def test_each_setting_that_is_on_or_off_can_be_turned_round():
    assert [name for name, _ in suspects(settings().deployment)] == [
        "disable_overlap_schedule",
        "disable_radix_cache",
        "enable_mixed_chunk",
        "enable_priority_scheduling",
    ]


def test_a_verification_counts_scenarios(process):
    found = verify_installed(process, 2)
    assert found.comparison.num_identical == 2
    assert found.comparison.rules == found.comparison.version == "0.5.23"


def test_a_simulation_has_the_same_record_with_the_installed_scheduler(tmp_path):
    ours = settings("kv", 2)
    core = CoreConfig(engine_core="sglang", engine_python=python_with(tmp_path, version="0.5.23"))
    theirs = replace(ours, deployment=replace(ours.deployment, core=core))
    left, right = (simulate(Run.alone(each), contended()).requests for each in (ours, theirs))
    assert left.first_token_s.tolist() == right.first_token_s.tolist()
    assert left.done_s.tolist() == right.done_s.tolist()


def test_a_core_of_another_engine_is_refused():
    with pytest.raises(ValueError, match=r"core\.engine_core is 'vllm'; expected mocker, or 'sglang' as engine_type"):
        replace(settings().deployment, core=CoreConfig(engine_core="vllm"))


def test_an_engine_without_a_program_is_refused():
    with pytest.raises(UserError, match="engine_type trtllm can be run yet; expected vllm or sglang"):
        scheduler_process("python", "trtllm").__enter__()


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (replace(TIGHT, scheduler_recv_interval=2), "scheduler_recv_interval above 1 cannot be simulated"),
        (replace(TIGHT, max_queued_requests=4), "max_queued_requests cannot be simulated"),
        (replace(TIGHT, enable_hierarchical_cache=True), "KV in host memory cannot be simulated"),
    ],
)
def test_what_cannot_be_run_is_refused(process, engine, message):
    with pytest.raises(ValueError, match=message):
        audit(settings(engine=engine), contended(), process)


class Local:
    """An installed scheduler in this process."""

    def __init__(self, given):
        self._engine = SglangEngine(given)
        self.add, self.abort, self.reset = self._engine.add, self._engine.abort, lambda: self._engine.reset(None)

    def schedule(self):
        return Scheduled(*self._engine.schedule(None))

    def update(self, accepted):
        return Updated(*self._engine.update(accepted))


def rows_with_aborts(config, seed, installed=None, num_blocks=100):
    """Run requests, some of which are aborted while they wait, while they are computed or while they decode."""
    rng, now = random.Random(seed), 0.0
    log = StepLog(lambda: now)
    engine = new_engine(
        config, Constant(0.003, 0.001), num_blocks=num_blocks, installed=installed, steps=log, kv_events=False
    )
    sequences, ended = [], []
    for number in range(40):
        chain = BlockChain([rng.randrange(4)], 1, blocks_per_id=1)
        sequences.append(Sequence(number, num_prompt=rng.randint(5, 90), max_tokens=rng.randint(1, 40), chain=chain))
        sequences[-1].ignores_eos = False  # so SGLang takes more than it has room for, and retracts
    waiting = sequences[::-1]
    while waiting or not engine.is_idle:
        if waiting and rng.random() < 0.5:
            engine.add(waiting.pop())
        there = sorted(engine.sequences(), key=lambda one: one.id)
        if there and rng.random() < 0.05:
            engine.abort(min(there, key=lambda one: (rng.random(), one.id)))
        step = engine.schedule(now)
        if step is None:
            continue
        if there and rng.random() < 0.05:
            engine.abort(sequences[rng.choice(sorted(one.id for one in engine.sequences()) or [0])])
        now = step.end
        ended += sorted((now, one.id) for one in engine.complete().finished)
    return [(row.start_s, [*row.tokens], row.preempted, row.num_free, row.num_steps) for row in log.rows], ended


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("changes", [{}, {"disable_overlap_schedule": True}, {"chunked_prefill_size": 16}])
def test_aborted_requests_end_in_the_same_steps(seed, changes):
    config = replace(TIGHT, max_total_tokens=400, **changes)
    ours, theirs = (rows_with_aborts(config, seed, each) for each in (None, Local))
    assert ours == theirs
    assert len(ours[1]) < 40


@pytest.mark.parametrize(("seed", "has_overlap"), [(10, False), (11, True), (11, False), (13, True)])
def test_requests_that_are_aborted_and_retracted_at_once_stay_over(seed, has_overlap):
    config = replace(TIGHT, max_total_tokens=160, new_token_ratio_decay_steps=1)
    config = replace(config, disable_overlap_schedule=not has_overlap)
    ours, theirs = (rows_with_aborts(config, seed, each, num_blocks=40) for each in (None, Local))
    assert ours == theirs
    assert any(preempted for _, _, preempted, *_ in ours[0])


def test_the_command_audits_the_engine_that_the_deployment_has(tmp_path):
    trace = {"timestamp": 0, "input_length": 30, "output_length": 5, "hash_ids": [1]}
    (tmp_path / "trace.jsonl").write_text(json.dumps(trace) + "\n")
    python = python_with(tmp_path, version="0.5.23")
    arguments = ("audit", "trace.jsonl", "--engine-type", "sglang", "--engine-python", python)
    done = commands.dynabench(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(
        "identical: our rules of 0.5.23 and SGLang 0.5.23 take the same 5 steps for 1 requests, with 0 preemptions and "
        "at least "
    )
