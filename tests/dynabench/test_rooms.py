"""What the head of a report says of an engine's memory."""

from dataclasses import replace

import pytest

from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.engines import check_fits
from dynabench.experiment.head import head_of
from mocker import EngineConfig
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from workloads import Request, Workload, WorkloadError
from workloads.pacing import LoadConfig

WORKLOAD = Workload("w", 16, [Request(0.0, 32, 4, (1, 2))])
LLAMA = TimingConfig(model="meta-llama/Llama-3.1-8B", gpu="h100")


def head(*pools):
    return head_of(WORKLOAD, [Deployment(pools=(pool,)) for pool in pools], [LoadConfig()])


def test_one_engine_has_room_for_kv():
    assert head(Pool(timing=LLAMA))["Room for KV"] == "451,200 tokens in 7,050 blocks"
    assert "Room for KV" not in head(Pool())  # generic times say nothing of a GPU


def test_the_room_of_a_pipeline_is_said_by_stage():
    timing = TimingConfig(
        model="meta-llama/Llama-3.1-70B", gpu="h100", tensor_parallel_size=2, pipeline_parallel_size=3
    )
    said = head(Pool(timing=timing))["Room for KV"]
    assert said.endswith(" GiB on a GPU of the stages with 27 + 27 + 26 layers")
    assert " blocks, which take " in said
    first, middle, last = [float(part) for part in said.partition("take ")[2].partition(" GiB")[0].split(" + ")]
    assert first <= middle
    assert last <= middle


def test_groups_of_layers_say_their_room_themselves():
    said = head(Pool(timing=TimingConfig(model="openai/gpt-oss-20b", gpu="h100")))
    assert "Room for KV" not in said
    assert "room for" in said["KV groups"]


def test_a_cache_that_holds_no_sequence_of_full_length_says_how_long_one_may_be():
    engine = EngineConfig(speculative_method="mtp", num_speculative_tokens=3, acceptance_length=2.4)
    pool = Pool(mocker=engine, timing=TimingConfig(model="Qwen/Qwen3.5-35B-A3B", gpu="h100"))
    [said] = [text for name, text in head(pool).items() if name == "KV groups"]
    assert (
        "171 blocks of 1,056 tokens: room for one sequence of up to 164,736 tokens, fewer than the context of 262,144"
        in said
    )
    with pytest.raises(
        WorkloadError, match=r"more than the 164736 .* \(171 blocks of 1,056 tokens, of which each of 4 groups"
    ):
        check_fits(Workload("w", 64, [Request(0.0, 200_000, 4, tuple(range(3125)))]), resolve(engine, pool.timing))


def test_a_context_that_is_asked_for_and_does_not_fit_is_refused():
    little = replace(LLAMA, gpu_memory_utilization=0.3)
    with pytest.raises(
        ValueError, match=r"max_model_len is 131072, .* takes 2,048 blocks .* expected at most 62016, none"
    ):
        resolve(EngineConfig(max_model_len=131_072), little)
    resolve(EngineConfig(max_model_len=131_072), LLAMA)
    resolve(EngineConfig(max_model_len=62_016), little)
    resolve(EngineConfig(), little)  # vllm serve --max-model-len auto
    resolve(EngineConfig(max_model_len=131_072, num_gpu_blocks=100), little)


def test_adapters_have_a_line_and_arms_are_told_apart():
    pools = [Pool(mocker=EngineConfig(enable_lora=True, max_loras=count), timing=LLAMA) for count in (1, 2)]
    assert head(*pools)["LoRA"] == (
        "1 or 2 adapters on the GPU and 1 or 2 in host memory, those on the GPU included, of rank 16; a load takes 2.64 ms, and "
        "100 ms more from disk"
    )
    assert head(pools[0])["LoRA"].startswith("1 adapter on the GPU and 1 in host memory, ")
    assert "LoRA" not in head(Pool(timing=LLAMA))


def test_of_many_launches_the_first_and_the_last_are_whole():
    pools = [Pool(mocker=EngineConfig(max_num_seqs=count), timing=LLAMA) for count in (8, 16, 32, 64)]
    first, _, last = head(*pools)["Launch"].partition("; in other arms: 3 others, the last of them ")
    assert first.startswith("vllm serve ")
    assert last.startswith("vllm serve ")
    assert "by arm" not in last
