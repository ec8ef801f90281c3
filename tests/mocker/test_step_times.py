"""Step-time models: what a model, a GPU and measurements say a step takes."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, parquet

from mocker import BlockChain, EngineConfig, Sequence, SglangConfig, new_engine
from mocker.models.catalog import find_model, model_configs
from mocker.models.shape import shape_of
from mocker.timing.catalog import find_engine, find_gpu, gpu_names
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig, divide
from mocker.timing.engine_times import timing_model
from mocker.timing.files import SCHEMA
from mocker.timing.gpu import over_link
from mocker.timing.model import Load, Prefill, chunk
from mocker.timing.parts import coefficients
from mocker.timing.roofline import Roofline
from mocker.timing.sampling import SAMPLERS
from mocker.timing.vllm_defaults import largest_graph

LLAMA = "meta-llama/Llama-3.1-8B"


def simulated(**settings):
    dials, times = divide(settings)
    return resolve(EngineConfig(**dials), TimingConfig(**times))


def roofline(gpu="h100", model=LLAMA, **more):
    return simulated(gpu=gpu, model=model, **more)


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        (LLAMA, 8.03),
        ("meta-llama/Llama-3.1-70B", 70.55),
        ("meta-llama/Llama-3.1-405B", 405.8),
        ("Qwen/Qwen2.5-7B", 7.62),
        ("Qwen/Qwen3-0.6B", 0.596),
        ("Qwen/Qwen3-30B-A3B", 30.5),
        ("Qwen/Qwen3-235B-A22B", 235.1),
        ("mistralai/Mixtral-8x7B-v0.1", 46.7),
        ("deepseek-ai/DeepSeek-V3", 671.0),
        ("openai/gpt-oss-120b", 116.8),
    ],
)
def test_a_shape_has_the_parameters_its_makers_publish(model, billions):
    assert find_model(model).num_parameters / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(
    ("short", "name"),
    [
        ("google/gemma-3-27b", "google/gemma-3-27b-it"),
        ("nvidia/Nemotron-3-Nano", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
        ("Qwen3.5-35B-A3B", "Qwen/Qwen3.5-35B-A3B"),
    ],
)
def test_a_name_without_what_only_one_bundled_model_has_is_understood(short, name):
    assert find_model(short) == find_model(name)


@pytest.mark.parametrize("name", ["openai/gpt-oss", "Qwen/Qwen3.5", "deepseek-ai/DeepSeek-V4"])
def test_a_name_that_may_be_another_models_is_refused(name):
    with pytest.raises(ValueError, match="neither bundled nor a folder"):
        find_model(name)


def test_every_bundled_model_runs_on_some_bundled_gpu():
    for name in model_configs():
        shape = find_model(name)
        gpu, engine = find_gpu("b200"), find_engine("vllm", "blackwell")
        model = Roofline(coefficients(shape, gpu, engine, tensor_parallel_size=8))
        assert 0 < model.decode(1, 1000).first < model.mixed(chunk(8192), 1, 1000), name


@pytest.mark.parametrize(
    "name", ["meta-llama/Llama-3.1-8B-Instruct", "Meta-Llama-3.1-8B", "nvidia/Llama-3.1-8B-Instruct-FP8"]
)
def test_variants_of_a_model_share_its_shape(name):
    found = find_model(name)
    assert (found.num_layers, found.hidden_size) == (32, 4096)
    assert found.weights == ("fp8" if name.endswith("FP8") else "bfloat16")


def test_a_config_json_is_read(tmp_path):
    config = model_configs()["Qwen/Qwen3-8B"] | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_model(str(tmp_path)).weights == "fp8"
    assert next(find_model(str(tmp_path / "config.json")).mixers)[0].num_kv_heads == 8
    with pytest.raises(ValueError, match="lacks vocab_size"):
        shape_of({key: value for key, value in config.items() if key != "vocab_size"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpu": "h100"}, "needs a model"),
        ({"gpu": "h1000", "model": LLAMA}, "gpu 'h1000' is not known; did you mean h100?"),
        ({"gpu": "h100", "model": "nobody/nothing"}, "neither bundled nor a folder"),
        ({"gpu": "h100", "model": "meta-llama/Llama-3.1-70B"}, "leave no room for KV blocks"),
        ({"gpu": "a100", "model": LLAMA, "quantization": "fp8"}, "does not support fp8 weights"),
        (
            {"gpu": "rtx-4090", "model": LLAMA, "tensor_parallel_size": 2},
            "tensor_parallel_size 2 was not measured on rtx-4090",
        ),
        ({"timing": "roofline"}, "needs a gpu and a model"),
        ({"timing": "table"}, "needs a timing_file"),
        ({"timing": "constant", "timing_file": "x.csv"}, "timing_file cannot be combined with timing constant"),
        ({"timing_file": "nothing.json"}, "not a calibration"),
        ({"timing_file": "nothing.csv"}, "not a table of step times"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be greater than 0 and at most 1, not 1.5"),
        ({"timing": "guess"}, "timing must be one of polynomial, constant, roofline, calibrated, table, not 'guess'"),
        ({"num_gpu_blocks": 1}, "num_gpu_blocks must be at least 2, not 1"),
        ({"watermark": 1.0}, "watermark must be at least 0 and less than 1, not 1.0"),
        ({"max_num_seqs": 9000}, "must be at least max_num_seqs"),
    ],
)
def test_what_cannot_be_timed_is_refused_in_a_line(settings, message):
    with pytest.raises(ValueError, match=message):
        simulated(**settings)


def test_a_decode_that_is_bound_by_memory_takes_the_time_to_read_the_weights():
    shape, gpu = find_model(LLAMA), find_gpu("h100")
    least = (
        (shape.num_parameters - shape.embedding_parameters / 2) * 2 / gpu.bandwidth
    )  # the head is read, the embedding looked up
    assert least < roofline().timing.decode(1, 1).first < 1.8 * least


@pytest.mark.parametrize(("weights", "own", "other"), [("fp8", "fp8", "fp4"), ("fp4", "fp4", "fp8")])
def test_inputs_of_matrices_are_quantised_at_the_share_of_their_own_type(weights, own, other):
    gpu, engine, shape = find_gpu("b200"), find_engine("vllm", "blackwell"), find_model(LLAMA).quantised(weights)

    def prefill_s(**shares):
        return Roofline(coefficients(shape, gpu, replace(engine, quantise=shares))).mixed(chunk(8192), 0, 0)

    assert prefill_s(**{own: 1.0}) > prefill_s() == prefill_s(**{other: 1.0})


def test_a_prefill_that_is_bound_by_compute_takes_the_time_of_its_flops():
    shape = find_model(LLAMA)
    least = 2 * 8192 * (shape.num_parameters - shape.embedding_parameters) / find_gpu("h100").flops["bfloat16"]
    assert least < roofline().timing.mixed(chunk(8192), 0, 0) < 1.8 * least


@pytest.mark.parametrize("gpu", gpu_names())
def test_more_work_takes_longer(gpu):
    model = roofline(gpu).timing
    assert model.decode(8, 8000).first < model.decode(16, 8000).first < model.decode(16, 16000).first
    alone, beside = model.mixed(chunk(480), 0, 0), model.mixed(chunk(480), 16, 16000)
    assert alone < beside < alone + model.decode(16, 16000).first  # the weights are read once
    assert model.mixed(chunk(2048), 0, 0) < model.mixed(chunk(2048, 8192), 0, 0) < model.mixed(chunk(10240), 0, 0)


def test_steps_with_prompts_that_cuda_graphs_launch_take_as_long_as_their_kernels():
    many, few, none = (
        roofline("b200", max_cudagraph_capture_size=most, timed_as=engine).timing
        for most, engine in ((2048, "vllm"), (512, "vllm"), (2048, "sglang"))
    )
    launched_s = 32 * find_engine("vllm", "blackwell").launch_layer_s
    assert many.mixed(chunk(1000), 0, 0) < launched_s < few.mixed(chunk(1000), 0, 0)
    assert few.mixed(chunk(505), 7, 7000) < launched_s < few.mixed(chunk(505), 8, 7000)
    assert many.mixed(chunk(2049), 0, 0) == few.mixed(chunk(2049), 0, 0)
    assert many.decode(8, 8000) == few.decode(8, 8000)
    assert none.mixed(chunk(1000), 0, 0) == roofline("b200", timed_as="sglang").timing.mixed(chunk(1000), 0, 0)


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({}, 512),
        ({"max_num_seqs": 1024}, 1024),
        ({"max_num_seqs": 64}, 128),
        ({"max_num_seqs": 64, "num_speculative_tokens": 1, "acceptance_length": 1.5}, 256),
    ],
)
def test_graphs_are_as_large_as_vllm_captures_them(settings, most):
    timing = TimingConfig(model="Qwen/Qwen3-0.6B", gpu="b200")  # whose kernels are faster than launching them
    model = timing_model(EngineConfig(**settings), timing, 1000)
    assert 1.2 * model.mixed(chunk(most), 0, 0) < model.mixed(chunk(most + 1), 0, 0)
    assert largest_graph(find_gpu("h100"), 1024, 0) == 512


def test_launching_prompts_takes_longer_with_experts_and_with_latent_attention():
    gpu, plain = find_gpu("b200"), find_engine("trtllm", "blackwell")
    plain = replace(plain, launch_layer_s=1.0, launch_experts_s=0.0, launch_latent_s=0.0)

    def least_s(model, **launches):
        engine = replace(plain, **launches)
        return Roofline(coefficients(find_model(model), gpu, engine, tensor_parallel_size=8)).mixed(chunk(9), 0, 0)

    for model, layers, mixtures, latent in (
        ("openai/gpt-oss-120b", 36, 36, 0),
        ("deepseek-ai/DeepSeek-V3", 61, 58, 61),
    ):
        assert least_s(model) == pytest.approx(layers, abs=0.01)
        assert least_s(model, launch_experts_s=0.5) == pytest.approx(layers + mixtures / 2, abs=0.01)
        assert least_s(model, launch_latent_s=0.5) == pytest.approx(layers + latent / 2, abs=0.01)


def test_norms_over_all_heads_are_one_more_sum_over_gpus_in_each_layer():
    gpu, engine, shape = find_gpu("b200"), find_engine("vllm", "blackwell"), find_model("MiniMaxAI/MiniMax-M2.5")
    layers = tuple(
        (layer._replace(mixers=tuple(replace(mixer, is_normed_across=False) for mixer in layer.mixers)), count)
        for layer, count in shape.layers
    )
    other = replace(shape, layers=layers)
    for num_gpus in (1, 2, 4):
        across, apart = (
            Roofline(coefficients(found, gpu, engine, tensor_parallel_size=num_gpus)).decode(8, 8000).first
            for found in (shape, other)
        )
        sum_s = 0.0 if num_gpus == 1 else gpu.all_reduce[num_gpus][0][1]
        assert across - apart == pytest.approx(62 * sum_s, abs=1e-9)


def test_two_gpus_are_faster_than_one_but_less_than_twice():
    one, two = (roofline(tensor_parallel_size=n).timing.decode(1, 100).first for n in (1, 2))
    assert one / 2 < two < one


@pytest.mark.parametrize(
    "settings",
    [{}, {"tensor_parallel_size": 4}, {"model": "deepseek-ai/DeepSeek-V3", "gpu": "h200", "tensor_parallel_size": 8}],
)
def test_the_ramp_of_a_decode_is_what_its_steps_take(settings):
    model = roofline(**settings).timing
    ramp = model.decode(7, 5000)
    for step in (1, 10, 1000):
        assert ramp.duration(step) == pytest.approx(model.decode(7, 5000 + 7 * step).first, rel=1e-12)


def limited_by_host(**times):
    """Step times of a small model beside a slow host."""
    engine = replace(find_engine("vllm", "hopper"), **times)
    return Roofline(coefficients(find_model("Qwen/Qwen3-0.6B"), find_gpu("h100"), engine))


def test_what_the_host_does_is_hidden_by_asynchronous_scheduling_and_added_without_it():
    shape, gpu = find_model(LLAMA), find_gpu("h100")
    engine = replace(find_engine("vllm", "hopper"), step_s=0.001, sequence_s=1e-5)
    both, hidden = (Roofline(coefficients(shape, gpu, engine, async_scheduling=on)) for on in (False, True))
    assert both.decode(8, 8000).first - hidden.decode(8, 8000).first == pytest.approx(0.001 + 8e-5)
    assert both.mixed(chunk(512), 7, 7000) - hidden.mixed(chunk(512), 7, 7000) == pytest.approx(0.00108)
    assert (both.lead_s, hidden.lead_s) == (0.0, 0.001)


def test_a_step_takes_as_long_as_the_host_where_that_is_slower_until_the_context_has_grown():
    model = limited_by_host(step_s=0.006, sequence_s=0.0)
    ramp = model.decode(32, 100_000)
    assert ramp.duration(0) == ramp.duration(ramp.num_steps - 1) == 0.006
    assert model.decode(32, 100_000 + 32 * (ramp.num_steps - 1)).first == 0.006
    assert 0.006 < model.decode(32, 100_000 + 32 * ramp.num_steps).first < 0.00601
    assert model.mixed(chunk(16), 0, 0) == 0.006


def test_a_step_of_many_sequences_keeps_memory_free_to_sample_for_them():
    few, many = (roofline(max_num_seqs=n, max_num_batched_tokens=2048, block_size=16) for n in (256, 2048))
    logits = (2048 - 256) * 128_256 * 4
    assert 3 * logits < (few.num_blocks - many.num_blocks) * 16 * 131_072 < 4 * logits


def test_vllms_own_log_tells_as_much_room():
    settings = {"model": "meta-llama/Llama-3.1-70B", "quantization": "fp8", "block_size": 16}
    settings |= {"max_num_seqs": 1024, "max_num_batched_tokens": 16384}  # vLLM 0.23 for offline use; 47,648 tokens
    assert roofline("rtx-pro-6000", **settings).num_usable_tokens == pytest.approx(47_648, rel=0.02)


def test_kv_blocks_follow_from_what_the_weights_leave():
    one, two = roofline(block_size=16), roofline(block_size=16, tensor_parallel_size=2)
    token = 2 * 8 * 128 * 32 * 2
    room = 0.9 * 80 * 2**30 - 2 * 8.03e9
    assert 0.93 < one.num_blocks * 16 * token / room < 1  # activations and the context take the rest
    assert two.num_blocks > 2 * one.num_blocks
    assert roofline(num_gpu_blocks=77).num_blocks == 77
    assert roofline(block_size=16, kv_cache_dtype="fp8").num_blocks == pytest.approx(2 * one.num_blocks, rel=0.001)


@pytest.mark.parametrize("timing", ["polynomial", "constant", "roofline"])
def test_a_speedup_of_0_is_infinite_as_in_dynamo(timing):
    def model(**ratios):
        settings = {"model": "meta-llama/Llama-3.1-8B", "gpu": "h100"} if timing == "roofline" else {}
        return simulated(timing=timing, **settings, **ratios).timing

    both, decode = model(speedup_ratio=0.0), model(decode_speedup_ratio=0.0)
    assert both.mixed(chunk(512), 3, 600) == 0
    assert both.decode(3, 600)[:3] == (0, 0, 0)
    assert decode.decode(3, 600)[:3] == (0, 0, 0)
    assert decode.mixed(chunk(512), 0, 0) > 0


def test_a_speedup_divides_every_model():
    plain, fast = roofline().timing, roofline(speedup_ratio=4.0, decode_speedup_ratio=2.0).timing
    assert fast.mixed(chunk(100), 3, 300) == plain.mixed(chunk(100), 3, 300) / 4
    assert fast.decode(3, 300).duration(5) == pytest.approx(plain.decode(3, 300).duration(5) / 8)


def run(engine, lengths, max_iterations):
    engine, now = new_engine(engine.config, engine.timing, num_blocks=engine.num_blocks, kv_events=False), 0.0
    for number, (prompt, output) in enumerate(lengths):
        engine.add(Sequence(number, num_prompt=prompt, max_tokens=output, chain=BlockChain([], 0)))
    times = []
    while (step := engine.schedule(now, max_iterations=max_iterations)) is not None:
        now = step.end
        times += [(sequence.id, now) for sequence in engine.complete().finished]
    return times


def write_table(path, curvature):
    rows = [{"prefill_tokens": n, "num_decodes": 0, "kv_tokens": 0, "step_ms": 5 + n / 100} for n in (16, 256, 4096)]
    rows += [
        {"prefill_tokens": 0, "num_decodes": n, "kv_tokens": kv, "step_ms": 4 + n / 10 + kv**curvature / 500}
        for n in (1, 8, 32)
        for kv in (100, 1000, 10000, 50000)
    ]
    table = pa.Table.from_pylist(rows)
    csv.write_csv(table, path) if path.suffix == ".csv" else parquet.write_table(table, path)
    return str(path)


@pytest.mark.parametrize("kind", ["roofline", "host", "table", "calibrated"])
def test_leaps_are_exact_with_every_model(kind, tmp_path):
    lengths = [(30, 200), (500, 90), (60, 400), (70, 7)]
    if kind == "roofline":
        engine = roofline()
    elif kind == "host":
        model = limited_by_host(step_s=0.0, sequence_s=0.0)
        least = model.decode(3, 900).first  # passed within the run
        engine = replace(roofline(), timing=limited_by_host(step_s=least, sequence_s=0.0))
    elif kind == "table":
        engine = simulated(timing_file=write_table(tmp_path / "steps.csv", 0.8))
    else:
        (tmp_path / "calibration.json").write_text(json.dumps(CALIBRATION))
        engine = simulated(timing_file=str(tmp_path / "calibration.json"))
    stepped, leapt = run(engine, lengths, 1), run(engine, lengths, 1 << 40)
    assert [id for id, _ in stepped] == [id for id, _ in leapt]
    assert [time for _, time in stepped] == pytest.approx([time for _, time in leapt], rel=1e-9)


CALIBRATION = {
    "schema": SCHEMA,
    "engine": {"name": "vllm", "num_gpu_blocks": 321},
    "step": {
        "fixed": 0.001,
        "mixed": 0.002,
        "tokens": [[0, 1e-5], [64, 2e-5]],
        "sequence": 1e-4,
        "prompt": 3e-4,
        "pair": 1e-9,
        "context": 2e-9,
        "kv": 1e-8,
        "mixed_kv": 2e-8,
    },
    "overhead": {"request_ms": 1.0, "prompt_token_us": 0.0, "spacing_ms": 0.5, "answer_ms": 1.0},
    "noise": [0.9, 1.1],
}


@pytest.mark.parametrize("name", ["engine", "step", "overhead", "noise"])
def test_a_calibration_that_lacks_a_part_is_refused(tmp_path, name):
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({key: value for key, value in CALIBRATION.items() if key != name}))
    with pytest.raises(ValueError, match=f"calibration.json: not a calibration .it has no '{name}'"):
        simulated(timing_file=str(path))


def test_a_calibration_adds_up(tmp_path):
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(CALIBRATION))
    engine = simulated(timing_file=str(path))
    model = engine.timing
    assert engine.num_blocks == 321
    assert model.decode(4, 1000).first == pytest.approx(0.001 + 4e-5 + 4e-4 + 1e-5)
    prefill = Prefill(num_tokens=100, num_context_tokens=50, num_pairs=10000, num_sequences=2)
    tokens = 104 * 1e-5 + 40 * 2e-5
    rest = 6 * 1e-4 + 2 * 3e-4 + 10000 * 1e-9 + 50 * 2e-9 + 1000 * 2e-8
    assert model.mixed(prefill, 4, 1000) == pytest.approx(0.002 + tokens + rest)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_table_gives_what_was_measured_and_lines_between(tmp_path, suffix):
    model = simulated(timing_file=write_table(tmp_path / f"steps{suffix}", 1.0)).timing
    assert model.decode(8, 1000).first == pytest.approx(0.004 + 0.0008 + 0.002)
    assert model.decode(20, 5500).first == pytest.approx(0.004 + 0.002 + 0.011)
    assert model.mixed(chunk(256), 0, 0) == pytest.approx(0.005 + 0.00256)
    assert model.mixed(chunk(8192), 0, 0) == pytest.approx(0.005 + 0.08192)
    shortest = 0.004 + 0.0001 + 0.0002
    assert model.mixed(chunk(256), 8, 1000) == pytest.approx(0.00756 + 0.0068 - shortest)


def test_dynamos_profile_is_read(tmp_path):
    kv = np.array([1000.0, 8000.0, 2000.0, 16000.0])
    np.savez(
        tmp_path / "raw_data.npz",
        prefill_isl=np.array([100, 1000]),
        prefill_ttft_ms=np.array([10.0, 50.0]),
        decode_active_kv_tokens=kv,
        decode_context_length=np.array([500.0, 1000.0, 1000.0, 2000.0]),
        decode_itl=np.array([5.0, 8.0, 6.0, 12.0]),
    )
    model = simulated(timing_file=str(tmp_path / "raw_data.npz")).timing
    assert model.mixed(chunk(550), 0, 0) == pytest.approx(0.030)
    assert model.decode(2, 1500).first == pytest.approx(0.0055)  # 2 sequences: 1000 -> 5 ms, 2000 -> 6 ms
    assert model.decode(8, 12000).first == pytest.approx(0.010)


def test_a_table_that_is_none_says_what_it_lacks(tmp_path):
    (tmp_path / "steps.csv").write_text("prefill_tokens,step_ms\n1,2\n")
    with pytest.raises(ValueError, match="column num_decodes is missing; expected prefill_tokens, num_decodes"):
        simulated(timing_file=str(tmp_path / "steps.csv"))
    (tmp_path / "half.csv").write_text("prefill_tokens,num_decodes,kv_tokens,step_ms\n16,0,0,2\n")
    with pytest.raises(ValueError, match="rows with decodes"):
        simulated(timing_file=str(tmp_path / "half.csv"))
    np.savez_compressed(tmp_path / "bomb.npz", prefill_isl=np.zeros(1 << 24))
    with pytest.raises(ValueError, match=r"bomb\.npz.*unpacks to 134,21.,... bytes"):
        simulated(timing_file=str(tmp_path / "bomb.npz"))
    whole = (tmp_path / "bomb.npz").read_bytes()
    for rubbish in (b"", b"PK\x03\x04 no archive", whole[: len(whole) // 2]):
        (tmp_path / "broken.npz").write_bytes(rubbish)
        with pytest.raises(ValueError, match=r"broken\.npz: not a table of step times"):
            simulated(timing_file=str(tmp_path / "broken.npz"))


def test_a_slower_link_lengthens_all_reduces_and_nothing_else():
    def step(n, **options):
        return roofline(model="Qwen/Qwen3-32B", tensor_parallel_size=n, **options).timing.mixed(chunk(4096), 0, 0)

    size = 4096 * 5120 * 2
    measured = dict(find_gpu("h100").all_reduce)[4]
    assert over_link(measured, 4, 1e10)[-1] == (measured[-1][0], measured[0][1] + 1.5 * measured[-1][0] / 1e10)
    slow, slower = step(4, link_gbps=10.0), step(4, link_gbps=5.0)
    assert slow > step(4)
    assert slower - slow == pytest.approx(64 * 2 * 1.5 * size / 1e10, rel=0.02)  # layers, two each
    assert step(1, link_gbps=5.0) == step(1)
    with pytest.raises(ValueError, match="link_gbps must be greater than 0, not 0"):
        TimingConfig(link_gbps=0)


def test_sampling_takes_time_for_each_sequence_and_entry_of_the_vocabulary_on_any_number_of_gpus():
    def extra_s(sampling, num_sequences, **options):
        return sum(
            sign * roofline(sampling=how, **options).timing.decode(num_sequences, 1000).first
            for sign, how in ((1, sampling), (-1, "greedy"))
        )

    launch_s, logit_s = SAMPLERS["top-p"]
    for options in (
        {"model": "meta-llama/Llama-3.1-8B"},
        {"model": "meta-llama/Llama-3.1-70B", "tensor_parallel_size": 4},
    ):
        assert extra_s("top-p", 50, **options) == pytest.approx(launch_s + 50 * 128_256 * logit_s)
    assert extra_s("top-p", 50, model="meta-llama/Llama-2-7b") == pytest.approx(launch_s + 50 * 32_000 * logit_s)
    assert 0 < extra_s("temperature", 50) < extra_s("top-k", 50) < extra_s("top-p", 50)
    with pytest.raises(
        ValueError, match="sampling is top-p, and timing is polynomial; expected greedy, or a gpu and a model"
    ):
        TimingConfig(sampling="top-p")


def test_the_context_is_the_models_unless_another_is_set():
    assert roofline().config.max_model_len == 131_072
    assert [roofline(max_model_len=size).config.max_model_len for size in (1000, 200_000)] == [1000, 200_000]


@pytest.mark.parametrize("gpu", ["h100", "h200", "b200"])
def test_an_engine_has_the_kernels_that_were_measured_with_it(gpu):
    vllm, trtllm, sglang = (find_gpu(gpu, engine) for engine in ("vllm", "trtllm", "sglang"))
    assert trtllm.experts["bfloat16"] != vllm.experts["bfloat16"]
    assert trtllm.prefill != vllm.prefill == sglang.prefill
    assert trtllm.latent_decode and not vllm.latent_decode and vllm.latent_prefill == vllm.prefill
    assert "fp8_block" in vllm.gemm and "fp8_block" not in sglang.gemm
    assert (trtllm.bandwidth, trtllm.flops, trtllm.memory) == (vllm.bandwidth, vllm.flops, vllm.memory)


def test_weights_that_are_scaled_in_blocks_have_kernels_of_their_own():
    shape, times = find_model("Qwen/Qwen3-32B-FP8"), find_engine("vllm", "hopper")
    assert shape.weight_block == 128
    in_blocks, whole = (coefficients(one, find_gpu("h200"), times) for one in (shape, replace(shape, weight_block=0)))
    assert sum(part.seconds(8) for part in in_blocks.parts) > sum(part.seconds(8) for part in whole.parts)
    sglang = [coefficients(one, find_gpu("h200", "sglang"), times) for one in (shape, replace(shape, weight_block=0))]
    assert sglang[0].parts == sglang[1].parts  # SGLang's were not measured apart


@pytest.mark.parametrize("gpu", ["h100", "h200", "b200"])
def test_kernels_of_experts_are_those_that_are_asked_for(gpu):
    asked = {"model": "openai/gpt-oss-120b", "gpu": gpu, "num_gpu_blocks": 1000}
    usual, marlin = roofline(**asked).timing, roofline(**asked, moe_backend="marlin").timing
    assert marlin.mixed(chunk(8192), 0, 0) > 1.3 * usual.mixed(chunk(8192), 0, 0)


def test_other_kernels_need_experts_and_a_gpu():
    with pytest.raises(ValueError, match="no routed experts; expected auto"):
        roofline(moe_backend="marlin")
    with pytest.raises(ValueError, match="moe_backend is marlin, and timing is polynomial; expected auto"):
        TimingConfig(moe_backend="marlin")


@pytest.mark.parametrize(
    ("gpu", "model", "engine", "asked", "message"),
    [
        ("h200", "openai/gpt-oss-120b", "vllm", "cutlass", "cutlass was not measured for vllm on h200 with fp4 .* auto or marlin"),
        ("h200", "openai/gpt-oss-120b", "vllm", "triton", "triton was not measured for vllm on h200 with fp4 .* auto or marlin"),
        ("h200", "openai/gpt-oss-120b", "trtllm", "marlin", "marlin was not measured for trtllm on h200 with fp4 experts; expected auto$"),
        ("h200", "openai/gpt-oss-120b", "sglang", "marlin", "marlin was not measured for sglang on h200 with fp4 experts; expected auto$"),
        ("b200", "nvidia/DeepSeek-V3.1-NVFP4", "vllm", "marlin", "marlin was not measured for vllm on b200 with fp4 experts; expected auto$"),
        ("b200", "openai/gpt-oss-120b", "trtllm", "cutlass", "cutlass was not measured for trtllm on b200 with mxfp4 experts; expected auto$"),
        ("l40s", "moonshotai/Kimi-K2.5", "vllm", "marlin", "marlin was not measured for vllm on l40s with int4 experts; expected auto$"),
    ],
)  # fmt: skip
def test_kernels_that_were_not_measured_are_refused_with_those_that_were(gpu, model, engine, asked, message):
    with pytest.raises(ValueError, match=f"moe_backend {message}"):
        roofline(gpu, model, timed_as=engine, moe_backend=asked, num_gpu_blocks=1000)


@pytest.mark.parametrize("gpu", ["h100", "h200", "b200"])
def test_kernels_that_vllm_chooses_itself_may_be_named(gpu):
    shape, times = find_model("moonshotai/Kimi-K2.5"), find_engine("vllm", find_gpu(gpu).architecture)
    usual, marlin = (coefficients(shape, find_gpu(gpu), times, moe_backend=name) for name in ("auto", "marlin"))
    assert usual == marlin


def test_kernels_are_named_as_vllm_reads_them():
    asked = {"model": "openai/gpt-oss-120b", "gpu": "b200"}
    assert TimingConfig(**asked, moe_backend="MARLIN") == TimingConfig(**asked, moe_backend="marlin")
    assert TimingConfig(**asked, moe_backend="FlashInfer-TRTLLM").moe_backend == "flashinfer_trtllm"


def test_every_rank_moves_the_tokens_of_all_experts():
    gpu, times = find_gpu("h200"), find_engine("vllm", "hopper")
    shape = find_model("Qwen/Qwen3-235B-A22B-FP8")

    def experts_s(num_gpus):
        found = coefficients(shape, gpu, times, tensor_parallel_size=8, expert_parallel_size=num_gpus)
        return next(part.experts.of_all(16384) for part in found.parts if part.experts is not None)

    moved_s = 16384 * shape.hidden_size * 2 * gpu.experts["fp8"].token_passes / gpu.bandwidth
    assert experts_s(8) > moved_s > experts_s(8) / 4


def test_the_longest_sequence_is_what_the_cache_holds_with_the_blocks_of_all_layers():
    plain, windowed = (
        roofline(num_gpu_blocks=100),
        roofline(num_gpu_blocks=100, model="openai/gpt-oss-120b", gpu="h200"),
    )
    assert plain.longest_sequence == plain.num_usable_tokens == 99 * 64
    assert (
        windowed.num_blocks_of(windowed.longest_sequence) <= 99 < windowed.num_blocks_of(windowed.longest_sequence + 1)
    )


def test_ranks_share_experts_and_wait_for_the_slowest():
    engine, timing = (
        SglangConfig(attn_dp_size=8),
        TimingConfig(
            model="deepseek-ai/DeepSeek-R1", gpu="h200", tensor_parallel_size=8, max_cudagraph_capture_size=1024
        ),
    )
    model = resolve(engine, timing).timing
    prompt, decode = Load(chunk(1024), 0, 0), Load(None, 8, 8000)
    alone, all_equal = model.among([prompt]), model.among([prompt] * 8)
    # Experts have the tokens of all ranks to compute; if each has as many, that is what the model assumes of any batch.
    assert all_equal == pytest.approx(model.mixed(chunk(1024), 0, 0))
    assert alone < model.among([prompt] + [decode] * 7) < 1.1 * alone < all_equal
    # If all decode, each rank's batch is padded to the largest.
    assert model.among([decode, Load(None, 1, 100)]) == model.decode(8, 8000).first
