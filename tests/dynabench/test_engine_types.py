"""Simulated engines with the schedulers of other engines than vLLM."""

import asyncio
import csv
import itertools
import json
import re
from dataclasses import replace

import pytest

from dynabench.arm import Run, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.engines import pools_of
from dynabench.deployment.file import DeploymentError, as_changed, read_deployment
from dynabench.deployment.flags import simulated_pool
from dynabench.deployment.launch import engine_command
from dynabench.deployment.paths import change_pool
from dynabench.experiment.axes import change_setting
from dynabench.experiment.head import head_of
from dynabench.experiment.no_effect import no_effect
from dynabench.fidelity.settings import ValidatePoolConfig
from dynabench.virtual.run import simulate
from mocker import EngineConfig, SglangConfig, TrtllmConfig
from mocker.config import UNCACHED, EngineTypeConfig, SimulatedConfig, timed_as
from mocker.models.catalog import find_model
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from mocker.timing.model import Load, chunk
from serving.engines.mock.engine import Mocker
from serving.worker.config import WorkerConfig
from tests.support.commands import dynabench
from workloads import Request, Workload
from workloads.pacing import LoadConfig

H100 = TimingConfig(gpu="h100", model="meta-llama/Llama-3.1-8B-Instruct")


def test_a_simulation_with_sglangs_scheduler_says_so_and_takes_sglangs_flags(tmp_path):
    done = dynabench(
        *("simulate", "--engine-type", "sglang", "--page-size", "16", "--chunked-prefill-size", "2048"),
        *("--max-requests", "40", "--router-mode", "kv", "--out", tmp_path / "run"),
    )
    assert done.returncode == 0, done.stderr
    assert "Scheduler: SGLang 0.5.23's; Layout: " in done.stdout
    assert "Chunk: 2,048 tokens" in " ".join(done.stdout.split())
    assert "vLLM's defaults" not in done.stdout


@pytest.mark.parametrize(
    ("versions", "named"),
    [(["0.33", None], "vLLM 0.33's"), (["0.32"], "vLLM 0.32's"), (["0.33", "0.32"], "vLLM 0.33's or vLLM 0.32's")],
)
def test_the_head_names_the_version_of_vllms_rules(versions, named):
    arms = [Deployment(pools=(Pool(mocker=EngineConfig(engine_version=version)),)) for version in versions]
    workload = Workload("w", 64, [Request(0.0, 64, 1, (1,))])
    assert head_of(workload, arms, [LoadConfig()]).get("Scheduler") == named


def test_an_experiment_compares_three_schedulers(tmp_path):
    done = dynabench(
        *(
            "simulate",
            "--vary",
            "engine_type=vllm,sglang,trtllm",
            "--enable-chunked-context",
            "--gpu",
            "h100",
            "--model",
            "llama-3.1-8b",
        ),
        *("--max-requests", "40", "--router-mode", "kv", "--out", tmp_path / "run"),
    )
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "vLLM 0.33's or SGLang 0.5.23's or TensorRT-LLM's (its Python scheduler of 2026)" in said
    assert re.search(r"Room for KV: vllm [\d,]+ tokens, sglang [\d,]+ tokens, trtllm [\d,]+ tokens", said)


