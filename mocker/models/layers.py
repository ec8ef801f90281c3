"""The parts of a layer as numbers: matrices, what mixes tokens (attention or a state), and the feed-forward network.

Norms and biases are left out: they are less than 0.2% of any model's parameters.
"""

from dataclasses import dataclass
from typing import NamedTuple


class WeightType(NamedTuple):
    """How weights are stored and multiplied."""

    name: str
    """bfloat16, fp8, int8, int4 or fp4."""
    bytes: float
    """Of a weight, with its share of the scales."""
    compute: str
    """The type in which a GPU that supports it multiplies; bfloat16: the weights are unpacked on the way."""


BFLOAT16 = WeightType("bfloat16", 2.0, "bfloat16")


class Side(NamedTuple):
    """A part of a matrix's outputs (or its inputs), and into how many pieces it can be divided over GPUs."""

    size: int
    num_pieces: int = 1
    """Where GPUs are more than pieces, several hold the same piece; 1: all hold all of it."""

    def on_gpu(self, num_gpus: int) -> float:
        """Return the part of one of several GPUs."""
        return self.size / min(num_gpus, self.num_pieces)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix that every token of a step is multiplied by; several that share their inputs count as one."""

    modules: tuple[str, ...]
    """Their names below the layer in a checkpoint, such as `self_attn.q_proj`."""
    inputs: Side
    outputs: tuple[Side, ...]
    weight: WeightType = BFLOAT16

    @property
    def num_parameters(self) -> int:
        """Count the weights."""
        return self.inputs.size * sum([side.size for side in self.outputs])

    def on_gpu(self, num_gpus: int) -> tuple[float, float]:
        """Return inputs and outputs of the part on one of several GPUs."""
        return self.inputs.on_gpu(num_gpus), sum([side.on_gpu(num_gpus) for side in self.outputs])


def column(modules: tuple[str, ...], inputs: int, *outputs: Side) -> Matrix:
    """Return a matrix whose outputs are divided over GPUs."""
    return Matrix(modules, Side(inputs), outputs)


def row(module: str, inputs: Side, outputs: int) -> Matrix:
    """Return a matrix whose inputs are divided over GPUs."""
    return Matrix((module,), inputs, (Side(outputs),))


class Index(NamedTuple):
    """Picks the tokens that sparse attention reads: small keys of all tokens, scored by a few heads."""

    num_heads: int
    head_dim: int
    num_picked: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixer:
    """What lets a token see earlier ones: attention of some kind, or a state of fixed size."""

    kind: str
    """full_attention, sliding_attention, chunked_attention, indexed_attention, linear_attention, ..."""
    matrices: tuple[Matrix, ...]
    num_other_parameters: int = 0
    """In 16 bits, and not worth a matrix of its own: convolutions, decays, routers of the index."""
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    """Of queries and keys."""
    kv_width: int = 0
    """KV elements of a token for each KV head: keys and values, or one latent for both."""
    latent_flops: int = 0
    """For each head and token of context, in a decode that works on latents; 0: keys and values are kept as they are."""
    window: int = 0
    """Most tokens that one attends to, or with compression, sees uncompressed; 0: all."""
    has_kv: bool = True
    """False if it reads the KV of an earlier layer."""
    is_normed_across: bool = False
    """Whether queries, and keys, are normed over all heads together, so that GPUs add up their squares."""
    compression: int = 1
    """Tokens whose KV is kept as one entry."""
    index: Index | None = None
    num_state_heads: int = 0
    num_state_groups: int = 0
    state_bytes: float = 0.0
    """Of a sequence, on all GPUs together."""
    state_flops: int = 0
    """To update the state by a token, on all GPUs together."""

    @property
    def keeps_all(self) -> bool:
        """Whether its KV grows with the context."""
        return bool(self.num_kv_heads and self.has_kv) and (not self.window or self.compression > 1)

    def kv_heads(self, num_gpus: int) -> int:
        """Return the KV heads one GPU holds; fewer heads than GPUs are replicated."""
        return max(self.num_kv_heads // num_gpus, 1) if self.num_kv_heads else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """The feed-forward network of a layer: dense, a mixture of experts, or both."""

    size: int = 0
    """Of the dense network, which may be the experts that all tokens share; 0: none."""
    matrices: tuple[Matrix, ...] = ()
    """Of the dense network."""
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    expert_matrices: tuple[Matrix, ...] = ()
    """Of one expert."""
    num_other_parameters: int = 0
    """In 16 bits: routers, gates."""

    @property
    def expert_parameters(self) -> int:
        """Count the weights of one expert."""
        return sum([matrix.num_parameters for matrix in self.expert_matrices])


class Layer(NamedTuple):
    """One layer, or several that are alike."""

    mixers: tuple[Mixer, ...]
    """Two are a state and attention in parallel, or attention twice, one after the other."""
    feed_forward: FeedForward | None
