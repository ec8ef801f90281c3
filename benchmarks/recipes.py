"""How each published point was measured: the engine, its settings, and the requests that were sent.

**InferenceX** (`2026-*.csv`, `db-dump`): the scripts in `benchmarks/` of SemiAnalysisAI/InferenceX at the time of the
run. A closed loop of C requests, 10 C in total, of random tokens, with lengths uniform from 80% to 100% of ISL and OSL
(`--random-range-ratio 0.8`).

**NVIDIA's sweeps** (`aic-auto-gap-analysis`): no scripts are public. Each file is one model, engine and version; the
batch size, the layout and C are in the rows. Where C is a multiple of the batch size of all ranks, that many engines
shared the requests. The KV cache has 16 bits. The rest is inferred, from a third of the TensorRT-LLM points of Llama 8B
unless said otherwise:

- Lengths are fixed. With a spread of 5%, errors are the same; with one of 20%, TTFT is 38% low. vLLM's points of Qwen3
  235B say so more clearly: TTFT is off by 19% with fixed lengths, 27% with 5%, and 35% with 20%.
- vLLM and TensorRT-LLM have room for one prompt beside the decodes in a step (`max_num_tokens`). With the default of
  8,192 tokens, prompts would come in waves: TTFT would be off by 16 points more on average, and by 52 for vLLM.
- TensorRT-LLM runs one request fewer than C: TTFT rises with OSL by what one waiting request makes of it, at every C.
  The cause is not known.

**gpt-oss on H100 from 2025-12-05 to 2025-12-08**, listed with 512 requests at a time: the script had
`--max-concurrency 512`, which a commit of 2025-12-08 ("fix h100 docker error") corrected, but `--max-num-seqs=$CONC` and
`--num-prompts $(( $CONC * 10 ))`. So 10 CONC requests were sent, up to 512 at once, and CONC of them ran: TTFT is 81 to
83% of E2E latency whatever the lengths, as ten rounds one after another have it. Which CONC of 4 to 64 a row is of was lost,
so these rows do not count.
"""

from typing import Any, NamedTuple

from dynabench.deployment.description import Pool
from mocker import EngineConfig, SglangConfig, TrtllmConfig
from mocker.timing.config import TimingConfig

BLACKWELL = ("b200", "b300", "gb200")
MEASURED_ON = r"measured=(\d+-\d+-\d+)"
"""The day of a run, in its source."""
SPREAD = 0.8
"""InferenceX: the shortest request, as a share of the longest."""
CHECKPOINTS = {
    ("MiniMaxAI/MiniMax-M2.5", "fp4"): "nvidia/MiniMax-M2.5-NVFP4",
    ("Qwen/Qwen3.5-397B-A17B", "fp4"): "nvidia/Qwen3.5-397B-A17B-NVFP4",
    ("Qwen/Qwen3.5-397B-A17B", "fp8"): "Qwen/Qwen3.5-397B-A17B-FP8",
    ("deepseek-ai/DeepSeek-R1", "fp4"): "nvidia/DeepSeek-R1-0528-FP4-V2",
    ("moonshotai/Kimi-K2.5", "fp4"): "nvidia/Kimi-K2.5-NVFP4",
    ("zhipuai/GLM-5", "fp4"): "nvidia/GLM-5-NVFP4",
    ("zhipuai/GLM-5", "fp8"): "zai-org/GLM-5-FP8",
}
"""InferenceX: the checkpoints in `configs/` that are not the model of the points itself, by model and precision.

What DeepSeek-R1's leaves in 16 bits is inferred from V3.1's, by the same makers, and from NVIDIA/Model-Optimizer #150, which
says that R1's first FP4 checkpoint has attention in BF16.
"""


class Started(NamedTuple):
    """How the script of a benchmark starts vLLM."""

    has_small_kv: bool
    async_scheduling: bool = True
    gpu_memory_utilization: float = 0.9
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 0
    """Set if it is more than the number of concurrent requests."""
    max_cudagraph_capture_size: int = 512
    """vLLM's default. 0 for 70B on B200, whose compilation settings capture decodes alone (`FULL_DECODE_ONLY`)."""


