"""The commands of a plan: every setting of the winner is in them, under the name that the engine or the router has for it.

tests/real_engines/test_vllm_commands.py gives the same command lines to vLLM's own parser.
"""

import dataclasses
import json
import shlex

import pytest

from dynabench.capacity.commands import deploy_commands
from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.launch import engine_command, vllm_command
from mocker import EngineConfig, SglangConfig, TrtllmConfig
from mocker.timing.config import TimingConfig
from serving.router import ROUTER_MODES, RouterConfig
from serving.router.elsewhere import ELSEWHERE

DYNAMO = {"random", "round-robin", "power-of-two", "least-loaded", "kv", "direct", "device-aware-weighted"}
"""Choices of `--router-mode` in `python -m dynamo.frontend` 1.4.2."""
DYNAMO_FLAGS = {
    "--router-mode",
    "--router-prefill-load-scale",
    "--router-kv-overlap-score-credit",
    "--router-kv-overlap-score-credit-decay",
    "--router-temperature",
    "--no-router-kv-events",
}
SGLANG = {"random", "round_robin", "cache_aware", "power_of_two", "manual"}
"""Choices of `--policy` in sglang-router 0.3.2."""
PRODUCTION_STACK = {
    "roundrobin",
    "session",
    "kvaware",
    "loadaware",
    "prefixaware",
    "disaggregated_prefill",
    "disaggregated_prefill_orchestrated",
    "priority",
}
"""Choices of `--routing-logic` in vLLM's production-stack 0.1.13."""


def pool(role="aggregated", timing=None, **engine):
    model = {"model": "meta-llama/Llama-3.1-70B", "gpu": "h100", "tensor_parallel_size": 4} | (timing or {})
    return Pool(name=role, role=role, replicas=2, mocker=EngineConfig(**engine), timing=TimingConfig(**model))


def flags(pool):
    """Return the flags of a command line and their values."""
    words, found = vllm_command(pool)[3:], {}
    while words:
        flag = words.pop(0)
        found[flag] = words.pop(0) if words and not words[0].startswith("--") else True
    return found


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"method": "eagle3", "num_speculative_tokens": 3, "model": "DRAFTING_HEAD"}),
        ({"speculative_method": "mtp"}, {"method": "mtp", "num_speculative_tokens": 3}),
        ({"speculative_method": "ngram"}, {"method": "ngram", "num_speculative_tokens": 3}),
        (
            {"speculative_method": "draft_model", "draft_model": "meta-llama/Llama-3.2-1B"},
            {"method": "draft_model", "num_speculative_tokens": 3, "model": "meta-llama/Llama-3.2-1B"},
        ),
    ],
)
def test_speculation_is_one_flag_of_vllms_with_nothing_of_what_was_measured(settings, expected):
    found = flags(pool(num_speculative_tokens=3, acceptance_length=2.4, **settings))
    assert json.loads(found["--speculative-config"]) == expected
    assert not [flag for flag in found if "accept" in flag or "draft" in flag]


def test_what_was_chosen_is_in_the_command_line():
    found = flags(pool(max_num_batched_tokens=512))
    assert vllm_command(pool())[:3] == ["vllm", "serve", "meta-llama/Llama-3.1-70B"]
    assert found == {
        "--tensor-parallel-size": "4",
        "--max-num-batched-tokens": "512",
        "--max-num-seqs": "256",
        "--block-size": "64",
        "--max-model-len": "auto",
        "--gpu-memory-utilization": "0.9",
    }


def test_every_setting_of_an_engine_is_in_the_command_line():
    found = flags(
        pool(
            num_gpu_blocks=5000,
            max_num_active_seqs=64,
            max_model_len=8192,
            enable_prefix_caching=False,
            enable_chunked_prefill=False,
            scheduling_policy="priority",
            async_scheduling=False,
            watermark=0.01,
            scheduler_reserve_full_isl=False,
            long_prefill_token_threshold=256,
            long_prefill_token_threshold_adaptive=True,
            dp_size=2,
            timing={"kv_cache_dtype": "fp8", "enable_expert_parallel": True},
        )
    )
    expected = {
        "--num-gpu-blocks-override": "5000",
        "--max-num-active-seqs": "64",
        "--max-model-len": "8192",
        "--no-enable-prefix-caching": True,
        "--no-enable-chunked-prefill": True,
        "--scheduling-policy": "priority",
        "--no-async-scheduling": True,
        "--watermark": "0.01",
        "--no-scheduler-reserve-full-isl": True,
        "--long-prefill-token-threshold": "256",
        "--long-prefill-token-threshold-adaptive": True,
        "--data-parallel-size": "2",
        "--kv-cache-dtype": "fp8",
        "--enable-expert-parallel": True,
    }
    assert {name: found.get(name) for name in expected} == expected


