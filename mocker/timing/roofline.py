"""Step times from first principles: a model's shape, a GPU's measured efficiencies, an engine's host times.

One step of a dense decoder on n GPUs, with T tokens in it:

    step = max(host, GPU) with asynchronous scheduling, else host + GPU
    GPU  = layers * (gemm + attention + communication + elementwise) + head

    gemm          ((2 T W / (P ec))^p + ((W w + activations) / (BW em))^p)^(1/p) + c for each matrix
    attention     4 H d pairs / (P ef) + KV bytes / (BW ekv) + cb B Kv + ca; what a window hides is neither computed nor read
    communication 2 all-reduces of T h values: a + b n + 2 (n-1)/n bytes / link
    elementwise   ce + T activation bytes / (0.6 BW)
    head          the last hidden state of S sequences times the vocabulary, and sampling from all of it (`sampling.py`)

It is affine in the KV tokens that a batch reads, until these fill a window, or constant until the GPU's time exceeds the
host's, so a batch that only decodes keeps leaping. `parts.py` computes the coefficients.
"""

from math import ceil
from typing import NamedTuple

from mocker.timing.kernels import Head, KernelPart
from mocker.timing.model import FOREVER, Knots, Load, Prefill, Ramp, slowest


class Roofline:
    """Step times of one model on one kind of GPU."""

    def __init__(self, coefficients: "Coefficients") -> None:
        self._parts, self._attention = coefficients.parts, coefficients.attention
        self._reaches = coefficients.reaches
        self._head, self._host = coefficients.head, coefficients.host
        self.knots = Knots(tokens=(self._host.graph_tokens,))  # the last size whose kernels a graph launches
        self._scale = coefficients.scale
        self.lead_s = coefficients.host.least_s
        # Values that depend only on a whole number are computed once.
        self._linear: dict[int, float] = {}
        self._heads: dict[int, float] = {}
        self._decodes: dict[int, float] = {}

    def mixed(self, prefill: Prefill, num_decodes: int, num_kv_tokens: int) -> float:
        """Weights are read once for all tokens of the step."""
        num_tokens = prefill.num_tokens + num_decodes
        linear_s = self._linear.get(num_tokens) or self._tokens_s(num_tokens)
        return self._mixed(prefill, num_decodes, num_kv_tokens, linear_s)

    def _mixed(self, prefill: Prefill, num_decodes: int, num_kv_tokens: int, linear_s: float) -> float:
        """Return the time of a step with prefill (s), of which `linear_s` are for what depends on its tokens alone."""
        attention, host = self._attention, self._host
        num_tokens, num_context_tokens, num_pairs, num_prefills = prefill
        sequences = num_prefills + num_decodes
        kernels = (
            linear_s
            + (self._heads.get(sequences) or self._head_s(sequences))
            + attention.pair_s * (num_pairs + attention.pad * (num_tokens + num_context_tokens))
            + attention.mixed_kv_s * num_kv_tokens
            + (attention.mixed_row_s + attention.tile_s * num_tokens / num_prefills) * num_decodes
        )
        for reach in self._reaches:
            kernels += reach.mixed(prefill, attention.pad, num_decodes, num_kv_tokens)
        has_graph = num_tokens + num_decodes <= host.graph_tokens
        least = (host.least_s if has_graph else host.least_mixed_s) + sequences * host.least_sequence_s
        if kernels < least:
            kernels = least
        return kernels + host.step_s + sequences * host.sequence_s

    def decode(self, num_sequences: int, num_kv_tokens: int) -> Ramp:
        """Affine in the KV tokens, which grow by one for each sequence and step, until they fill a window."""
        fixed = self._decodes.get(num_sequences)
        if fixed is None:
            fixed = self._tokens_s(num_sequences) + self._head_s(num_sequences)
            fixed += num_sequences * self._attention.row_s + self._host.step_s + num_sequences * self._host.sequence_s
            self._decodes[num_sequences] = fixed
        kv_s, host, num_steps = self._attention.kv_s, self._host, FOREVER
        first, slope = fixed + kv_s * num_kv_tokens, kv_s * num_sequences
        for reach in self._reaches:
            most = num_sequences * reach.window
            if num_kv_tokens < most:
                first += reach.kv_s * num_kv_tokens
                slope += reach.kv_s * num_sequences
                num_steps = min(num_steps, ceil((most - num_kv_tokens) / num_sequences))
            else:
                first += reach.kv_s * most
        least = host.least_s + num_sequences * host.least_sequence_s
        if first < least:
            return Ramp(least, num_steps=min(num_steps, int((least - first) / slope) + 1) if slope else FOREVER)
        return Ramp(first, slope, num_steps=num_steps)

    def among(self, loads: list[Load]) -> float:
        """Experts compute the tokens of all ranks. If all decode, each rank's batch is padded to the largest (CUDA graphs)."""
        if all(load.prefill is None for load in loads):
            return slowest(self, loads)
        num_all_tokens = sum([load.num_tokens for load in loads])
        return max([self._one_among(load, num_all_tokens) for load in loads])

    def _one_among(self, load: Load, num_all_tokens: int) -> float:
        prefill, count, num_kv_tokens = load
        linear_s = self._scale * sum([part.among(load.num_tokens, num_all_tokens) for part in self._parts])
        if prefill is not None:
            return self._mixed(prefill, count, num_kv_tokens, linear_s)
        padded_s = self._linear.get(count) or self._tokens_s(count)
        return self.decode(count, num_kv_tokens).first + linear_s - padded_s

    def verify(self, load: Load, num_drafts: int) -> float:
        """Drafts are tokens of the matrices and of the head; a sequence's context is read once for all of them."""
        prefill, count, num_kv_tokens = load
        num_tokens = load.num_tokens + num_drafts
        linear_s = self._linear.get(num_tokens) or self._tokens_s(num_tokens)
        if prefill is not None:
            sequences = prefill.num_sequences + count
            linear_s += self._head_s(sequences + num_drafts) - self._head_s(sequences)
            return self._mixed(prefill, count, num_kv_tokens, linear_s)
        host, kv_s = self._host, self._attention.kv_s * num_kv_tokens
        for reach in self._reaches:
            kv_s += reach.kv_s * min(num_kv_tokens, count * reach.window)
        kernels = linear_s + self._head_s(num_tokens) + count * self._attention.row_s + kv_s
        step_s = kernels + host.step_s + count * host.sequence_s
        return max(step_s, host.least_s + count * host.least_sequence_s)

    def parts_of_a_step(self, num_tokens: int) -> tuple[float, float]:
        """Return the times (s) of the layers and of the head in a step of so many decodes, without their contexts."""
        return self._tokens_s(num_tokens) + num_tokens * self._attention.row_s, self._head_s(num_tokens)

    def _tokens_s(self, num_tokens: int) -> float:
        """Compute and cache the time of all kernels that depend only on the number of tokens (s)."""
        found = self._linear[num_tokens] = self._scale * sum([part.seconds(num_tokens) for part in self._parts])
        return found

    def _head_s(self, num_sequences: int) -> float:
        """Compute and cache the time to turn hidden states into tokens (s)."""
        found = self._heads[num_sequences] = self._head.seconds(num_sequences)
        return found