def is_sweep(point: Any) -> bool:
    """Return whether NVIDIA measured a point, and not InferenceX."""
    return "aic-auto-gap" in point.silicon_data_source


def shortest_of(point: Any) -> float:
    """Return the length of the shortest request of a point, as a share of the longest."""
    return 1.0 if is_sweep(point) else SPREAD


def is_limited(point: Any) -> bool:
    """Return whether fewer requests ran than were sent at a time."""
    return (point.model_path, point.gpu, int(point.concurrency)) == ("openai/gpt-oss-120b", "h100", 512)


def pool_of(point: Any, gpu: str) -> Pool:
    """Return the engines of a point."""
    engine: dict[str, Any] = {"mocker": vllm_of(point, gpu)}
    if point.backend == "sglang":
        engine = {"engine_type": "sglang", "sglang": sglang_of(point, gpu)}
    if point.backend == "trtllm":
        engine = {"engine_type": "trtllm", "trtllm": trtllm_of(point)}
    return Pool(replicas=replicas_of(point), timing=timing_of(point, gpu), **engine)


def replicas_of(point: Any) -> int:
    """Return how many engines shared the requests of a point."""
    if not is_sweep(point):
        return 1
    return max(1, round(int(point.concurrency) / (int(point.batch_size) * int(point.attention_dp_size))))


def timing_of(point: Any, gpu: str) -> TimingConfig:
    """Return the step times of a point."""
    has_small_kv = has_small_kv_of(point, gpu)
    vllm = started(point, gpu) if point.backend == "vllm" else None
    return TimingConfig(
        model=CHECKPOINTS.get((point.model_path, point.precision), point.model_path),
        gpu=gpu,
        tensor_parallel_size=num_gpus_of(point),
        enable_expert_parallel=has_whole_experts(point),
        quantization=quantization_of(point) if "Llama" in point.model_path else None,
        kv_cache_dtype="fp8" if has_small_kv else "bfloat16",
        gpu_memory_utilization=0.9 if vllm is None else vllm.gpu_memory_utilization,
        timed_as=point.backend,
        moe_backend=moe_backend_of(point, gpu),
        sampling="top-p" if is_sweep(point) else "greedy",
        max_cudagraph_capture_size=None if vllm is None else vllm.max_cudagraph_capture_size,
    )


def moe_backend_of(point: Any, gpu: str) -> Any:
    """Return the kernels of experts that InferenceX's scripts ask for, where they are not those that the engine chooses.

    gpt-oss ran on vLLM with VLLM_MXFP4_USE_MARLIN=1 on Hopper, DeepSeek-R1 in FP4 on TensorRT-LLM with CUTLASS where
    attention is not shared.
    """
    if is_sweep(point):
        return "auto"
    if point.backend == "vllm" and "gpt-oss" in point.model_path and gpu not in BLACKWELL:
        return "marlin"
    is_fp4 = point.precision == "fp4" and "DeepSeek" in point.model_path
    return "cutlass" if point.backend == "trtllm" and is_fp4 and point.attention_dp_size > 1 else "auto"


def has_launches(point: Any) -> bool:
    """Return whether a script is known whose steps with a prompt launch their kernels one by one."""
    if is_sweep(point):
        return False
    return point.backend != "vllm" or started(point, point.gpu).max_cudagraph_capture_size < int(point.isl)


def has_whole_experts(point: Any) -> bool:
    """Return whether each GPU has whole experts, which the scripts of vLLM do not always take from their parameters.

    Kimi's on B200 leaves out the expert parallelism that it is given. MiniMax's first one always has it (`-ge 1`).
    """
    if point.backend == "vllm" and "Kimi" in point.model_path:
        return False
    is_first = point.backend == "vllm" and "MiniMax" in point.model_path and point.backend_version == "0.17.0"
    return bool(point.moe_ep_size > 1) or is_first


