"""Step times from first principles: a model's shape, a GPU's measured efficiencies, an engine's host times.

One step of a dense decoder on n GPUs, with T tokens in it (STUDY-simulators.md, 4.1):

    step = host + layers * (gemm + attention + communication + elementwise) + head

    gemm          ((2 T W / (P ec))^p + ((W w + activations) / (BW em))^p)^(1/p) + c for each matrix
    attention     4 H d pairs / (P ef) + KV bytes / (BW ekv) + cb B Kv + ca
    communication 2 all-reduces of T h values: a + b n + 2 (n-1)/n bytes / link
    elementwise   ce + T activation bytes / (0.6 BW)
    head          the last hidden state of S sequences times the vocabulary

It is affine in the KV tokens that a batch reads, so a batch that only decodes keeps leaping.
"""

from bisect import bisect_right
from collections.abc import Sequence
from math import log

from mocker.timing.gpu import AllReduces, EngineTimes, Gpu, over_link
from mocker.timing.model import Prefill, Ramp
from mocker.timing.model_shape import BYTES, ModelShape

ELEMENTWISE_EFFICIENCY = 0.6
HEAD_EFFICIENCY = 0.75
MLA_EFFICIENCY = 0.5
HALF = 2.0
"""Bytes of an activation."""


class Roofline:
    """Step times of one model on one kind of GPU."""

    def __init__(
        self,
        shape: ModelShape,
        gpu: Gpu,
        engine: EngineTimes,
        *,
        tensor_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        attention_ranks: int = 1,
        weights: str = "",
        kv_dtype: str = "bfloat16",
        link_gbps: float | None = None,
    ) -> None:
        """Prepare the coefficients.

        Raises:
            ValueError: the GPU cannot compute with these weights.
        """
        weights = weights or shape.weights
        compute = weights
        if weights == "int4" or (shape.num_experts and weights == "fp4" and "fp4" not in gpu.gemm):
            compute = "bfloat16"  # unpacked on the way
        if compute not in gpu.gemm:
            raise ValueError(
                f"{gpu.name} does not compute with {weights} weights; expected one of {', '.join(gpu.gemm)}"
            )
        n = self._n = tensor_parallel_size
        self._gpu, self._engine, self._shape = gpu, engine, shape
        self._gemm = gpu.gemm[compute]
        self._peak = gpu.flops[compute]
        self._weight_bytes, self._input_bytes = BYTES[weights], BYTES[compute]
        self._matrices = shape.projections(n)
        self._ffn = [(shape.hidden_size, 2 * shape.ffn_size / n), (shape.ffn_size / n, shape.hidden_size)]
        self._shared = [
            (shape.hidden_size, 2 * shape.shared_expert_size / n),
            (shape.shared_expert_size / n, shape.hidden_size),
        ]
        self._num_ffn = shape.num_dense_layers
        self._prepare_experts(weights, expert_parallel_size, attention_ranks, link_gbps)
        half = gpu.flops["bfloat16"]
        head_dim = shape.nope_head_dim + shape.rope_head_dim if shape.is_mla else shape.head_dim
        pair_s = 4 * shape.num_heads / n * head_dim / (half * gpu.prefill)
        decode = gpu.decode.get(kv_dtype) or gpu.decode["bfloat16"]
        kv_s = shape.kv_values(n) * BYTES[kv_dtype] / (gpu.bandwidth * decode.memory)
        if shape.is_mla:  # every head works on the whole compressed vector
            flops = 2 * shape.num_heads / n * (2 * shape.kv_lora_rank + shape.rope_head_dim)
            kv_s = max(kv_s, flops / (half * MLA_EFFICIENCY))
        beside_prefill = max(1.0, gpu.mixed_decode_slowdown * shape.num_heads / shape.num_kv_heads)
        rows = shape.num_layers * engine.scale * (1 if shape.is_mla else shape.kv_heads(n))
        full = self._full = shape.num_full_attention_layers
        self._layer_kv_s = kv_s
        # From here on for all layers, scaled: what a step adds up.
        self._pair_s = full * pair_s * engine.scale
        self._kv_s = full * kv_s * engine.scale
        self._mixed_kv_s = self._kv_s * beside_prefill
        self._row_s = rows * decode.row_s
        self._mixed_row_s = rows * max(decode.row_s, gpu.mixed_row_s)
        self._tile_s = full * engine.scale * shape.num_heads / n * gpu.mixed_tile_s
        self._least_s = shape.num_layers * engine.prefill_least_layer_s
        self._mixed_s = shape.num_layers * engine.prefill_layer_s + engine.step_s
        self._attention_s = decode.launch_s
        self._window = shape.sliding_window
        self._reduces = self._all_reduces(n, link_gbps)
        if n > 1 and not self._reduces:
            raise ValueError(
                f"tensor_parallel_size {n} was not measured on {gpu.name}; expected 1 or one of {sorted(gpu.all_reduce)}"
            )
        self._pad = gpu.prefill_pad
        self._sequence_s = engine.sequence_s
        # What depends on a whole number alone is found once.
        self._linear: dict[int, float] = {}
        self._heads: dict[int, float] = {}
        self._decodes: dict[int, float] = {}

    def _all_reduces(self, num_gpus: int, link_gbps: float | None) -> AllReduces:
        measured = self._gpu.all_reduce.get(num_gpus, [])
        return over_link(measured, num_gpus, link_gbps * 1e9) if measured and link_gbps is not None else measured

    def _prepare_experts(
        self, weights: str, expert_parallel_size: int, attention_ranks: int, link_gbps: float | None
    ) -> None:
        shape, gpu = self._shape, self._gpu
        self._experts = gpu.experts.get(weights) or gpu.experts.get("bfloat16") if shape.num_experts else None
        self._attention_ranks = attention_ranks
        self._expert_share = 1 / expert_parallel_size
        self._expert_weights = 3 * shape.hidden_size * shape.expert_size / (self._n if expert_parallel_size == 1 else 1)
        self._expert_bytes = BYTES[weights]
        # Ranks that attend by themselves send each other their tokens and take back what the experts made of them,
        # which moves what one all-reduce does.
        self._exchange = self._all_reduces(expert_parallel_size, link_gbps) if attention_ranks > 1 else []
        self._expert_peak = gpu.flops.get(weights) or gpu.flops["bfloat16"]

    def mixed(self, prefill: Prefill, num_decodes: int, num_kv_tokens: int) -> float:
        """Weights are read once for all tokens of the step."""
        num_tokens, num_context_tokens, num_pairs, num_prefills = prefill
        sequences = num_prefills + num_decodes
        all_tokens = num_tokens + num_decodes
        kernels = (
            (self._linear.get(all_tokens) or self._tokens_s(all_tokens))
            + (self._heads.get(sequences) or self._head_s(sequences))
            + self._pair_s * (num_pairs + self._pad * (num_tokens + num_context_tokens))
            + self._mixed_kv_s * num_kv_tokens
            + (self._mixed_row_s + self._tile_s * num_tokens / num_prefills) * num_decodes
        )
        if kernels < self._least_s:
            kernels = self._least_s
        return kernels + self._mixed_s + sequences * self._sequence_s

    def decode(self, num_sequences: int, num_kv_tokens: int) -> Ramp:
        """Affine in the KV tokens, which grow by one for each sequence and step."""
        fixed = self._decodes.get(num_sequences)
        if fixed is None:
            fixed = self._tokens_s(num_sequences) + self._head_s(num_sequences) + self._engine.step_s
            fixed += num_sequences * (self._row_s + self._sequence_s)
            self._decodes[num_sequences] = fixed
        return Ramp(fixed + self._kv_s * num_kv_tokens, self._kv_s * num_sequences)

    def _tokens_s(self, num_tokens: int) -> float:
        """Find, and keep, the time of all kernels that depend on the number of tokens alone (s)."""
        shape = self._shape
        layer = self._matrices_s(self._matrices, num_tokens) + self._attention_s + self._elementwise_s(num_tokens)
        is_fused = num_tokens * shape.hidden_size * HALF <= self._engine.fused_bytes.get(str(self._n), 0.0)
        fused = self._engine.fused_all_reduce if is_fused else 1.0
        layer += 2 * fused * self._all_reduce_s(self._reduces, num_tokens)
        found = self._linear[num_tokens] = self._engine.scale * (
            shape.num_layers * layer
            + self._num_ffn * self._matrices_s(self._ffn, num_tokens)
            + (shape.num_layers - self._num_ffn) * self._experts_s(num_tokens)
            + (shape.num_layers - self._full) * self._window_s(num_tokens)
        )
        return found

    def _matrices_s(self, matrices: Sequence[tuple[float, float]], num_tokens: int) -> float:
        weights = inputs = outputs = 0.0
        for a, b in matrices:
            weights += a * b
            inputs += a
            outputs += b
        active = num_tokens * (inputs * self._input_bytes + outputs * HALF)
        quantised = num_tokens * inputs * (HALF + self._input_bytes)
        return (
            self._gemm_s(2 * num_tokens * weights, weights * self._weight_bytes + active)
            + quantised * self._gemm.quantise * self._engine.quantise / self._gpu.bandwidth
            + len(matrices) * self._gemm.launch_s
        )

    def _gemm_s(self, flops: float, size: float) -> float:
        gemm = self._gemm
        compute, memory = flops / (self._peak * gemm.compute), size / (self._gpu.bandwidth * gemm.memory)
        return float((compute**gemm.sharpness + memory**gemm.sharpness) ** (1 / gemm.sharpness))

    def _experts_s(self, num_tokens: int) -> float:
        """Return the time of one layer's routed and shared experts (s)."""
        shape, gpu, times = self._shape, self._gpu, self._experts
        if times is None:
            return 0.0
        tokens, share = num_tokens * self._attention_ranks, self._expert_share
        chosen = shape.experts_per_token / shape.num_experts
        active = shape.num_experts * share * (1 - (1 - chosen) ** (tokens * times.spread))
        routed = tokens * shape.experts_per_token * share
        rows = max(routed, times.pad * active)
        compute = 2 * rows * self._expert_weights / (self._expert_peak * times.compute)
        memory = active * self._expert_weights * self._expert_bytes / (gpu.bandwidth * times.memory)
        experts = (compute**times.sharpness + memory**times.sharpness) ** (1 / times.sharpness) + times.launch_s
        moved = routed * shape.hidden_size * HALF * times.passes / gpu.bandwidth
        shared = self._matrices_s(self._shared, num_tokens) if shape.shared_expert_size else 0.0
        exchanged = self._all_reduce_s(self._exchange, tokens) + (self._engine.exchange_s if self._exchange else 0.0)
        return float(experts + moved + shared + exchanged)

    def _window_s(self, num_tokens: int) -> float:
        return num_tokens * self._window * self._layer_kv_s

    def _elementwise_s(self, num_tokens: int) -> float:
        size = num_tokens * HALF * (8 * self._shape.hidden_size + 3 * self._shape.ffn_size / self._n)
        return self._engine.layer_s + size / (self._gpu.bandwidth * ELEMENTWISE_EFFICIENCY)

    def _all_reduce_s(self, measured: AllReduces, num_tokens: int) -> float:
        if not measured:
            return 0.0
        return _interpolate(measured, num_tokens * self._shape.hidden_size * HALF)

    def _head_s(self, num_sequences: int) -> float:
        """Find, and keep, the time to turn hidden states into tokens (s)."""
        weights = self._shape.hidden_size * self._shape.vocab_size / self._n
        compute = 2 * num_sequences * weights / (self._gpu.flops["bfloat16"] * HEAD_EFFICIENCY)
        memory = weights * HALF / (self._gpu.bandwidth * self._gpu.gemm["bfloat16"].memory)
        found = self._heads[num_sequences] = self._engine.scale * float((compute**2 + memory**2) ** 0.5)
        return found


def _interpolate(points: AllReduces, x: float) -> float:
    """Interpolate between points in order of x, straight in logarithms; beyond the last, in proportion."""
    if x >= points[-1][0]:
        return points[-1][1] * x / points[-1][0]
    if x <= points[0][0]:
        return points[0][1]
    place = bisect_right(points, (x, 0.0))
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    return float(y0 * (y1 / y0) ** (log(x / x0) / log(x1 / x0)))