class Attention(NamedTuple):
    """Times of attention in all layers, scaled (s); pairs and KV only of layers that see all tokens."""

    pair_s: float
    """For each token of a prompt and each key it attends to."""
    pad: float
    """Tokens by which a prefill's attention is padded."""
    kv_s: float
    """For each token of context that a decode reads."""
    mixed_kv_s: float
    """The same next to a prefill, as are the next two."""
    row_s: float
    """For each sequence that decodes."""
    mixed_row_s: float
    tile_s: float
    """For each decode and each token of a prefill."""


class Reach(NamedTuple):
    """Times of attention in the layers that see at most a window, scaled (s).

    A step knows sums over its sequences. So these are computed as if all had the same length, which never takes less, and
    never more than if they saw everything.
    """

    window: int = 0
    """0: all tokens."""
    pair_s: float = 0.0
    kv_s: float = 0.0
    mixed_kv_s: float = 0.0

    def mixed(self, prefill: Prefill, pad: float, num_decodes: int, num_kv_tokens: int) -> float:
        """Return the time in a step with prefill (s)."""
        num_tokens, num_context_tokens, _, num_prefills = prefill
        keys = min(num_tokens + num_context_tokens, num_tokens + num_prefills * self.window)
        return self.pair_s * (self.pairs(prefill) + pad * keys) + self.mixed_kv_s * min(
            num_kv_tokens, num_decodes * self.window
        )

    def pairs(self, prefill: Prefill) -> float:
        """Return how many pairs of a prompt's token and a key a window leaves."""
        num_tokens, num_context_tokens, num_pairs, num_prefills = prefill
        count, start = num_tokens / num_prefills, num_context_tokens / num_prefills
        growing = min(max(self.window - start, 0.0), count)  # tokens that still see everything before them
        left = growing * (start + growing / 2) + (count - growing) * self.window
        return min(num_pairs, num_prefills * left)


class Host(NamedTuple):
    """The engine's work besides the kernels (s): added to their time, or in parallel, so that the longer one counts."""

    step_s: float
    """Added to a step."""
    sequence_s: float
    """Added for each sequence of it."""
    least_s: float
    """The least time of a step that only decodes."""
    least_mixed_s: float
    """The same with prefill, whose kernels may be launched one by one."""
    least_sequence_s: float
    """The same for each sequence."""
    graph_tokens: int = 0
    """Most tokens of a step with prefill that CUDA graphs launch, which takes no longer than to launch a decode."""


class Coefficients(NamedTuple):
    """A model on one kind of GPU, as `Roofline` adds it up."""

    scale: float
    parts: list[KernelPart]
    """Everything in the layers that depends on the number of tokens alone."""
    attention: Attention
    reaches: list[Reach]
    head: Head
    host: Host