def num_gpus_of(point: Any) -> int:
    """Return what an engine calls its tensor parallel size: with attention DP, TensorRT-LLM counts all GPUs, vLLM those of a rank."""
    return int(point.tp_size * (point.attention_dp_size if point.backend == "trtllm" else 1))


def quantization_of(point: Any) -> Any:
    """Return the type of the weights, if it is not 16 bits. Llama's checkpoints in it are not bundled: no layer is left out."""
    if point.precision in ("fp8", "fp4", "int4"):
        return point.precision
    return "fp8" if "FP8" in str(point.silicon_data_source) else None


def has_small_kv_of(point: Any, gpu: str) -> bool:
    """Return whether the KV cache had 8 bits."""
    if point.backend == "vllm":
        return started(point, gpu).has_small_kv
    if is_sweep(point):
        return False
    model = point.model_path.rpartition("/")[2]
    if point.backend == "sglang":
        is_default = (model, gpu) in (("DeepSeek-R1", "h200"), ("DeepSeek-V3", "h200"), ("GLM-5", "h200"))
        return quantization_of(point) is not None and not is_default
    return (model, gpu) != ("gpt-oss-120b", "h200")


# vLLM


def started(point: Any, gpu: str) -> Started:
    """Return how vLLM was started, according to the scripts of InferenceX at the time of the runs (up to 2026-04).

    Other engines count as started with an 8-bit KV cache and asynchronous scheduling.

    Llama 70B ran on vLLM 0.11.0 with a file of settings: an 8-bit KV cache and asynchronous scheduling. On H100 the
    file was given as `--config=config.yaml`, which vLLM's parser ignores, because it looks for the separate word
    `--config`. (That was corrected on 2025-10-19 on a branch that was not merged before the model was dropped.) So the
    defaults of 0.11 apply there: a 16-bit cache and synchronous scheduling, which is the default until 0.14.
    """
    if point.backend != "vllm":
        return Started(True)
    match point.model_path.rpartition("/")[2]:
        case "Llama-3.1-70B":
            is_plain = gpu == "h100"
            most = 512 if gpu in BLACKWELL else 0
            return Started(not is_plain, not is_plain, max_num_seqs=most, max_cudagraph_capture_size=0)
        case "MiniMax-M2.5" if point.backend_version == "0.17.0":
            return Started(False, gpu_memory_utilization=0.95)
        case "MiniMax-M2.5":
            # TTFT of the nightly build, 35 to 50 ms above that of 0.19.0 five days later, says that it had no such graphs.
            most = 2048 if point.backend_version == "0.19.0" else 512
            return Started(True, max_num_batched_tokens=2 * int(point.isl), max_cudagraph_capture_size=most)
        case "Kimi-K2.5" if point.measured == "2026-04-20":
            return Started(True, max_num_batched_tokens=2 * int(point.isl), max_cudagraph_capture_size=2048)
        case "Kimi-K2.5":
            # The FP4 checkpoint asks for an 8-bit cache: 64 requests, which 16 bits have no room for, did not wait.
            is_small = point.precision == "fp4"
            return Started(is_small, gpu_memory_utilization=0.9 if is_small else 0.95)
        case "gpt-oss-120b":
            return Started(False, max_cudagraph_capture_size=2048)
    return Started(False, async_scheduling=False)  # NVIDIA's sweep on 0.12


def vllm_of(point: Any, gpu: str) -> EngineConfig:
    """Return the settings of vLLM's scheduler."""
    script = started(point, gpu)
    concurrency = int(point.concurrency)
    if is_sweep(point):
        script = script._replace(max_num_batched_tokens=int(point.isl) + concurrency)
    return EngineConfig(
        dp_size=int(point.attention_dp_size) if point.attention_dp_size > 1 else 1,
        block_size=16,
        max_num_seqs=max(script.max_num_seqs, concurrency),
        max_num_batched_tokens=max(script.max_num_batched_tokens, script.max_num_seqs, concurrency),
        enable_prefix_caching=False,
        async_scheduling=script.async_scheduling,
    )