def test_host_memory_is_in_the_command_line():
    assert flags(pool(kv_offloading_size=8))["--kv-offloading-size"] == "8"
    assert "--kv-transfer-config" not in flags(pool(kv_offloading_size=8))
    chunks = flags(pool(kv_offloading_size=8, blocks_per_chunk=4, eviction_policy="arc", host_bandwidth_gb_s=50))
    assert json.loads(chunks["--kv-transfer-config"]) == {
        "kv_connector_extra_config": {"blocks_per_chunk": 4, "eviction_policy": "arc"}
    }
    assert not chunks.keys() & {"--blocks-per-chunk", "--eviction-policy", "--host-bandwidth-gb-s"}
    blocks = flags(pool(num_host_blocks=1000))  # of 80 layers, 8 heads of 128, 64 tokens: 20 MiB
    assert float(blocks["--kv-offloading-size"]) == pytest.approx(1000 * 20 / 1024, rel=1e-5)


def test_a_disk_behind_host_memory_is_a_folder_in_the_command_line():
    one = pool(kv_offloading_size=8, kv_disk_size=100)
    assert json.loads(flags(one)["--kv-transfer-config"])["kv_connector_extra_config"] == {
        "spec_name": "TieringOffloadingSpec",
        "secondary_tiers": [{"type": "fs", "root_dir": "KV_FOLDER"}],
    }
    [line] = [line for line in deploy_commands(Deployment(pools=(one,)), "x") if line.startswith("vllm")]
    assert "KV_FOLDER on a disk with 100 GiB free" in line


