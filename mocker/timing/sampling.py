"""What an engine's sampler takes in a step, by how its requests sample."""

from typing import Literal, NamedTuple

Sampling = Literal["greedy", "temperature", "top-k", "top-p", "penalties"]


class Sampler(NamedTuple):
    """t = launch_s + logit_s for each sequence and entry of the vocabulary, beyond picking the most probable token."""

    launch_s: float
    logit_s: float


SAMPLERS: dict[Sampling, Sampler] = {
    "greedy": Sampler(0.0, 0.0),
    "temperature": Sampler(38e-6, 9e-12),
    "top-k": Sampler(191e-6, 24e-12),
    "top-p": Sampler(279e-6, 123e-12),
    "penalties": Sampler(126e-6, 23e-12),
}
"""vLLM's own sampler in PyTorch (V1), on H100 and H200 (benchmarks/fit_sampling.py). Other GPUs were not measured."""