def test_arms_that_differ_only_in_a_setting_that_their_engine_lacks_are_one(tmp_path):
    axes = ("--vary", "engine_type=vllm,sglang", "--vary", "page_size=1,16,64")
    done = dynabench("sweep", *axes, "--max-requests", "20", "--router-mode", "kv", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    with (tmp_path / "run" / "table.csv").open() as file:
        names = {row["name"] for row in csv.DictReader(file)}
    assert names == {"engine_type vllm"} | {f"engine_type sglang, page_size {size}" for size in (1, 16, 64)}


def test_an_engine_without_the_setting_that_is_searched_for_is_left_out(tmp_path):
    search = ("--find", "max_num_seqs", "--low", "2", "--high", "4", "--slo", "e2e.mean <= 100s", "--router-mode", "kv")
    given = (*search, "--max-requests", "20", "--out", tmp_path / "run")
    done = dynabench("sweep", "--vary", "engine_type=vllm,sglang", *given)
    assert done.returncode == 0, done.stderr
    assert "left out: engine_type sglang (max_num_seqs has no effect" in " ".join(done.stdout.split())
    done = dynabench("sweep", "--engine-type", "sglang", *given)
    assert done.returncode == 2
    assert "use max_running_requests" in done.stderr


def test_engines_whose_times_are_too_near_for_their_errors_are_not_ranked(tmp_path):
    given = ("--gpu", "h100", "--model", "llama-3.1-8b", "--max-requests", "40", "--router-mode", "kv")
    done = dynabench("simulate", "--vary", "engine_type=vllm,sglang", *given, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "Which engine is faster is not decided in mean TTFT (" in " ".join(done.stdout.split())
    done = dynabench("simulate", "--vary", "engine_type=vllm,sglang", *given[4:], "--out", tmp_path / "generic")
    assert "not decided" not in done.stdout


SETTINGS = {
    "vllm": EngineConfig(max_num_seqs=8),
    "sglang": SglangConfig(page_size=16),
    "trtllm": TrtllmConfig(max_batch_size=8),
}
INSTEAD = {"sglang": "max_running_requests", "trtllm": "max_batch_size"}
NAMES = {"vllm": "max_num_seqs", "sglang": "page_size", "trtllm": "max_batch_size"}


@pytest.mark.parametrize(("kind", "other"), list(itertools.permutations(SETTINGS, 2)))
def test_settings_of_another_engine_are_refused(kind, other):
    given = {"vllm": EngineConfig(), "sglang": SglangConfig(), "trtllm": TrtllmConfig()} | {other: SETTINGS[other]}
    with pytest.raises(ValueError) as caught:
        simulated_pool(SimulatedConfig(EngineTypeConfig(engine_type=kind), *given.values()))
    said = f"{NAMES[other]} has no effect: it is a setting of engine_type {other}, and engine_type is {kind}"
    assert str(caught.value) == f"{said}; use {INSTEAD[kind]}" if other == "vllm" else said


@pytest.mark.parametrize(
    ("kind", "name"), [("sglang", "mem_fraction_static"), ("trtllm", "kv_cache_free_gpu_memory_fraction")]
)
def test_vllms_share_of_memory_is_refused_with_the_engines_own(kind, name):
    with pytest.raises(ValueError, match=f"gpu_memory_utilization has no effect: .* use {name}"):
        simulated_pool(
            SimulatedConfig(EngineTypeConfig(engine_type=kind), timing=replace(H100, gpu_memory_utilization=0.5))
        )


@pytest.mark.parametrize("kind", ["sglang", "trtllm"])
def test_vllms_cuda_graphs_of_prompts_are_refused_for_other_engines(kind):
    timing = replace(H100, max_cudagraph_capture_size=512)
    with pytest.raises(
        ValueError, match="max_cudagraph_capture_size has no effect: it is a setting of engine_type vllm"
    ):
        simulated_pool(SimulatedConfig(EngineTypeConfig(engine_type=kind), timing=timing))


def test_settings_without_effect_in_an_arm_are_named():
    pool = simulated_pool(SimulatedConfig(EngineTypeConfig(), *SETTINGS.values(), H100), {"engine_type"})
    arms = [Deployment(pools=(change_pool(pool, "engine_type", kind),)) for kind in ("vllm", "sglang")]
    said = no_effect("virtual", Workload("w", 64, [Request(0.0, 64, 1, (1,))]), arms)["No effect"]
    assert "max_num_seqs, where engine_type is sglang" in said
    assert "page_size, where engine_type is vllm" in said


def test_an_experiment_may_vary_the_engine_type():
    pool = simulated_pool(SimulatedConfig(EngineTypeConfig(), *SETTINGS.values(), H100), {"engine_type"})
    arms = [change_pool(pool, "engine_type", kind) for kind in SETTINGS]
    engines = [pools_of(Deployment(pools=(arm,)))[0].engine for arm in arms]
    assert [engine.config.block_size for engine in engines] == [64, 16, 32]
    assert [type(engine.settings) for engine in engines] == [EngineConfig, SglangConfig, TrtllmConfig]
    assert [arm.timing.host_times for arm in arms] == list(SETTINGS)


def test_sglangs_kv_cache_takes_its_share_of_the_memory_beside_the_weights():
    few, many = (resolve(SglangConfig(mem_fraction_static=share), H100).num_usable_tokens for share in (0.5, 0.88))
    per_token = 2 * 32 * 8 * 128 * 2
    assert (many - few) * per_token / 2**30 == pytest.approx(0.38 * 80, rel=0.02)
    assert resolve(SglangConfig(max_total_tokens=4096, page_size=16), H100).num_usable_blocks == 256


def test_tensorrt_llms_kv_cache_takes_its_share_of_what_is_free():
    few, many = (
        resolve(TrtllmConfig(kv_cache_free_gpu_memory_fraction=share), H100).num_usable_tokens for share in (0.45, 0.9)
    )
    assert many == pytest.approx(2 * few, abs=32)
    assert resolve(TrtllmConfig(kv_cache_max_tokens=4096), H100).num_usable_blocks == 128


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_live_mocker_has_the_scheduler_and_the_context_of_the_model(kind):
    async def made():
        mocker = Mocker(WorkerConfig(), SETTINGS[kind], H100)
        mocker.run()
        await mocker.close()
        return mocker

    mocker = asyncio.run(made())
    assert type(mocker.ranks[0].engine.config) is type(SETTINGS[kind])
    assert mocker.traits.block_size == SETTINGS[kind].block_size
    assert mocker.traits.context_length == 131072


def test_a_live_mocker_has_the_part_in_disaggregation_that_its_role_says():
    for kind, role, expected in (("sglang", "decode", "kv_consumer"), ("trtllm", "prefill", "kv_producer")):
        assert Mocker(WorkerConfig(role=role), SETTINGS[kind]).calls[0].arguments["config"].kv_role == expected
    with pytest.raises(ValueError, match="expected disaggregation_mode and server_role not to be set"):
        Mocker(WorkerConfig(role="prefill"), SglangConfig(disaggregation_mode="decode"))


def test_other_engines_have_schedulers_of_their_own():
    with pytest.raises(ValueError, match="expected 'vllm'"):
        Pool(engine_type="sglang", engine="echo_core")


@pytest.mark.parametrize(
    ("config", "timing", "message"),
    [
        (
            SglangConfig(page_size=64, max_total_tokens=32),
            {},
            "max_total_tokens is 32; expected at least the 64 tokens",
        ),
        (TrtllmConfig(kv_cache_max_tokens=31), {}, "kv_cache_max_tokens is 31; expected at least the 32 tokens"),
        (
            SglangConfig(),
            {"model": "meta-llama/Llama-3.1-70B"},
            "no room for KV in mem_fraction_static (0.829) of the 78.5 GiB that are free on h100 before they are loaded",
        ),
        (
            TrtllmConfig(),
            {"model": "meta-llama/Llama-3.1-70B"},
            "leave 0.0 of h100's 79.2 GiB free; kv_cache_free_gpu_memory_fraction (0.9) of that has no room for KV",
        ),
        (
            SglangConfig(page_size=1 << 21),
            {"gpu": None, "model": None},
            "max_total_tokens is 1048576; expected at least",
        ),
        (TrtllmConfig(kv_cache_max_tokens=1 << 40), {}, "has 34,359,738,368 blocks; expected at most 4,194,304"),
        (
            SglangConfig(),
            {"model": "openai/gpt-oss-20b"},
            "prefixes SGLang's scheduler does not keep here yet; use --disable-radix-cache",
        ),
        (
            TrtllmConfig(),
            {"model": "openai/gpt-oss-20b"},
            "prefixes TensorRT-LLM's scheduler does not keep here yet; use --no-enable-block-reuse",
        ),
        (TrtllmConfig(), {"tensor_parallel_size": 3}, "cannot be divided over tensor_parallel_size 3"),
    ],
)
def test_what_an_engine_cannot_hold_is_said_by_its_own_names(config, timing, message):
    with pytest.raises(ValueError) as caught:
        resolve(config, replace(H100, **timing))
    assert message in str(caught.value)


def test_without_prefixes_states_take_room_for_all_requests_that_may_run_and_windows_that_of_all_tokens():
    def num_blocks(config, model):
        return resolve(config, replace(H100, model=model, gpu="b200", tensor_parallel_size=8)).num_blocks

    qwen = find_model("Qwen/Qwen3.5-397B-A17B")
    states = sum(count * mixer.state_bytes for mixer, count in qwen.mixers) / 8
    plain = SglangConfig(disable_radix_cache=True, mem_fraction_static=0.8)
    fewer, more = (
        num_blocks(replace(plain, max_running_requests=count), "Qwen/Qwen3.5-397B-A17B") for count in (128, 64)
    )
    full = sum(count for mixer, count in qwen.mixers if mixer.num_heads)
    mixer = next(mixer for mixer, _ in qwen.mixers if mixer.num_heads)
    token = full * mixer.kv_heads(8) * mixer.kv_width * 2
    assert more - fewer == pytest.approx(64 * states / token, abs=1)
    oss = "openai/gpt-oss-120b"
    assert num_blocks(TrtllmConfig(enable_block_reuse=False), oss) > 10_000


def test_a_file_has_only_settings_of_the_scheduler_that_it_names(tmp_path):
    file = tmp_path / "d.yaml"
    file.write_text("pools: {a: {engine_type: sglang, max_num_seqs: 8}}")
    with pytest.raises(
        DeploymentError, match=r"a\.max_num_seqs has no effect: it is a setting of engine_type vllm, and"
    ):
        read_deployment(file)
    assert read_deployment(file, varied=["pools.a.engine_type"]).pools[0].mocker.max_num_seqs == 8


def test_what_is_written_of_a_deployment_can_be_read_again(tmp_path):
    pool = Pool(engine_type="sglang", mocker=EngineConfig(max_num_seqs=8), sglang=SglangConfig(page_size=16))
    file = tmp_path / "d.yaml"
    file.write_text(json.dumps(as_changed(Deployment(pools=(pool,)))))
    (read,) = read_deployment(file).pools
    assert (read.engine_type, read.sglang.page_size, read.mocker) == ("sglang", 16, EngineConfig())


DEEPSEEK = TimingConfig(gpu="h200", model="deepseek-ai/DeepSeek-R1", tensor_parallel_size=8)
RANKED = {
    "sglang": {"sglang": SglangConfig(attn_dp_size=8)},
    "trtllm": {"trtllm": TrtllmConfig(enable_attention_dp=True)},
}


def ranked(kind, timing=DEEPSEEK, **changed):
    return Pool(engine_type=kind, timing=timed_as(kind, timing), **(RANKED[kind] | changed))


@pytest.mark.parametrize("kind", RANKED)
def test_ranks_of_attention_dp_divide_the_gpus_of_one_engine(kind):
    found = pools_of(Deployment(pools=(ranked(kind),)))[0]
    assert (found.gpus_per_worker, found.gpus_per_rank, found.engine.num_engines) == (8, 8, 1)
    assert (found.engine.num_ranks, found.engine.config.dp_size) == (8, 8)
    # Latent KV is the same on each GPU that shares attention. So a rank of one GPU has not an eighth of the room of eight, but
    # what the whole weights of attention leave, and with SGLang what it keeps free for more ranks.
    whole = pools_of(Deployment(pools=(ranked(kind, **{kind: type(RANKED[kind][kind])()}),)))[0].engine
    assert 0.2 * whole.num_usable_tokens < found.engine.num_usable_tokens < whole.num_usable_tokens


@pytest.mark.parametrize("kind", RANKED)
def test_a_step_of_one_rank_alone_bounds_all(kind):
    engine = resolve(RANKED[kind][kind], timed_as(kind, DEEPSEEK))
    best = engine.at_best.timing
    assert best.mixed(chunk(512), 0, 0) <= engine.timing.among([Load(chunk(512), 0, 0)])
    assert best.decode(8, 8000).first <= engine.timing.among([Load(None, 8, 8000)])


@pytest.mark.parametrize(
    ("kind", "timing", "changed", "message"),
    [
        ("sglang", replace(DEEPSEEK, tensor_parallel_size=4), {}, r"attn_dp_size is 8; expected a divisor of tensor_parallel_size \(4\)"),
        ("trtllm", H100, {}, ""),
        ("sglang", replace(H100, tensor_parallel_size=8), {}, "attn_dp_size is 8, but meta-llama/Llama-3.1-8B-Instruct has no experts.*expected 1"),
        ("trtllm", replace(H100, tensor_parallel_size=2), {}, "enable_attention_dp is true, but .* has no experts.*expected false"),
    ],
)  # fmt: skip
def test_ranks_need_gpus_and_experts_to_share(kind, timing, changed, message):
    pool = ranked(kind, timing, **changed)
    if not message:  # one GPU is one rank
        assert pools_of(Deployment(pools=(pool,)))[0].engine.num_ranks == 1
        return
    with pytest.raises(ValueError, match=message):
        pools_of(Deployment(pools=(pool,)))


def test_the_command_lines_of_ranks_have_the_engines_own_words():
    words, _ = engine_command(ranked("sglang", sglang=SglangConfig(attn_dp_size=8, load_balance_method="total_tokens")))
    said = " ".join(words)
    assert "--tp-size 8" in said
    assert "--attn-dp-size 8" in said
    assert "--load-balance-method total_tokens" in said
    config = TrtllmConfig(enable_attention_dp=True, attention_dp_enable_balance=True, attention_dp_timeout_iters=60)
    words, left_out = engine_command(ranked("trtllm", trtllm=config))
    assert "--tp_size 8" in " ".join(words)
    options = json.loads(left_out[0].removeprefix("OPTIONS.yaml has "))
    assert options["enable_attention_dp"] is True
    assert options["attention_dp_config"] == {"enable_balance": True, "timeout_iters": 60}


@pytest.mark.parametrize("kind", RANKED)
def test_a_live_mocker_has_all_ranks_in_one_engine(kind):
    config = {**RANKED[kind]}[kind]
    live = Mocker(WorkerConfig(), config, DEEPSEEK)
    assert live.traits.num_ranks == 1
    assert not live.traits.has_kv_events


@pytest.mark.parametrize("settings", [("--attn-dp-size", "2"), ("--enable-attention-dp",)])
def test_a_router_that_follows_caches_is_refused_for_ranks(settings, tmp_path):
    kind = "sglang" if "--attn-dp-size" in settings else "trtllm"
    done = dynabench(
        *("simulate", "--engine-type", kind, "--tensor-parallel-size", "2", *settings, "--max-requests", "4"),
        *("--router-mode", "kv", "--out", tmp_path / "run"),
    )
    assert done.returncode != 0
    assert "KV events of ranks" in done.stderr
    assert "are not modelled yet" in done.stderr


def test_a_run_of_sglang_is_validated_with_sglangs_scheduler(tmp_path):
    given = ("--engine-type", "sglang", "--max-requests", "30", "--router-mode", "round-robin")
    done = dynabench("simulate", *given, "--workers", "1", "--out", tmp_path / "real")
    assert done.returncode == 0, done.stderr
    real = ("--real", tmp_path / "real")
    done = dynabench("validate", *given, *real, "--fail-if", "ttft > 0.1%", "--out", tmp_path / "alike")
    assert done.returncode == 0, done.stdout
    done = dynabench("validate", *given[2:], *real, "--fail-if", "ttft > 0.1%", "--out", tmp_path / "other")
    assert done.returncode == 1
    assert "failed: " in done.stdout


def test_a_real_engine_is_validated_with_its_own_scheduler():
    assert ValidatePoolConfig(engine="sglang").simulated(None).engine_type == "sglang"
    assert ValidatePoolConfig().simulated(EngineTypeConfig(engine_type="trtllm")).engine_type == "trtllm"
    with pytest.raises(ValueError, match="engine_type is 'trtllm'; expected 'sglang', as engine"):
        ValidatePoolConfig(engine="sglang").simulated(EngineTypeConfig(engine_type="trtllm"))


@pytest.mark.parametrize(("kind", "name"), [("sglang", "page_size"), ("trtllm", "tokens_per_block")])
def test_a_block_size_that_does_not_fit_the_workload_is_named_as_its_engine_does(tmp_path, kind, name):
    given = (
        "--engine-type",
        kind,
        f"--{name.replace('_', '-')}",
        "3",
        "--max-requests",
        "9",
        "--out",
        tmp_path / "run",
    )
    done = dynabench("simulate", *given)
    assert done.returncode == 2
    assert f"{name} 3 neither divides the workload's blocks of 512 tokens" in done.stderr


def test_settings_of_ranks_without_effect_are_named():
    pools = [
        Pool(
            engine_type="sglang",
            sglang=SglangConfig(load_balance_method="total_tokens"),
            timing=timed_as("sglang", H100),
        ),
        Pool(engine_type="trtllm", trtllm=TrtllmConfig(attention_dp_timeout_iters=9), timing=timed_as("trtllm", H100)),
    ]
    arms = [Deployment(pools=(pool,)) for pool in pools]
    said = no_effect("virtual", Workload("w", 64, [Request(0.0, 64, 1, (1,))]), arms)["No effect"]
    assert "load_balance_method, where attn_dp_size is 1" in said
    assert "attention_dp_timeout_iters, where attention_dp_enable_balance is false" in said


def test_prompts_that_an_engine_does_not_cut_fail_there_and_the_other_engines_are_compared(tmp_path):
    given = ("--max-requests", "120", "--router-mode", "kv", "--out", tmp_path / "run")
    done = dynabench("simulate", "--vary", "engine_type=vllm,sglang,trtllm", *given)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "1 of 120 requests does not fit a step of 8,192 tokens, in which a whole prompt is computed" in said
    assert "use a model with a longer context" not in said


@pytest.mark.parametrize("base", ["vllm", "sglang", "trtllm"])
def test_step_times_follow_the_engine_type_also_from_another(base):
    pool = Pool(engine_type=base, timing=H100)
    for kind in ("vllm", "sglang", "trtllm"):
        assert change_pool(pool, "engine_type", kind).timing.host_times == kind
    others = change_pool(Pool(timing=replace(H100, timed_as="sglang")), "max_num_seqs", 8)
    assert others.timing.timed_as == "sglang"


def test_settings_of_host_memory_make_no_arms_where_there_is_none(tmp_path):
    axes = ("--vary", "enable_hierarchical_cache=false,true", "--vary", "hicache_ratio=2,4")
    given = ("--engine-type", "sglang", "--gpu", "h100", "--model", "llama-3.1-8b", "--router-mode", "kv")
    done = dynabench("sweep", *given, *axes, "--max-requests", "20", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    with (tmp_path / "run" / "table.csv").open() as file:
        names = [row["name"] for row in csv.DictReader(file)]
    with_ratio = [f"enable_hierarchical_cache True, hicache_ratio {ratio}" for ratio in (2, 4)]
    assert names == ["enable_hierarchical_cache False", *with_ratio]


def test_validate_refuses_axes(tmp_path):
    done = dynabench("validate", "--real", tmp_path, "--vary", "engine_type=vllm,sglang", "--out", tmp_path / "x")
    assert done.returncode == 2
    assert "--vary engine_type=vllm,sglang cannot be validated" in done.stderr


def test_prefix_caching_is_turned_off_with_what_needs_it():
    settings = Settings(
        Deployment(pools=(Pool(engine_type="sglang", sglang=SglangConfig(enable_hierarchical_cache=True)),))
    )
    (pool,) = change_setting(settings, UNCACHED["sglang"]).deployment.pools
    assert (pool.sglang.disable_radix_cache, pool.sglang.enable_hierarchical_cache) == (True, False)


def test_who_is_refused_because_too_many_wait_fails_with_that_reason():
    pool = Pool(engine_type="sglang", sglang=SglangConfig(max_running_requests=1, max_queued_requests=1))
    burst = Workload("burst", 512, [Request(0.0, 100, 50, (number,)) for number in range(6)])
    requests = simulate(Run.alone(Settings(Deployment(pools=(pool,)))), burst).requests
    reasons = [error for error in requests.error if error]
    assert 0 < len(reasons) < 6
    assert set(reasons) == {"the request queue is full (max_queued_requests 1)"}