@pytest.mark.parametrize(("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_host_memory_does_not_displace_what_hands_kv_over(role, kv_role):
    found = flags(pool(role, kv_offloading_size=8))
    assert "--kv-offloading-size" not in found
    config = json.loads(found["--kv-transfer-config"])
    assert (config["kv_connector"], config["kv_load_failure_policy"]) == ("MultiConnector", "fail")
    assert config["kv_connector_extra_config"]["connectors"] == [
        {"kv_connector": "NixlConnector", "kv_role": kv_role},
        {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 8 << 30},
        },
    ]


@pytest.mark.parametrize(
    ("model", "weights", "flag", "note"),
    [
        ("meta-llama/Llama-3.1-70B", "fp8", "fp8", False),
        ("Qwen/Qwen3-235B-A22B-FP8", "fp8", None, False),
        ("meta-llama/Llama-3.1-70B", "fp4", None, True),
        ("meta-llama/Llama-3.1-70B", "bfloat16", None, False),
        ("Qwen/Qwen3-235B-A22B-FP8", "bfloat16", None, True),
        ("openai/gpt-oss-120b", "fp8", None, True),
    ],
)
def test_weights_are_quantized_on_loading_only_where_vllm_can_and_must(model, weights, flag, note):
    one = pool(timing={"model": model, "gpu": "b200", "quantization": weights})
    assert flags(one).get("--quantization") == flag
    [line] = [line for line in deploy_commands(Deployment(pools=(one,)), "x") if line.startswith("vllm")]
    assert (f"use a checkpoint with {weights} weights" in line) is note


@pytest.mark.parametrize("kv", ["bfloat16", "fp8"])
def test_a_type_of_kv_that_was_asked_for_is_in_the_command_line_and_auto_is_left_to_the_engine(kv):
    assert flags(pool(timing={"kv_cache_dtype": kv}))["--kv-cache-dtype"] == kv
    assert "--kv-cache-dtype" not in flags(pool())


def test_workers_of_both_roles_hand_kv_over():
    split = Deployment(pools=(pool("prefill"), pool("decode", kv_load_failure_policy="recompute")))
    lines = deploy_commands(split, "results/a b/deployment.yaml")
    assert shlex.split(lines[0], comments=True) == ["dynabench", "serve", "-f", "results/a b/deployment.yaml"]
    assert [line.rpartition("# ")[2] for line in lines[1:3]] == [
        "start 2, prefill, 4 h100 each",
        "start 2, decode, 4 h100 each",
    ]
    transfers = [json.loads(flags(one)["--kv-transfer-config"]) for one in split.pools]
    assert [(one["kv_role"], one["kv_load_failure_policy"]) for one in transfers] == [
        ("kv_producer", "fail"),
        ("kv_consumer", "recompute"),
    ]
    assert [line.partition(":")[0] for line in lines[3:]] == ["router for prefill workers", "router for decode workers"]


def test_modes_that_are_named_elsewhere_are_modes_here_and_choices_there():
    assert set(ELSEWHERE) <= set(ROUTER_MODES)
    for mode in ROUTER_MODES:
        line = deploy_commands(Deployment(pools=(pool(),), router_mode=mode), "x")[-1]
        if mode not in ELSEWHERE:
            assert line == f"router: {mode} (dynabench only)"
            continue
        for flag, choices in (("--router-mode", DYNAMO), ("--policy", SGLANG), ("--routing-logic", PRODUCTION_STACK)):
            words = line.strip(")").replace(",", "").split()
            assert {words[place + 1] for place, word in enumerate(words) if word == flag} <= choices


@pytest.mark.parametrize(
    ("mode", "settings", "said"),
    [
        ("kv", {}, "NVIDIA Dynamo --router-mode kv"),
        ("kv", {"kv_overlap_score_weight": 2.0}, "NVIDIA Dynamo --router-mode kv --router-prefill-load-scale 2"),
        ("dynamo-kv-p8", {}, "NVIDIA Dynamo --router-mode kv --router-prefill-load-scale 8"),
        (
            "dynamo-kv",
            {"overlap_score_credit": 0.5, "overlap_score_credit_decay": 1.0, "router_temperature": 0.1},
            "NVIDIA Dynamo --router-mode kv --router-kv-overlap-score-credit 0.5 --router-kv-overlap-score-credit-decay 1 "
            "--router-temperature 0.1",
        ),
        ("kv", {"use_kv_events": False}, "NVIDIA Dynamo --router-mode kv --no-router-kv-events"),
        ("kv+temp(0.5)", {}, "router: kv+temp(0.5) (NVIDIA Dynamo --router-mode kv --router-temperature 0.5"),
        ("kv+stale(200)", {}, "router: kv+stale(200) (NVIDIA Dynamo --router-mode kv"),
        ("llumnix+late(8192)", {}, "(dynabench only; without +late(8192) Llumnix --enable-cache-aware-scheduling"),
        ("marginal+late(8192)", {}, "(dynabench only"),
    ],
)
def test_settings_of_the_router_go_with_it(mode, settings, said):
    deployment = Deployment(pools=(pool(),), router_mode=mode, router=RouterConfig(**settings))
    line = deploy_commands(deployment, "x")[-1]
    assert line.endswith(f"{said})")
    assert {word for word in line.strip(")").split() if word.startswith(("--router", "--no-"))} <= DYNAMO_FLAGS


SGLANG_SERVER = {
    "--model-path", "--tp-size", "--pp-size", "--ep-size", "--chunked-prefill-size", "--max-running-requests", "--page-size",
    "--mem-fraction-static", "--context-length", "--max-total-tokens", "--quantization", "--kv-cache-dtype",
    "--disable-radix-cache", "--disable-overlap-schedule", "--enable-priority-scheduling",
    "--schedule-low-priority-values-first", "--disaggregation-mode", "--disaggregation-transfer-backend",
    "--num-reserved-decode-tokens", "--disaggregation-decode-extra-slots", "--disaggregation-decode-enable-radix-cache",
    "--max-queued-requests", "--scheduler-recv-interval", "--decode-log-interval", "--max-prefill-tokens",
    "--prefill-max-requests", "--enable-mixed-chunk", "--prefill-decode-interval", "--prefill-decode-interval-min-bs",
    "--schedule-policy", "--schedule-conservativeness", "--disable-priority-preemption",
    "--priority-scheduling-preemption-threshold", "--retraction-policy", "--radix-eviction-policy", "--attn-dp-size",
    "--load-balance-method",
}  # fmt: skip
"""Flags of `python -m sglang.launch_server` 0.5.23, from the fields of its ServerArgs."""
TRTLLM_SERVER = {
    "--tp_size", "--pp_size", "--ep_size", "--max_num_tokens", "--max_batch_size", "--max_seq_len", "--enable_chunked_prefill",
    "--kv_cache_free_gpu_memory_fraction", "--extra_llm_api_options",
}  # fmt: skip
"""Options of `trtllm-serve` in TensorRT-LLM's repository at 4c05a748."""


def launched(engine, **settings):
    """Return the line that starts a pool timed as an engine, as words and the note after them."""
    timing = {"timed_as": engine} | settings.pop("timing", {})
    role = settings.pop("role", "aggregated")
    other = [pool(its, timing=timing) for its in {"prefill": ["decode"], "decode": ["prefill"]}.get(role, [])]
    line = deploy_commands(Deployment(pools=(pool(role, timing=timing, **settings), *other)), "x")[1]
    return shlex.split(line, comments=True), line.partition("  # ")[2]


def test_step_times_of_sglang_are_deployed_with_sglang():
    words, note = launched("sglang", max_num_batched_tokens=2048)
    assert words[:5] == ["python", "-m", "sglang.launch_server", "--model-path", "meta-llama/Llama-3.1-70B"]
    assert " ".join(words[5:]) == (
        "--tp-size 4 --chunked-prefill-size 2048 --max-running-requests 256 --page-size 64 --mem-fraction-static 0.9"
    )
    assert note == "start 2, 4 h100 each"


def test_step_times_of_tensorrt_llm_are_deployed_with_tensorrt_llm():
    words, note = launched("trtllm", max_num_batched_tokens=2048, enable_prefix_caching=False)
    assert words[:2] == ["trtllm-serve", "meta-llama/Llama-3.1-70B"]
    assert " ".join(words[2:8]) == "--tp_size 4 --max_num_tokens 2048 --max_batch_size 256"
    assert 'OPTIONS.yaml has {"kv_cache_config": {"tokens_per_block": 64, "enable_block_reuse": false}}' in note
    _, note = launched("trtllm", timing={"quantization": "fp8"})
    assert "use a checkpoint with fp8 weights" in note


@pytest.mark.parametrize(("engine", "flags"), [("sglang", SGLANG_SERVER), ("trtllm", TRTLLM_SERVER)])
@pytest.mark.parametrize("role", ["aggregated", "prefill", "decode"])
def test_every_flag_is_the_engines_own_and_what_has_none_is_named(engine, flags, role):
    words, note = launched(
        engine, role=role, num_gpu_blocks=5000, max_model_len=8192, enable_prefix_caching=False, async_scheduling=False,
        scheduling_policy="priority", watermark=0.01,
        timing={"kv_cache_dtype": "fp8", "quantization": "fp8"},
    )  # fmt: skip
    assert {word for word in words if word.startswith("--")} <= flags
    assert "no flag for " in note
    assert "watermark" in note.partition("no flag for ")[2]


OF_ENGINES = {
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "enable_expert_parallel": True,
    "quantization": "fp8",
    "kv_cache_dtype": "fp8",
    "gpu_memory_utilization": 0.8,
    "max_cudagraph_capture_size": 1024,
    "moe_backend": "marlin",
}
"""Settings of step times that engines have, too, each with a value that is not its default."""
OF_NO_ENGINE = {
    "speedup_ratio", "decode_speedup_ratio", "timing", "timing_file", "model", "gpu", "read_model_as", "link_gbps", "sampling",
    "timed_as", "constant_prefill_ms", "constant_decode_ms",
}  # fmt: skip
"""The others: of the simulation and the hardware, the model itself, and what requests say."""


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("name", OF_ENGINES)
def test_every_setting_of_step_times_that_engines_have_is_a_flag_or_named(engine, name):
    assert set(OF_ENGINES) | OF_NO_ENGINE == {field.name for field in dataclasses.fields(TimingConfig)}
    usual, changed = (
        engine_command(pool(timing={"timed_as": engine} | more)) for more in ({}, {name: OF_ENGINES[name]})
    )
    has_other = (engine, name) != ("sglang", "moe_backend")  # of which none was measured
    assert (usual != changed) == has_other


def test_kernels_and_cuda_graphs_are_flags_of_vllm():
    found = flags(pool(timing={"moe_backend": "marlin", "max_cudagraph_capture_size": 1024}))
    assert (found["--moe-backend"], found["--max-cudagraph-capture-size"]) == ("marlin", "1024")
    alone = flags(pool(timing={"max_cudagraph_capture_size": 0}))
    assert "--max-cudagraph-capture-size" not in alone
    assert json.loads(alone["--compilation-config"]) == {"cudagraph_mode": "FULL_DECODE_ONLY"}


def test_kernels_are_in_tensorrt_llms_file_and_cuda_graphs_of_prompts_are_vllms_alone():
    _, note = launched("trtllm", timing={"moe_backend": "cutlass", "max_cudagraph_capture_size": 1024})
    assert '"moe_config": {"backend": "CUTLASS"}' in note
    assert "no flag for max_cudagraph_capture_size" in note


def test_a_checkpoint_decides_whether_tensorrt_llms_kv_has_16_bits():
    given = {
        "model": "nvidia/DeepSeek-R1-0528-FP4-V2",
        "gpu": "b200",
        "tensor_parallel_size": 8,
        "kv_cache_dtype": "bfloat16",
    }
    assert "use a checkpoint with KV in 16 bits" in launched("trtllm", timing=given)[1]
    assert "KV in 16 bits" not in launched("trtllm", timing={"kv_cache_dtype": "bfloat16"})[1]


def engine_line(**settings):
    """Return the command of a pool with the scheduler of another engine, and the note after it."""
    timing = TimingConfig(gpu="h100", model="meta-llama/Llama-3.1-8B-Instruct")
    line = deploy_commands(Deployment(pools=(Pool(timing=timing, **settings),)), "x")[1]
    return line.split("  # ")


def test_sglangs_scheduler_is_deployed_with_its_own_settings():
    settings = SglangConfig(
        page_size=16,
        mem_fraction_static=0.8,
        schedule_policy="lpm",
        enable_mixed_chunk=True,
        new_token_ratio_decay_steps=9,
    )
    words, note = engine_line(engine_type="sglang", sglang=settings)
    assert words == (
        "env SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS=9 python -m sglang.launch_server --model-path "
        "meta-llama/Llama-3.1-8B-Instruct --tp-size 1 --chunked-prefill-size 8192 --page-size 16 "
        "--mem-fraction-static 0.8 --enable-mixed-chunk --schedule-policy lpm"
    )
    assert note == "start 1, 1 h100 each"


def test_every_setting_of_sglangs_scheduler_is_a_flag_of_its_server_or_a_variable():
    blank = SglangConfig()
    others = {int: 7, float: 0.5, bool: True, str: "lof", type(None): 7}
    given = {field.name: others[type(getattr(blank, field.name))] for field in dataclasses.fields(blank)}
    given |= {"mem_fraction_static": 0.5, "retraction_policy": "priority", "radix_eviction_policy": "lfu"}
    given = {name: value for name, value in given.items() if "hicache" not in name}
    del given["enable_hierarchical_cache"]
    given |= {"chunked_prefill_size": 49, "load_balance_method": "total_tokens"}
    del given["disaggregation_mode"]  # a pool's role decides that
    words, note = engine_line(engine_type="sglang", sglang=SglangConfig(**given))
    assert {word for word in words.split() if word.startswith("--")} <= SGLANG_SERVER
    named = {word.removeprefix("--").replace("-", "_") for word in words.split() if word.startswith("--")}
    assert set(given) - named == {"new_token_ratio_decay_steps", "clip_max_new_tokens_estimation"}
    assert "NEW_TOKEN_RATIO_DECAY_STEPS=7" in words
    assert "CLIP_MAX_NEW_TOKENS_ESTIMATION=7" in words
    assert "no flag" not in note


def test_sglangs_host_memory_is_deployed_with_its_own_settings():
    settings = SglangConfig(
        enable_hierarchical_cache=True, hicache_size=64, hicache_write_policy="write_back", hicache_bandwidth_gb_s=50
    )
    words, note = engine_line(engine_type="sglang", sglang=settings)
    assert words.endswith("--enable-hierarchical-cache --hicache-size 64 --hicache-write-policy write_back")
    words, _ = engine_line(engine_type="sglang", sglang=SglangConfig(enable_hierarchical_cache=True))
    assert words.endswith("--enable-hierarchical-cache --hicache-ratio 2")
    assert "no flag" not in note


def test_tensorrt_llms_scheduler_is_deployed_with_its_own_settings():
    settings = TrtllmConfig(
        capacity_scheduler_policy="MAX_UTILIZATION",
        enable_chunked_context=True,
        kv_cache_max_tokens=1 << 16,
        chunk_unit_size=64,
    )
    words, note = engine_line(engine_type="trtllm", trtllm=settings)
    assert words.endswith(
        "--max_num_tokens 8192 --max_batch_size 2048 --enable_chunked_prefill --kv_cache_free_gpu_memory_fraction 0.9 "
        "--extra_llm_api_options OPTIONS.yaml"
    )
    assert (
        '{"kv_cache_config": {"tokens_per_block": 32, "max_tokens": 65536}, '
        '"scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"}}'
    ) in note
    assert note.endswith("no flag for chunk_unit_size")
