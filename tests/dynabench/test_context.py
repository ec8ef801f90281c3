"""Requests that are longer than the model's context."""

import json
from dataclasses import replace

import numpy as np
import pytest

from dynabench.arm import Arm, Run, Settings
from dynabench.capacity.floors import floor_of
from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.engines import Longest, answered, are_answered, check_fits, engines_of
from dynabench.experiment.bounds import bounds_of
from dynabench.experiment.head import head_of
from dynabench.virtual.run import simulate
from dynabench.virtual.whole_prompts import num_held
from mocker import EngineConfig, TrtllmConfig
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from reports import folder
from reports.figures.insight import remarks
from reports.figures.slo import parse_slo
from reports.summarize import summarize
from serving.model import context as model_context
from tests.reports.runs import run
from tests.support.commands import dynabench
from tests.support.simulated import deployed, simulate_pool
from workloads import Request, Workload, WorkloadError
from workloads.pacing import LoadConfig

LLAMA = TimingConfig(model="meta-llama/Llama-2-7b", gpu="h100")
REFUSED = "HTTP 400: this model's maximum context length is 128 tokens; the request has {}"


def of(*sizes):
    """Return a workload of requests of (prompt, answer) tokens, two a second."""
    ids = [tuple(range(10_000 * place, 10_000 * place + -(-isl // 64))) for place, (isl, _) in enumerate(sizes)]
    return Workload("w", 64, [Request(place / 2, *size, ids[place]) for place, size in enumerate(sizes)])


def within(length, **engine):
    return EngineConfig(max_model_len=length, **engine)


def trtllm(config):
    return Settings(Deployment(pools=(Pool(engine_type="trtllm", trtllm=config),)))


def test_the_context_of_the_model_is_the_default_of_max_model_len():
    assert resolve(EngineConfig(), LLAMA).config.max_model_len == 4096
    assert resolve(within(2000), LLAMA).config.max_model_len == 2000
    assert resolve(EngineConfig(), TimingConfig()).config.max_model_len is None


@pytest.mark.parametrize(
    ("size", "error", "answer"),
    [
        ((100, 28), "", 28),
        ((100, 29), "", 28),
        ((127, 9), "", 1),
        ((128, 1), REFUSED.format("128 prompt tokens and max_tokens of 1"), 0),
        ((300, 1), REFUSED.format("300 prompt tokens and max_tokens of 1"), 0),
        ((10, 128), "", 118),
        ((10, 129), REFUSED.format("10 prompt tokens and max_tokens of 129"), 0),
    ],
)
def test_a_request_beyond_the_context_is_refused_or_cut_as_by_vllm(size, error, answer):
    requests = simulate_pool(of(size), engine=within(128)).requests
    assert (requests.error[0], requests.osl[0]) == (error, answer)


def test_requests_that_are_refused_are_errors_without_times_and_delay_nobody():
    record = simulate_pool(of((100, 20), (200, 20), (90, 20)), engine=within(128))
    alone = simulate_pool(of((100, 20), (90, 20)), engine=within(128))
    assert record.is_complete
    assert not record.notes
    assert record.requests.succeeded.tolist() == [True, False, True]
    assert record.requests.first_token_s.mask.tolist() == [False, True, False]
    ttfts = [(each.first_token_s - each.intended_s).compressed() for each in (record.requests, alone.requests)]
    assert ttfts[0] == pytest.approx(ttfts[1])
    assert len(record.gaps) == len(alone.gaps)


def test_a_request_that_waits_for_a_refused_one_follows_it():
    first = Request(0.0, 300, 5, (1,))
    second = Request(0.0, 100, 5, (2,), after=(0,), delay_s=2.0)
    requests = simulate_pool(Workload("w", 64, [first, second]), engine=within(128)).requests
    assert requests.intended_s.tolist() == [0.0, 2.0]
    assert requests.succeeded.tolist() == [False, True]


def test_a_run_whose_requests_were_all_refused_is_not_valid():
    [note] = simulate_pool(of((300, 1), (200, 1)), engine=within(128)).notes
    assert note.startswith("every request failed, the first with: HTTP 400: this model's maximum context length")


def test_one_line_says_how_many_were_refused_or_cut_and_the_way_out():
    record = simulate_pool(of((100, 20), (300, 1), (200, 20), (120, 20)), engine=within(128))
    [arm] = summarize([record]).arms.values()
    assert (arm.failed, list(arm.errors.values())) == (2, [2])
    [remark] = [each for each in arm.remarks if "context" in each]
    assert (
        "2 of 4 requests do not fit the context of 128 tokens and were refused (HTTP 400); 1 answer was cut" in remark
    )
    for way in ("--max-model-len", "a model with a longer context", "--fail-on-too-long"):
        assert way in remark


def test_without_a_model_nothing_is_refused_and_nothing_is_said():
    record = simulate_pool(of((100_000, 20)))
    assert record.requests.succeeded.all()
    assert "refused" not in record.facts


def test_a_workload_can_be_refused_instead():
    settings = Settings(deployed(engine=within(128)), load=LoadConfig(fail_on_too_long=True))
    with pytest.raises(
        WorkloadError, match=r"request 1 has 100 prompt and 29 output tokens, more than max_model_len \(128\)"
    ):
        simulate(Run.alone(settings), of((100, 28), (100, 29)))


def test_what_is_refused_needs_no_room_in_the_cache():
    engine = within(128, num_gpu_blocks=3)
    requests = simulate_pool(of((100, 28), (5000, 20)), engine=engine).requests
    assert requests.succeeded.tolist() == [True, False]
    [simulated] = engines_of(deployed(engine=within(1000, num_gpu_blocks=3)))
    with pytest.raises(WorkloadError, match="more than the 128 that an engine can hold"):
        check_fits(of((100, 30)), simulated)


def test_the_shared_prefix_of_a_refused_prompt_is_in_no_cache():
    twice = [Request(0.0, 256, 5, (1, 2, 3, 4)), Request(5.0, 100, 5, (1, 5)), Request(9.0, 100, 5, (1, 6))]
    requests = simulate_pool(Workload("w", 64, twice), engine=within(128)).requests
    assert requests.endless_tokens.tolist() == [0, 0, 64]
    assert requests.cached_tokens.filled(0).tolist() == [0, 0, 64]


def test_bounds_and_floors_are_those_of_what_is_answered():
    sizes = ((100, 20), (4000, 20), (90, 20), (120, 20))
    short, whole = of((100, 20), (90, 20), (120, 8)), of(*sizes)
    assert [each.output_length for each in answered(whole, Longest(128))] == [20, 20, 8]
    assert answered(short, Longest(128)) is short
    settings = Settings(deployed(engine=within(128)))
    bounds = bounds_of([Arm("a", settings, {})], lambda shape: whole)
    record = simulate_pool(whole, engine=within(128))
    ttft_s = record.requests.first_token_s - record.requests.intended_s
    assert bounds.ttft_s == pytest.approx(float(ttft_s.mean()))
    unlimited = bounds_of([Arm("a", Settings(deployed()), {})], lambda shape: whole)
    assert bounds.ttft_s < unlimited.ttft_s
    found = floor_of(settings, lambda shape: of((200, 1), (300, 1)), [parse_slo("ttft <= 1s")])
    assert found.impossible == "no request fits the context of 128 tokens"


def test_a_live_run_of_mockers_refuses_and_cuts_the_same_requests(tmp_path):
    trace = tmp_path / "t.jsonl"
    rows = [(0, 100, 20), (100, 300, 5), (200, 120, 20), (300, 90, 10)]
    trace.write_text("".join(
        json.dumps({"timestamp": at, "input_length": isl, "output_length": osl, "hash_ids": [at]}) + "\n"
        for at, isl, osl in rows
    ))  # fmt: skip
    found = {}
    for command, more in (("run", ("--max-failed-share", "1")), ("simulate", ())):
        out = tmp_path / command
        settings = ("--workers", "1", "--max-model-len", "128", "--router-mode", "random", "--out", out, *more)
        done = dynabench(command, trace, "--trace-block-size", "512", *settings)
        assert done.returncode == 0, done.stderr + done.stdout
        _, [record] = folder.read(out)
        found[command] = record.requests
    live, virtual = found.values()
    assert live.osl.tolist() == virtual.osl.tolist() == [20, 0, 8, 10]
    for refusal in (live.error[1], virtual.error[1]):
        assert refusal.startswith("HTTP 400: ")
        assert (
            "this model's maximum context length is 128 tokens; the request has 300 prompt tokens and max_tokens of 5"
            in refusal
        )


def test_the_commands_say_it(tmp_path):
    trace = tmp_path / "t.jsonl"
    row = {"timestamp": 0, "input_length": 6000, "output_length": 50, "hash_ids": list(range(12))}
    trace.write_text(
        json.dumps(row) + "\n" + json.dumps(row | {"input_length": 3000, "hash_ids": list(range(6))}) + "\n"
    )
    simulated = (
        "simulate",
        trace,
        "--workers",
        "1",
        "--model",
        LLAMA.model,
        "--gpu",
        "h100",
        "--router-mode",
        "random",
    )
    done = dynabench(*simulated, "--out", tmp_path / "x")
    assert done.returncode == 0, done.stderr
    assert (
        "1 of 2 requests does not fit the context of 4,096 tokens and was refused (HTTP 400); use"
        in done.stdout.replace("\n", " ")
    )
    summary = json.loads((tmp_path / "x" / "summary.json").read_text())
    assert summary["arms"]["random"]["failed"] == 1
    hard = dynabench(*simulated, "--fail-on-too-long", "--out", tmp_path / "y")
    assert (hard.returncode, hard.stderr.count("\n")) == (2, 1)
    assert "more than max_model_len (4096) of an engine" in hard.stderr
    assert dynabench(*simulated, "--cap-isl", "4000", "--fail-on-too-long", "--out", tmp_path / "z").returncode == 0


def test_a_plan_says_which_requests_no_number_of_gpus_can_serve(tmp_path):
    trace = tmp_path / "t.jsonl"
    rows = [{"timestamp": 0, "input_length": size, "output_length": 5, "hash_ids": []} for size in (6000, 100)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--model", LLAMA.model, "--gpu", "h100", "--tensor-parallel-size", 1, "--max-num-batched-tokens", 2048)
    done = dynabench("plan", trace, *flags, "--slo", "ttft.p50 <= 9s", "--max-gpus", 2, "--out", tmp_path / "x")
    assert "1 of 2 requests do not fit the context of 4,096 tokens" in done.stdout, done.stderr


@pytest.mark.parametrize("context", [1, 2, 100, None])
def test_a_workload_is_refused_as_each_of_its_requests_is(context):
    lengths = [(isl, osl) for isl in (1, 2, 99, 100, 101) for osl in (1, 2, 99, 100, 101)]
    workload = Workload("w", 512, [Request(0.0, isl, osl, (number,)) for number, (isl, osl) in enumerate(lengths)])
    for longest in (Longest(context), Longest(context, 99), Longest(context, 2)):
        wanted = [longest.refusal(isl, osl) is None for isl, osl in lengths]
        assert are_answered(workload, longest).tolist() == wanted
    served = [context is None or model_context.refusal(context, isl, osl) is None for isl, osl in lengths]
    assert are_answered(workload, Longest(context)).tolist() == served


def test_prompts_that_tensorrt_llm_does_not_cut_are_refused_one_by_one():
    workload = of((100, 20), (130, 20), (128, 20))
    whole = TrtllmConfig(max_num_tokens=128)
    requests = simulate(Run.alone(trtllm(whole)), workload).requests
    assert [bool(error) for error in requests.error] == [False, True, False]
    assert "the prompt has 130 tokens; a step takes 128" in requests.error[1]
    cut = TrtllmConfig(max_num_tokens=128, enable_chunked_context=True)
    assert simulate(Run.alone(trtllm(cut)), workload).requests.succeeded.all()
    assert "fits a step of 128 tokens" in floor_of(trtllm(whole), lambda shape: of((200, 1)), []).impossible


def test_prompts_that_leave_no_room_for_decodes_wait_for_them_and_the_way_out_is_said():
    """A prompt of 128 tokens that are computed whole fills a step of 128, so it waits until nobody decodes."""
    workload = Workload("w", 32, [Request(float(n), 128, 40, (n, n, n, n)) for n in range(40)])

    def held(count=4, **changes):
        settings = trtllm(TrtllmConfig(max_num_tokens=128, **changes))
        record = simulate(Run.alone(replace(settings, load=LoadConfig(concurrency=count))), workload)
        return record.facts.get("held"), [said for said in remarks([record]) if "leave too little room" in said]

    count, (said,) = held()
    assert count == 39  # all but the first
    assert said == (
        "39 of 40 prompts waited for other requests to end: a prompt is computed in one step, of at most 128 tokens "
        "(max_num_tokens), and prompts of up to 128 tokens leave too little room in it for the decodes; cut prompts with "
        "--enable-chunked-context, or raise --max-num-tokens"
    )
    assert held(1) == (0, [])
    assert held(enable_chunked_context=True) == (None, [])


def test_prompts_are_held_only_beside_more_decodes_than_they_leave_room_for():
    """Eight prompts of 128 tokens, one admitted each second, which decode for 4.5 s; later ones wait beside five."""
    starts = np.arange(8.0)
    made = run(
        ttft=[1.0] * 8,
        isl=[128] * 8,
        cached_tokens=[0] * 8,
        worker=[0] * 8,
        intended_s=np.maximum(starts - 0.5, 0),
        sent_s=np.maximum(starts - 0.5, 0),
        admitted_s=starts,
        first_token_s=starts + 0.25,
        last_token_s=starts + 4.75,
        done_s=starts + 4.75,
    )
    assert [num_held(made.requests, 128 + room) for room in (0, 1, 4, 5)] == [7, 6, 3, 0]


def test_the_head_says_that_prompts_are_computed_whole():
    [whole, cut] = [
        head_of(of((100, 20)), [trtllm(TrtllmConfig(enable_chunked_context=is_cut)).deployment], [LoadConfig()])
        for is_cut in (False, True)
    ]
    assert (whole["Chunk"], cut["Chunk"]) == (
        "none (prompts are computed whole, at most 8,192 tokens a step)",
        "8,192 tokens",
    )
