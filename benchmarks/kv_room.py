"""Compare the room for KV blocks with public logs of vLLM.

    python benchmarks/kv_room.py

Each row is a published start of vLLM: model, GPU, settings, and the memory it found for the KV cache. Two things
changed between its versions: until about 0.16 the trial run sorted the logits, and since 0.21 the CUDA graphs are
counted. Each row is compared with its
version's method of counting; `mocker.timing.memory` uses that of 0.32.
"""

from typing import NamedTuple
from unittest.mock import patch

from mocker.models.catalog import find_model
from mocker.timing import memory
from mocker.timing.catalog import find_gpu

LLM_D = "https://github.com/llm-d-incubation/llm-d-planner/blob/main/docs/empirical-vllm-memory-results.md"
HPI = "https://github.com/aihpi/litellm-k8s"
STRESS = "https://github.com/satyan0/stress-testing-gpu/blob/main/results/BASELINE.md"
ISSUE = "https://github.com/vllm-project/vllm/issues/21348"
BLOG = "https://myoceane.fr/index.php/ai-vllm-a100-gemma-4/"
SORTING_COPIES = 9.57


class Start(NamedTuple):
    """One start of vLLM, and the memory that it logged."""

    model: str
    gpu: str
    num_gpus: int
    version: float
    utilization: float
    max_num_seqs: int
    max_num_batched_tokens: int
    gib: float
    """Memory for the KV cache on each GPU."""
    source: str
    weights: str = ""


STARTS = [
    Start("meta-llama/Llama-3.1-8B", "h100", 1, 0.11, 0.9, 1024, 8192, 51.38, LLM_D),
    Start("meta-llama/Llama-3.3-70B", "h100", 2, 0.11, 0.9, 1024, 8192, 32.00, LLM_D, "fp8"),
    Start("meta-llama/Llama-3.3-70B", "h100", 1, 0.11, 0.9, 1024, 8192, -1.44, LLM_D, "fp8"),
    Start("Qwen/Qwen3-0.6B", "h100", 1, 0.11, 0.9, 1024, 8192, 64.45, LLM_D),
    Start("Qwen/Qwen3-32B", "h100", 1, 0.11, 0.9, 1024, 8192, 4.45, LLM_D),
    Start("Qwen/Qwen3-32B", "h100", 2, 0.11, 0.9, 1024, 8192, 34.49, LLM_D),
    Start("openai/gpt-oss-20b", "h100", 1, 0.11, 0.9, 1024, 8192, 50.28, LLM_D),
    Start("openai/gpt-oss-120b", "h100", 1, 0.11, 0.95, 1024, 8192, 3.33, LLM_D),  # by its own sum
    Start("Qwen/Qwen3-235B-A22B-FP8", "h100", 4, 0.09, 0.9, 1024, 8192, 8.11, ISSUE),
    Start("openai/gpt-oss-20b", "a100", 1, 0.19, 0.65, 256, 2048, 36.56, BLOG),
    Start("meta-llama/Llama-3.1-70B", "rtx-pro-6000", 1, 0.23, 0.9, 1024, 16384, 14.54, STRESS, "fp8"),
    Start("meta-llama/Llama-3.1-70B", "rtx-pro-6000", 1, 0.23, 0.875, 1024, 16384, 12.17, STRESS, "fp8"),
    Start("meta-llama/Llama-3.3-70B", "h100", 1, 0.22, 0.95, 8, 8192, 5.11, HPI, "fp8"),  # an image called latest
]


def room_of(start: Start) -> float:
    """Return the memory for KV blocks as that version counts it (GiB)."""
    copies = SORTING_COPIES if start.version < 0.165 else memory.SAMPLING_COPIES
    graphs = memory.GRAPHS if start.version >= 0.21 else 0.0
    with patch.multiple(memory, SAMPLING_COPIES=copies, GRAPHS=graphs):
        return (
            memory.room_for_kv(
                find_model(start.model).quantised(start.weights) if start.weights else find_model(start.model),
                find_gpu(start.gpu),
                utilization=start.utilization,
                max_num_batched_tokens=start.max_num_batched_tokens,
                max_num_seqs=start.max_num_seqs,
                tensor_parallel_size=start.num_gpus,
            )
            / memory.GIB
        )


def main() -> None:
    """Print a row for each start."""
    print("| model | GPUs | vLLM | utilization | sequences | tokens a step | logged GiB | ours | source |")
    print("|---|---|---|---|---|---|---|---|---|")
    for start in STARTS:
        name = start.model.rpartition("/")[2] + (f" {start.weights}" if start.weights else "")
        print(
            f"| {name} | {start.num_gpus} {start.gpu} | {start.version:.2f} | {start.utilization} | {start.max_num_seqs:,} "
            f"| {start.max_num_batched_tokens:,} | {start.gib:.2f} | {room_of(start):.2f} | [log]({start.source}) |"
        )


if __name__ == "__main__":
    main()
