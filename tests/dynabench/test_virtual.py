"""The cluster in virtual time."""

import msgspec
import numpy as np
import pytest

from dynabench.virtual.cluster import StalledError
from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from reports import folder
from reports.figures.insight import remarks
from reports.record.records import COLUMNS
from serving.router import ROUTER_MODES, RouterConfig
from tests.support.simulated import simulate_pool
from tests.support.workloads import conversations
from workloads import Request, Workload, WorkloadError, formats
from workloads.pacing import LoadConfig

MODES = [mode for mode in ROUTER_MODES if mode != "oracle-rollout"]  # which copies the simulation for every request


def simulated(workload, mode="kv", workers=3, *, router=None, **engine):
    settings = {"num_gpu_blocks": 600} | engine
    return simulate_pool(
        workload,
        mode=mode,
        engine=EngineConfig(**settings),
        router=router or RouterConfig(),
        workers=workers,
        seed=5,
    )


@pytest.fixture(scope="module")
def workload():
    return conversations(400, rate=20, max_isl=16384)


@pytest.mark.parametrize(
    ("isl", "osl", "ttft_ms", "end_ms"), [(1024, 8, 32.490712, 73.04119), (20000, 2, 415.1833, 421.9442)]
)
def test_one_request_takes_the_time_dynamo_takes(isl, osl, ttft_ms, end_ms):
    workload = Workload("w", 512, [Request(0.0, isl, osl, tuple(range(-(-isl // 512))))])
    columns = simulated(workload, workers=1, num_gpu_blocks=16384).requests
    assert columns.first_token_s[0] * 1000 == pytest.approx(ttft_ms, abs=1e-4)
    assert columns.last_token_s[0] * 1000 == pytest.approx(end_ms, abs=2e-4)


def test_four_prompts_share_a_step():
    workload = Workload("w", 512, [Request(0.0, 100, 5, (number,)) for number in range(4)])
    columns = simulated(workload, workers=1, num_gpu_blocks=16384).requests
    assert (columns.first_token_s * 1000).tolist() == pytest.approx([22.6422] * 4, abs=1e-4)
    assert (columns.last_token_s * 1000).tolist() == pytest.approx([45.6866] * 4, abs=1e-4)


def test_the_second_of_two_tokens_is_the_last():
    found = simulated(Workload("w", 512, [Request(0.0, 1024, 2, (1, 2)), Request(0.1, 1024, 1, (3, 4))])).requests
    assert found.second_token_s.tolist() == [found.last_token_s[0], None]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_second_token_of_a_worker_that_does_everything_is_known(workload, async_scheduling):
    found = simulated(workload, workers=2, num_gpu_blocks=300, async_scheduling=async_scheduling).requests
    assert found.preemptions.sum() > 0
    assert (found.second_token_s.mask == (found.osl < 2)).all()
    assert (found.first_token_s < found.second_token_s).filled(True).all()
    assert (found.second_token_s <= found.last_token_s).filled(True).all()


@pytest.mark.parametrize("mode", MODES)
def test_the_same_seed_gives_the_same_bytes(workload, mode):
    one, two = simulated(workload, mode), simulated(workload, mode)
    for name in COLUMNS:
        assert getattr(one.requests, name).tolist() == getattr(two.requests, name).tolist()
    assert one.gaps.tobytes() == two.gaps.tobytes()


def test_every_token_is_accounted_for(workload):
    result = simulated(workload)
    tokens = (result.gaps[:, 3] * result.gaps[:, 4]).sum()
    assert tokens == (result.requests.osl - 1).sum()
    waited = (result.gaps[:, 3] * result.gaps[:, 4] * result.gaps[:, 0]).sum()
    assert waited <= (result.requests.last_token_s - result.requests.first_token_s).sum() + 1e-6


def test_gaps_add_up_to_decode_times_even_with_preemption(workload):
    result = simulated(workload, workers=2, num_gpu_blocks=300)
    assert result.requests.preemptions.sum() > 0
    first, slope, curve, steps, tokens = result.gaps.T
    last = steps - 1
    total = (tokens * steps * (first + last * (slope / 2 + curve * (2 * steps - 1) / 6))).sum()
    columns = result.requests
    assert total == pytest.approx((columns.last_token_s - columns.first_token_s).sum(), rel=1e-9)


def test_kv_routing_finds_more_than_round_robin(workload):
    found = {mode: simulated(workload, mode, num_gpu_blocks=150).requests.cached_tokens.sum() for mode in MODES}
    assert found["kv"] > 1.1 * found["round-robin"]


def test_the_router_predicts_what_the_engine_finds(workload):
    columns = simulated(workload).requests
    # The index is current, so it can only be wrong about what happens between routing and admission.
    assert np.mean(columns.predicted_tokens <= columns.cached_tokens) > 0.9


def test_block_size_is_free_of_the_traces(workload):
    whole = simulated(workload, block_size=512, num_gpu_blocks=200).requests
    fine = simulated(workload, block_size=16, num_gpu_blocks=6400).requests
    coarse = simulated(workload, block_size=1024, num_gpu_blocks=100).requests
    share = {name: c.cached_tokens.sum() / c.isl.sum() for name, c in (("16", fine), ("512", whole), ("1024", coarse))}
    assert share["1024"] <= share["512"] <= share["16"] + 0.02
    with pytest.raises(WorkloadError, match="block_size 48 neither divides"):
        simulated(workload, block_size=48)


def test_late_events_cost_hits(workload):
    now = simulated(workload).requests.predicted_tokens.sum()
    late = simulated(workload, router=RouterConfig(kv_event_delay_s=5.0)).requests.predicted_tokens.sum()
    assert late < now


def test_a_request_that_cannot_fit_is_named():
    workload = Workload("w.jsonl", 512, [Request(0.0, 5000, 10, tuple(range(10)))])
    with pytest.raises(WorkloadError, match=r"w.jsonl: request 0 has 5000 prompt and 10 output tokens, more than"):
        simulated(workload, num_gpu_blocks=10)


@pytest.mark.parametrize("mode", ["kv", "jspt"])
@pytest.mark.parametrize("load", [LoadConfig(), LoadConfig(concurrency=4)])
def test_engines_of_infinite_speed_answer_at_once_and_can_be_reported(tmp_path, mode, load):
    requests = [Request(number * 0.01, 200, 20, (number % 5, 100 + number)) for number in range(60)]
    run = simulate_pool(
        Workload("w", 128, requests),
        mode=mode,
        engine=EngineConfig(),
        timing=TimingConfig(speedup_ratio=0.0),
        router=RouterConfig(),
        workers=2,
        seed=0,
        load=load,
    )
    assert (run.requests.last_token_s == run.requests.intended_s).all()
    assert run.requests.osl.tolist() == [20] * 60
    experiment = {
        "schema": folder.SCHEMA,
        "title": "",
        "subtitle": "",
        "command": "",
        "limits": [],
        "runs": [folder.run_facts(run)],
    }
    assert folder.write(tmp_path / "x", experiment, [run]).is_valid


@pytest.mark.parametrize("mode", ["round-robin", "kv", "oracle-load", "oracle-rollout"])
def test_answers_that_end_by_eos_have_the_same_tokens(workload, mode):
    requests = workload.requests[:120]
    runs = [
        simulated(Workload("w", 512, [msgspec.structs.replace(one, ends=ends) for one in requests]), mode)
        for ends in ("length", "stop")
    ]
    for run in runs:
        assert (run.gaps[:, 3] * run.gaps[:, 4]).sum() == sum(request.output_length - 1 for request in requests)
    by_length, by_eos = (run.requests for run in runs)
    assert by_eos.osl.tolist() == by_length.osl.tolist() == [request.output_length for request in requests]
    assert (set(by_length.finish_reason), set(by_eos.finish_reason)) == ({"length"}, {"stop"})


def test_an_answer_whose_eos_lies_beyond_max_model_len_ends_by_length():
    requests = [Request(0.0, 100, 20, (0,), ends="stop"), Request(0.0, 100, 29, (1,), ends="stop")]
    columns = simulated(Workload("w", 512, requests), max_model_len=128, num_gpu_blocks=100).requests
    assert columns.osl.tolist() == [20, 28]
    assert columns.finish_reason.tolist() == ["stop", "length"]


def test_the_limit_of_an_answer_that_ends_by_eos_needs_no_more_room_than_there_is():
    requests = [Request(0.0, 1024, 500, (0, 1), ends="stop")]
    columns = simulated(Workload("w", 512, requests), workers=1, num_gpu_blocks=1 + 1524 // 16 + 1, block_size=16)
    assert columns.requests.finish_reason.tolist() == ["stop"]


def test_a_sequence_that_is_preempted_and_then_too_long_for_a_step_is_said_to_wait_forever():
    """As in vLLM, which for this reason wants steps as long as its longest sequence."""
    requests = [Request(0.0, 150, 150, tuple(range(10 * number, 10 * number + 10))) for number in (0, 1)]
    engine = {"num_gpu_blocks": 23, "block_size": 16, "max_num_batched_tokens": 160, "max_num_seqs": 8}
    engine |= dict.fromkeys(("enable_chunked_prefill", "enable_prefix_caching"), False)
    with pytest.raises(
        StalledError, match=r"^1 requests never finish, as with the real engine: .* can never be admitted: 22 of 22"
    ):
        simulated(Workload("w", 16, requests), workers=1, **engine)


def test_step_times_without_host_time_say_that_synchronous_scheduling_costs_nothing(workload):
    synchronous = EngineConfig(async_scheduling=False)
    timed = TimingConfig(model="meta-llama/Llama-3.1-8B", gpu="h100")
    run = simulate_pool(workload, engine=synchronous)
    assert "have no host time" in remarks([run])[0]
    assert run.notes == ()
    assert not remarks([simulate_pool(workload, engine=synchronous, timing=timed)])
    assert not remarks([simulate_pool(workload)])


def test_a_model_without_a_gpu_is_refused(workload):
    with pytest.raises(ValueError, match="needs a gpu for its step times"):
        simulate_pool(workload, timing=TimingConfig(model="meta-llama/Llama-3.1-8B"))


def test_a_model_with_generic_step_times_is_said_to_have_no_effect_on_them(workload):
    model = "meta-llama/Llama-3.1-8B"
    run = simulate_pool(workload, timing=TimingConfig(model=model, timing="polynomial"))
    assert remarks([run]) == [
        "its step times and number of KV blocks are not those of --model, because --gpu is not given"
    ]
    assert run.notes == ()
    assert run.requests.last_token_s.tolist() == simulate_pool(workload).requests.last_token_s.tolist()
    assert not remarks([simulate_pool(workload, timing=TimingConfig(model=model, gpu="h100"))])


def test_an_id_that_repeats_behind_other_ids_is_another_block(tmp_path):
    rows = [[1, 2, 1], [9, 2, 4], [2, 1, 7], [1, 2, 1], [21, 22, 23, 24, 25, 26, 27], [2, 1, 8]]
    file = tmp_path / "random_ids.jsonl"
    file.write_text(
        "".join(
            f'{{"timestamp": {number * 1000}, "input_length": {16 * len(ids)}, "output_length": 5, "hash_ids": {ids}}}\n'
            for number, ids in enumerate(rows)
        )
    )
    read = formats.read(file, block_size=16)
    few = simulated(read, workers=1, block_size=16, num_gpu_blocks=9)  # its fifth request evicts all
    many = simulated(read, workers=1, block_size=16, num_gpu_blocks=100)
    assert few.requests.cached_tokens.tolist() == [0, 0, 0, 16, 0, 0]
    assert many.requests.cached_tokens.tolist() == [0, 0, 0, 32, 0, 32]
