"""What would have no effect, or not the one that is meant, is refused by name or said in the head of the report."""

import dataclasses

import pytest

from dynabench.arm import Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.engines import pools_of, refuse_idle_settings
from dynabench.experiment.axes import read_axis
from dynabench.experiment.no_effect import no_effect
from mocker import EngineConfig, SglangConfig
from mocker.config import timed_as
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from serving.router.policies.modes import Mode
from workloads import Request, Workload

LLAMA = TimingConfig(model="meta-llama/Llama-3.1-8B", gpu="h100")
GEMMA = TimingConfig(model="google/gemma-3-27b-it", gpu="h100")
WORKLOAD = Workload("w", 16, [Request(0.0, 32, 4, (1, 2))])
DRAFTING = {"num_speculative_tokens": 2, "acceptance_rates": "0.5,0.5"}


def deployment(**pool):
    return Deployment(pools=(Pool(**pool),))


def test_what_windows_keep_is_refused_if_no_model_has_windows():
    engine = EngineConfig(prefix_cache_retention_interval=64)
    refused = pytest.raises(
        ValueError, match="prefix_cache_retention_interval is 64, but no engine has layers that keep"
    )
    with refused:
        refuse_idle_settings([deployment(mocker=engine, timing=LLAMA)])
    with pytest.raises(ValueError, match="prefix_cache_retention_interval is none, but"):
        refuse_idle_settings([deployment(mocker=EngineConfig(prefix_cache_retention_interval=None))])
    with refused:
        refuse_idle_settings(
            [
                deployment(
                    mocker=engine,
                    timing=TimingConfig(model="meta-llama/Llama-4-Maverick-17B-128E-Instruct", gpu="b200"),
                )
            ]
        )  # chunks
    refuse_idle_settings([deployment(mocker=engine, timing=GEMMA)])
    refuse_idle_settings([deployment(mocker=engine, timing=timing) for timing in (LLAMA, GEMMA)])


def test_what_windows_and_states_keep_ends_where_blocks_of_all_groups_do():
    qwen = TimingConfig(model="Qwen/Qwen3.5-35B-A3B", gpu="h100")
    for timing, wrong, block, sizes in ((qwen, 512, 1056, "1056"), (GEMMA, 500, 64, "64")):
        refused = f"prefix_cache_retention_interval is {wrong}; expected 0, none or a multiple of {block}, .* of {sizes} tokens"
        with pytest.raises(ValueError, match=refused):
            resolve(EngineConfig(prefix_cache_retention_interval=wrong), timing)
        for right in (0, None, 2 * block):
            resolve(EngineConfig(prefix_cache_retention_interval=right), timing)


def test_settings_of_decode_workers_are_refused_where_there_are_none():
    sglang = SglangConfig(num_reserved_decode_tokens=8)
    with pytest.raises(ValueError, match="num_reserved_decode_tokens is 8, but no worker only decodes"):
        refuse_idle_settings([deployment(engine_type="sglang", sglang=sglang)])
    apart = [Pool(name=role, role=role, engine_type="sglang", sglang=sglang) for role in ("prefill", "decode")]
    refuse_idle_settings([Deployment(pools=tuple(apart))])


def test_an_addition_is_given_once():
    with pytest.raises(ValueError, match="adapter is added twice; expected one number for it"):
        Mode.parse("kv+adapter(8)+eps(1)+adapter(4)")


def test_what_no_request_uses_is_said():
    engine = EngineConfig(enable_lora=True, lora_modules="a,b")
    asked = dataclasses.replace(deployment(mocker=engine), router_mode="kv+adapter(8)")
    said = no_effect("virtual", WORKLOAD, [asked])["No effect"]
    assert "adapter(8) of router mode kv+adapter(8), because no request asks for an adapter" in said
    assert "lora_modules, because in virtual time the adapters are those that requests name" in said
    assert "lora_modules" not in no_effect("wall", WORKLOAD, [asked])["No effect"]


def test_ranks_of_adapters_are_those_that_vllm_takes():
    with pytest.raises(ValueError, match="max_lora_rank is '17'; expected one of 1, 8, 16, 32, 64, 128, 256, 320, 512"):
        read_axis("max_lora_rank=8,17", Settings(deployment()))


@pytest.mark.parametrize("name", ["drafting_ms", "lora_load_ms", "lora_read_ms"])
def test_times_that_no_step_takes_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be from 0 to 1000000, not"):
        EngineConfig(**{name: 1e300})


def test_mtp_needs_a_model_with_such_layers():
    engine = EngineConfig(speculative_method="mtp", **DRAFTING)
    with pytest.raises(
        ValueError, match=r"speculative_method is mtp, and models of the architecture llama, as meta-llama"
    ):
        resolve(engine, LLAMA)
    assert resolve(engine, TimingConfig(model="Qwen/Qwen3.5-27B", gpu="h100")).acceptance == (0.5, 0.5)
    nano = TimingConfig(model="nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", gpu="h100")
    with pytest.raises(
        ValueError, match=r"Nano-30B-A3B-BF16, whose config.json has no num_nextn_predict_layers above 0, has no"
    ):
        resolve(engine, nano)
    super_ = TimingConfig(model="nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8", gpu="h200", tensor_parallel_size=2)
    assert resolve(engine, super_).acceptance == (0.5, 0.5)


def test_lists_are_varied_in_brackets():
    settings = Settings(deployment(mocker=EngineConfig(**DRAFTING)))
    assert read_axis("acceptance_rates=[0.8, 0.5],[0.4,0.2]", settings) == ("acceptance_rates", ["0.8, 0.5", "0.4,0.2"])
    assert read_axis("num_gpu_blocks=16,32", settings) == ("num_gpu_blocks", [16, 32])


def test_host_times_of_another_engine_are_refused_even_if_they_are_vllms():
    assert timed_as("sglang", LLAMA).host_times == "sglang"
    with pytest.raises(ValueError, match="timed_as is 'vllm'; expected 'sglang', as engine_type, or none"):
        timed_as("sglang", dataclasses.replace(LLAMA, timed_as="vllm"))
    assert timed_as("vllm", dataclasses.replace(LLAMA, timed_as="vllm")) == LLAMA


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_pool_that_is_named_by_a_role_has_it(name):
    with pytest.raises(ValueError, match=f"pools.{name}.role is 'aggregated', so its workers serve whole requests"):
        deployment(name=name)


def test_routers_that_follow_caches_are_refused_with_attention_dp_before_anything_is_simulated():
    experts = TimingConfig(model="deepseek-ai/DeepSeek-R1", gpu="b200", tensor_parallel_size=8)
    ranks = deployment(engine_type="sglang", sglang=SglangConfig(attn_dp_size=8), timing=experts)
    with pytest.raises(ValueError, match="router_mode kv: KV events of ranks with attention DP are not modelled"):
        pools_of(dataclasses.replace(ranks, router_mode="kv"))
    assert pools_of(dataclasses.replace(ranks, router_mode="round-robin"))
