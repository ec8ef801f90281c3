"""Measure on a GPU what it costs to sample one token for each of several sequences, by vocabulary and kind of sampling.

    python benchmarks/gpu_sampling.py OUT.csv        # needs torch and a GPU; dynabench itself is not needed

The steps are those that vLLM's own sampler takes in PyTorch (V1, without FlashInfer): logits in 32 bits; top-p sorts
the vocabulary of each sequence; a token is drawn as the largest of probability over an exponential variate. Times are
medians of CUDA events around one call (ms), launches included, as in an engine whose sampler runs outside CUDA graphs.
"""

import csv
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

VOCABULARIES = (32_000, 65_536, 128_256, 151_936, 201_088, 262_144)
SEQUENCES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512)
REPEATS = 15
NUM_OUTPUTS = 256
"""Tokens that each sequence has generated, for penalties."""


def drawn(logits: torch.Tensor) -> torch.Tensor:
    """Draw a token for each sequence."""
    probabilities = logits.softmax(dim=-1, dtype=torch.float32)
    return probabilities.div_(torch.empty_like(probabilities).exponential_()).argmax(dim=-1)


def top_p(logits: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Draw among the most probable tokens that have this share together."""
    ordered, places = logits.sort(dim=-1, descending=False)
    total = ordered.softmax(dim=-1).cumsum(dim=-1)
    mask = total <= 1 - share.unsqueeze(1)
    mask[:, -1] = False
    ordered.masked_fill_(mask, -float("inf"))
    return drawn(logits.scatter_(dim=-1, index=places, src=ordered))


def top_k(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Draw among so many of the most probable tokens."""
    least = logits.topk(count, dim=1).values[:, -1:]
    return drawn(logits.masked_fill_(logits < least, -float("inf")))


def penalized(logits: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """Draw with penalties for what was generated."""
    num_sequences, size = logits.shape
    counts = torch.zeros((num_sequences, size + 1), dtype=torch.long, device=logits.device)
    counts.scatter_add_(1, outputs, torch.ones_like(outputs))
    counts = counts[:, :size]
    seen = counts > 0
    logits -= 0.1 * counts
    logits -= 0.1 * seen
    return drawn(logits)


def with_logprobs(logits: torch.Tensor) -> torch.Tensor:
    """Draw, and return the log probabilities of the token and of the five most probable ones."""
    logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
    token = drawn(logits)
    logprobs.topk(5, dim=-1)
    chosen = logprobs.gather(-1, token.unsqueeze(-1))
    (logprobs >= chosen).sum(-1)
    return token


def median_ms(call: Callable[[torch.Tensor], torch.Tensor], logits: torch.Tensor) -> float:
    """Return the time of a call on a copy of the logits, which it may change."""
    times = []
    for number in range(REPEATS + 3):
        given = logits.clone()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call(given)
        end.record()
        torch.cuda.synchronize()
        if number >= 3:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def main() -> None:
    """Measure all combinations that fit and write them as CSV."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    with Path(sys.argv[1]).open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["gpu", "torch", "kind", "vocabulary", "sequences", "ms"])
        for size in VOCABULARIES:
            for count in SEQUENCES:
                logits = torch.randn((count, size), device=device) * 3
                share = torch.full((count,), 0.95, device=device)
                outputs = torch.randint(0, size, (count, NUM_OUTPUTS), device=device)
                kinds: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
                    "greedy": lambda given: given.argmax(dim=-1),
                    "temperature": lambda given: drawn(given.div_(0.8)),
                    "top_p": lambda given, share=share: top_p(given, share),  # type: ignore[misc]
                    "top_k": lambda given: top_k(given, 50),
                    "penalties": lambda given, outputs=outputs: penalized(given, outputs),  # type: ignore[misc]
                    "logprobs": with_logprobs,
                }
                for kind, call in kinds.items():
                    name = torch.cuda.get_device_name(device)
                    out.writerow([name, torch.__version__, kind, size, count, f"{median_ms(call, logits):.4f}"])


if __name__ == "__main__":
    main()
