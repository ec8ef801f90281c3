"""What SGLang chooses for a model and a GPU, computed by hand from the rule of 0.5.23."""

import pytest

from mocker import SglangConfig
from mocker.timing.catalog import find_gpu
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig

LLAMA = "meta-llama/Llama-3.1-8B"


def chosen(gpu, model=LLAMA, tensor_parallel_size=1, **settings):
    timing = TimingConfig(model=model, gpu=gpu, tensor_parallel_size=tensor_parallel_size)
    return resolve(SglangConfig(**settings), timing).settings


@pytest.mark.parametrize(
    ("gpu", "num_gpus", "chunk", "kept_mib"),
    [
        ("h100", 1, 8192, 512 + 1.5 * 8192 + 128 + 2 * 256 + 8 * 58),
        ("h100", 4, 8192, 512 + 1.5 * 8192 + 4 * 128 + 2 * 512 + 8 * 58),
        ("b200", 2, 16384, 512 + 1.5 * 16384 + 2 * 128 + 2 * 512 + 8 * 74),
        ("l40s", 1, 4096, 512 + 1.5 * 4096 + 128 + 2 * 32 + 8 * 50),
    ],
)
def test_the_chunk_and_the_share_of_memory_follow_from_the_gpu(gpu, num_gpus, chunk, kept_mib):
    memory = {"h100": 85018542080, "b200": 191501434880, "l40s": 47695527936}[gpu] / 2**20
    found = chosen(gpu, tensor_parallel_size=num_gpus)
    assert found.chunked_prefill_size == chunk
    assert found.mem_fraction_static == pytest.approx(1 - kept_mib / memory, abs=0.0006)


def test_at_least_ten_gib_of_a_large_gpu_stay_free():
    found = chosen("h100", chunked_prefill_size=2048)
    assert found.mem_fraction_static == pytest.approx(1 - 10 / (85018542080 / 2**30), abs=0.0006)


def test_workers_of_one_part_of_a_request_need_no_room_for_graphs_of_the_other():
    """On a B200, 2 MiB for each of 512 sequences of decodes; a decode worker keeps the 10 GiB that are always free there."""
    memory_mib = find_gpu("b200").memory / 2**20
    shares = [chosen("b200", disaggregation_mode=mode).mem_fraction_static for mode in ("null", "prefill", "decode")]
    assert shares[1] - shares[0] == pytest.approx(2 * 512 / memory_mib, abs=0.0011)
    assert shares[2] == pytest.approx(1 - 10 * 1024 / memory_mib, abs=0.0006)


def test_what_is_set_stays():
    found = chosen("b200", chunked_prefill_size=4096, mem_fraction_static=0.5)
    assert (found.chunked_prefill_size, found.mem_fraction_static) == (4096, 0.5)


def test_without_a_gpu_prompts_are_cut_as_on_an_h100():
    assert resolve(SglangConfig()).settings.chunk_size == 8192


@pytest.mark.parametrize(
    ("model", "num_gpus", "share", "num_tokens", "error"),
    [
        ("Qwen/Qwen3-235B-A22B-FP8", 4, 0.93, 367_404, 0.02),  # vllm-project/vllm issue 21348, SGLang of 2025-07
        ("Qwen/Qwen3-30B-A3B-FP8", 1, None, 392_920, 0.002),  # a server's log of 2026-08-27
    ],
)
def test_the_room_for_kv_on_h100s_is_that_of_public_logs(model, num_gpus, share, num_tokens, error):
    timing = TimingConfig(model=model, gpu="h100", tensor_parallel_size=num_gpus)
    found = resolve(SglangConfig(mem_fraction_static=share), timing)
    assert found.num_usable_tokens == pytest.approx(num_tokens, rel=error)