# SGLang


def sglang_of(point: Any, gpu: str) -> SglangConfig:
    """Return the settings of SGLang's scheduler: InferenceX's scripts, which were the same from 2025-11 to 2026-04.

    DeepSeek-R1 in FP8 on B200 is said to have run at most 128 requests, but with 256 at a time, its requests did not
    wait, and with 512 they did: it must have been 256.
    """
    concurrency = int(point.concurrency)
    often = 10 if concurrency < 16 else 30
    is_balanced = (int(point.isl), int(point.osl)) == (1024, 1024)
    model = point.model_path.rpartition("/")[2].replace("V3", "R1")  # R1 was run; the points list it as V3
    match model, gpu, point.precision:
        case _ if is_sweep(point):
            return SglangConfig()
        case "DeepSeek-R1", "h200", _:
            return _script(512 if is_balanced else 256, 0.82, 32768)
        case "DeepSeek-R1", _, "fp8" if point.tp_size == 4:
            return _script(32, 0.95, 8192, recv=10)
        case "DeepSeek-R1", _, "fp8":
            return _script(max(128, min(concurrency, 256)), 0.82, 32768, recv=often)
        case "DeepSeek-R1", _, _:
            return _script(256, 0.85, 16384, recv=often)
        case "Qwen3.5-397B-A17B", "h200", _:
            return _script(128, 0.8, 16384)
        case "Qwen3.5-397B-A17B", _, precision:
            return _script(128, 0.85 if precision == "fp4" else 0.82, 32768, recv=often)
        case "GLM-5", "h200", _:
            return SglangConfig(mem_fraction_static=0.85)
        case "GLM-5", _, "fp8":
            return _script(concurrency, 0.85, 32768)
        case "GLM-5", _, _:
            return _script(concurrency, 0.8, 131072)
    return SglangConfig()


def _script(max_running: int, share: float, chunk: int, *, recv: int = 1) -> SglangConfig:
    return SglangConfig(
        max_running_requests=max_running,
        mem_fraction_static=share,
        chunked_prefill_size=chunk,
        max_prefill_tokens=chunk,
        scheduler_recv_interval=recv,
        disable_radix_cache=True,
    )


# TensorRT-LLM


def trtllm_of(point: Any) -> TrtllmConfig:
    """Return the settings of TensorRT-LLM's scheduler, by the scripts of InferenceX, or its defaults."""
    isl, osl, concurrency = int(point.isl), int(point.osl), int(point.concurrency)
    if is_sweep(point):
        return TrtllmConfig(
            max_batch_size=max(int(point.batch_size) - 1, 1),
            max_num_tokens=isl + int(point.batch_size),
            enable_block_reuse=False,
        )
    most = max(8192, -(-(concurrency + isl + 64) // 64) * 64)
    match point.model_path.rpartition("/")[2]:
        case "Llama-3.1-70B":
            waits = (isl, osl) == (1024, 1024) and point.tp_size < 8
            return TrtllmConfig(
                max_num_tokens=16384,
                batch_wait_timeout_iters=20 if waits else 0,
                batch_wait_max_tokens_ratio=0.9 if waits else 0.0,
                enable_block_reuse=False,
            )
        case _:
            share = 0.75 if "h200" in point.system else 0.8
            has_ranks = point.attention_dp_size > 1
            return TrtllmConfig(
                max_num_tokens=most,
                kv_cache_free_gpu_memory_fraction=share,
                enable_block_reuse=False,
                enable_attention_dp=has_ranks,
                attention_dp_enable_balance=has_ranks,
                attention_dp_timeout_iters=60 if has_ranks else 50,
                attention_dp_batching_wait_iters=0 if has_ranks else 10,
            )
