"""What came of drafts in live runs: workers report it, the frontend shows it, and a run's record has it."""

from dynabench.arm import ClientConfig, Run, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.flags import MeasuredFrontendConfig, MeasuredRouterConfig
from dynabench.live.draft_watch import DraftWatch
from dynabench.live.run import measure
from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from reports.record.pools import DraftUse
from workloads import Request, Workload

WORKLOAD = Workload("w", 16, [Request(0.01 * number, 32, 30, (2 * number, 2 * number + 1)) for number in range(4)])
DRAFTING = EngineConfig(
    block_size=16, num_gpu_blocks=200, num_speculative_tokens=3, acceptance_rates="1,1,1", drafting_ms=1
)


def deployment(engine=DRAFTING, **timing):
    pool = Pool(name="mine", replicas=1, mocker=engine, timing=TimingConfig(timing="constant", **timing))
    return Deployment(pools=(pool,), router=MeasuredRouterConfig(), frontend=MeasuredFrontendConfig())


def rows(**counts):
    text = 'dynamo_component_spec_decode_{}_total{{instance="a",model="m",{}rank="0",worker_type="aggregated"}} {}\n'
    found = ""
    for name, value in counts.items():
        name, _, place = name.partition("__")
        position = f'position="{place}",' if place else ""
        found += text.format(name, position, value)
    return found.encode()


def test_a_live_run_says_what_came_of_drafts():
    record = measure(Run.alone(Settings(deployment(speedup_ratio=20.0), client=ClientConfig())), WORKLOAD)
    [use] = record.drafts
    # Of 30 tokens, one comes with the prompt; seven steps bring four each, and the last has room for one.
    assert (use.name, use.steps, use.accepted) == ("mine", 32, (32, 32, 32))
    assert use.drafts == 3 * 32


def test_what_workers_counted_before_the_run_is_not_its_own():
    watch = DraftWatch()
    assert not watch.has_any
    assert watch.uses(deployment(), WORKLOAD) == ()
    for steps in (10, 30):
        watch.note(
            rows(
                num_drafts=steps,
                num_draft_tokens=3 * steps,
                num_batches=steps / 2,
                num_accepted_tokens_per_pos__0=steps,
                num_accepted_tokens_per_pos__1=steps / 2,
            )
        )
    [use] = watch.uses(deployment(), WORKLOAD)
    assert use == DraftUse("mine", 20, 60, (20, 10), 2.0, use.gains)
    assert use.gains
    assert use.gains[0].sequences == 1


def test_a_rank_that_had_not_reported_when_the_run_began_is_new():
    watch = DraftWatch()
    watch.note(b"")
    watch.note(rows(num_drafts=4, num_draft_tokens=4, num_batches=4, num_accepted_tokens_per_pos__0=3))
    [use] = watch.uses(deployment(), WORKLOAD)
    assert (use.steps, use.accepted) == (4, (3,))


def test_a_run_without_speculation_has_none():
    watch = DraftWatch()
    watch.note(b'dynamo_component_kv_active_blocks{instance="a"} 1\n')
    assert not watch.has_any
