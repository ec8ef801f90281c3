"""Times of a step's kernels, by the number of tokens or sequences in it."""

from bisect import bisect_right
from dataclasses import dataclass
from math import log
from typing import NamedTuple

from mocker.timing.gpu import AllReduces, Experts

HALF = 2.0
"""Bytes in an activation."""


class Rate(NamedTuple):
    """How fast a kernel computes and moves bytes; it takes about as long as the slower of the two."""

    flops: float
    """Per second, like bandwidth."""
    bandwidth: float
    sharpness: float
    """How little the two overlap."""

    def seconds(self, flops: float, size: float) -> float:
        """Return the time of this many operations on this many bytes (s)."""
        compute, memory = flops / self.flops, size / self.bandwidth
        return float((compute**self.sharpness + memory**self.sharpness) ** (1 / self.sharpness))


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrices:
    """Matrices of one type in a layer, by which every token is multiplied, on one GPU, taken together."""

    rate: Rate
    weights: float
    size: float
    """Bytes of the weights."""
    moved: float
    """Bytes in and out for each token."""
    inputs: float
    quantised: float
    """Bytes that quantising an input reads and writes."""
    quantise: tuple[float, float]
    """Passes over them, and the share of that time which other kernels do not hide."""
    bandwidth: float
    launch_s: float

    def seconds(self, num_tokens: int) -> float:
        """Return their time in a step (s)."""
        passes, visible = self.quantise
        return (
            self.rate.seconds(2 * num_tokens * self.weights, self.size + num_tokens * self.moved)
            + num_tokens * self.inputs * self.quantised * passes * visible / self.bandwidth
            + self.launch_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """Sums over the GPUs that share a layer, of a hidden state for each token, or of a few numbers."""

    measured: AllReduces
    """None: nothing is shared."""
    token_bytes: float
    num_gpus: int = 1
    fused_s: float = 0.0
    """The least time of one that is fused with the norm after it."""
    fused_bytes: float = 0.0
    """The largest message that is fused."""

    def seconds(self, num_tokens: int) -> float:
        """Return the time of one (s)."""
        if not self.measured:
            return 0.0
        size = num_tokens * self.token_bytes
        return self._fused(size) if size <= self.fused_bytes else _interpolate(self.measured, size)

    def _fused(self, size: float) -> float:
        """Return the time if all send all to all, or if each adds up its share and sends that, which adds a round."""
        largest, longest_s = self.measured[-1]
        shares_s = size / largest * longest_s
        return self.fused_s + min(shares_s * self.num_gpus / 2, shares_s + self.fused_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayer:
    """One layer's routed experts, on one GPU."""

    fit: Experts
    rate: Rate
    num_experts: int
    experts_per_token: int
    hidden_size: int
    share: float
    """Parameters of the experts, on one GPU."""
    weights: float
    """Of one expert, or of a GPU's slice of one."""
    weight_bytes: float
    bandwidth: float
    attention_ranks: int
    exchange: AllReduce
    """Ranks with separate attention send each other their tokens and get back the results of the experts, which moves
    as much as one all-reduce."""
    exchange_s: float

    def seconds(self, num_tokens: int) -> float:
        """Return their time in a step (s), in which each rank computes as many tokens as this one."""
        return self.of_all(num_tokens * self.attention_ranks)

    def of_all(self, tokens: int) -> float:
        """Return their time in a step (s), in which all ranks together compute so many tokens."""
        fit = self.fit
        chosen = self.experts_per_token / self.num_experts
        active = self.num_experts * self.share * (1 - (1 - chosen) ** (tokens * fit.spread))
        routed = tokens * self.experts_per_token * self.share
        rows = max(routed, fit.pad * active)
        experts = self.rate.seconds(2 * rows * self.weights, active * self.weights * self.weight_bytes) + fit.launch_s
        moved = (routed * fit.passes + tokens * fit.token_passes) * self.hidden_size * HALF / self.bandwidth
        return experts + moved + (self.exchange.seconds(tokens) + self.exchange_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPart:
    """Half a layer: a mixer, or a feed-forward network, each with a norm before it and sums over GPUs in or after it."""

    count: int
    """Layers that have it."""
    matrices: tuple[Matrices, ...]
    fixed_s: float
    """Small kernels, and launching attention."""
    elementwise: float
    """Values that small kernels move for each token."""
    elementwise_bandwidth: float
    sums: tuple[AllReduce, ...]
    experts: ExpertLayer | None = None
    token_s: float = 0.0
    """To update a state by a token."""

    def seconds(self, num_tokens: int) -> float:
        """Return the time of all of them in a step (s), in which each rank computes as many tokens as this one."""
        return self._all_s(num_tokens, 0.0 if self.experts is None else self.experts.seconds(num_tokens))

    def among(self, num_tokens: int, num_all_tokens: int) -> float:
        """Return the same if all ranks together compute so many tokens."""
        return self._all_s(num_tokens, 0.0 if self.experts is None else self.experts.of_all(num_all_tokens))

    def _all_s(self, num_tokens: int, experts_s: float) -> float:
        time = self.fixed_s + num_tokens * (HALF * self.elementwise / self.elementwise_bandwidth + self.token_s)
        for matrices in self.matrices:
            time += matrices.seconds(num_tokens)
        return self.count * (time + experts_s + sum([total.seconds(num_tokens) for total in self.sums]))


class Head(NamedTuple):
    """The matrix that turns hidden states into logits, on one GPU, and the sampler, which has all logits."""

    scale: float
    rate: Rate
    weights: float
    launch_s: float
    """To sample, once a step."""
    sample_s: float
    """To sample for one sequence."""

    def seconds(self, num_sequences: int) -> float:
        """Return their time in a step (s)."""
        multiply_s = self.scale * self.rate.seconds(2 * num_sequences * self.weights, self.weights * HALF)
        return multiply_s + self.launch_s + num_sequences * self.sample_s


def _interpolate(points: AllReduces, x: float) -> float:
    """Interpolate between points in order of x, linearly in logarithms; beyond the last, in proportion."""
    if x >= points[-1][0]:
        return points[-1][1] * x / points[-1][0]
    if x <= points[0][0]:
        return points[0][1]
    place = bisect_right(points, (x, 0.0))
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    return float(y0 * (y1 / y0) ** (log(x / x0) / log(x1 / x0)))
