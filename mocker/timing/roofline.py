"""Step times from first principles: a model's shape, a GPU's measured efficiencies, an engine's host times.

One step of a dense decoder on n GPUs, with T tokens in it:

    step = max(host, GPU) with asynchronous scheduling, else host + GPU
    GPU  = layers * (gemm + attention + communication + elementwise) + head

    gemm          ((2 T W / (P ec))^p + ((W w + activations) / (BW em))^p)^(1/p) + c for each matrix
    attention     4 H d pairs / (P ef) + KV bytes / (BW ekv) + cb B Kv + ca
    communication 2 all-reduces of T h values: a + b n + 2 (n-1)/n bytes / link
    elementwise   ce + T activation bytes / (0.6 BW)
    head          the last hidden state of S sequences times the vocabulary

It is affine in the KV tokens that a batch reads, or constant until the GPU's time exceeds the host's, so a batch that
only decodes keeps leaping.
"""

from collections.abc import Sequence
from typing import NamedTuple

from mocker.timing.gpu import Decode, EngineTimes, Gpu, over_link
from mocker.timing.kernels import HALF, AllReduce, ExpertLayer, Head, Layers, Matrices, Rate
from mocker.timing.model import FOREVER, Prefill, Ramp
from mocker.timing.model_shape import BYTES, ModelShape

ELEMENTWISE_EFFICIENCY = 0.6
HEAD_EFFICIENCY = 0.75
MLA_EFFICIENCY = 0.5


class Roofline:
    """Step times of one model on one kind of GPU."""

    def __init__(self, coefficients: "Coefficients") -> None:
        self._layers, self._attention = coefficients.layers, coefficients.attention
        self._head, self._host = coefficients.head, coefficients.host
        self.lead_s = coefficients.host.least_s
        # Values that depend only on a whole number are computed once.
        self._linear: dict[int, float] = {}
        self._heads: dict[int, float] = {}
        self._decodes: dict[int, float] = {}

    def mixed(self, prefill: Prefill, num_decodes: int, num_kv_tokens: int) -> float:
        """Weights are read once for all tokens of the step."""
        attention, host = self._attention, self._host
        num_tokens, num_context_tokens, num_pairs, num_prefills = prefill
        sequences = num_prefills + num_decodes
        all_tokens = num_tokens + num_decodes
        kernels = (
            (self._linear.get(all_tokens) or self._tokens_s(all_tokens))
            + (self._heads.get(sequences) or self._head_s(sequences))
            + attention.pair_s * (num_pairs + attention.pad * (num_tokens + num_context_tokens))
            + attention.mixed_kv_s * num_kv_tokens
            + (attention.mixed_row_s + attention.tile_s * num_tokens / num_prefills) * num_decodes
        )
        least = host.least_mixed_s + sequences * host.least_sequence_s
        if kernels < least:
            kernels = least
        return kernels + host.step_s + sequences * host.sequence_s

    def decode(self, num_sequences: int, num_kv_tokens: int) -> Ramp:
        """Affine in the KV tokens, which grow by one for each sequence and step."""
        fixed = self._decodes.get(num_sequences)
        if fixed is None:
            fixed = self._tokens_s(num_sequences) + self._head_s(num_sequences) + self._host.step_s
            fixed += num_sequences * (self._attention.row_s + self._host.sequence_s)
            self._decodes[num_sequences] = fixed
        kv_s, host = self._attention.kv_s, self._host
        first, slope = fixed + kv_s * num_kv_tokens, kv_s * num_sequences
        least = host.least_s + num_sequences * host.least_sequence_s
        if first < least:
            return Ramp(least, num_steps=int((least - first) / slope) + 1 if slope else FOREVER)
        return Ramp(first, slope)

    def _tokens_s(self, num_tokens: int) -> float:
        """Compute and cache the time of all kernels that depend only on the number of tokens (s)."""
        found = self._linear[num_tokens] = self._layers.seconds(num_tokens)
        return found

    def _head_s(self, num_sequences: int) -> float:
        """Compute and cache the time to turn hidden states into tokens (s)."""
        found = self._heads[num_sequences] = self._head.seconds(num_sequences)
        return found


class Attention(NamedTuple):
    """Times of attention in all layers, scaled (s)."""

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


class Coefficients(NamedTuple):
    """A model on one kind of GPU, as `Roofline` adds it up."""

    layers: Layers
    attention: Attention
    head: Head
    host: Host


class Parts(NamedTuple):
    """A model on GPUs: each GPU's part of it, and the types."""

    shape: ModelShape
    gpu: Gpu
    engine: EngineTimes
    num_gpus: int
    weights: str
    compute: str
    """The type in which the GPU computes."""
    kv_dtype: str
    async_scheduling: bool


def coefficients(
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
    async_scheduling: bool = True,
) -> Coefficients:
    """Compute the parts of a model's step times on a GPU.

    Raises:
        ValueError: the GPU does not support these weights, or was not measured with this many others.
    """
    weights = weights or shape.weights
    compute = _compute_type(shape, gpu, weights)
    parts = Parts(shape, gpu, engine, tensor_parallel_size, weights, compute, kv_dtype, async_scheduling)
    reduce = _all_reduce(parts, tensor_parallel_size, link_gbps)
    if tensor_parallel_size > 1 and not reduce.measured:
        raise ValueError(
            f"tensor_parallel_size {tensor_parallel_size} was not measured on {gpu.name}; "
            f"expected 1 or one of {sorted(gpu.all_reduce)}"
        )
    exchange = _all_reduce(parts, expert_parallel_size if attention_ranks > 1 else 1, link_gbps)
    experts = _experts(parts, expert_parallel_size, attention_ranks, exchange)
    return Coefficients(_layers(parts, reduce, experts), _attention(parts), _head(parts), _host(parts))


def _compute_type(shape: ModelShape, gpu: Gpu, weights: str) -> str:
    if weights == "int4" or (shape.num_experts and weights == "fp4" and "fp4" not in gpu.gemm):
        return "bfloat16"  # unpacked on the way
    if weights not in gpu.gemm:
        raise ValueError(f"{gpu.name} does not support {weights} weights; expected one of {', '.join(gpu.gemm)}")
    return weights


def _layers(parts: Parts, reduce: AllReduce, experts: ExpertLayer | None) -> Layers:
    shape, gpu, engine, n = parts.shape, parts.gpu, parts.engine, parts.num_gpus
    return Layers(
        scale=engine.scale,
        num_layers=shape.num_layers,
        projections=_matrices(parts, shape.projections(n)),
        attention_s=_decode_fit(parts).launch_s,
        elementwise_s=engine.layer_s,
        elementwise=8 * shape.hidden_size + 3 * shape.ffn_size / n,
        elementwise_bandwidth=gpu.bandwidth * ELEMENTWISE_EFFICIENCY,
        reduce=reduce,
        num_dense=shape.num_dense_layers,
        ffn=_ffn(parts, shape.ffn_size),
        experts=experts,
        num_windowed=shape.num_layers - shape.num_full_attention_layers,
        window=shape.sliding_window,
        window_kv_s=_kv_s(parts),
    )


def _ffn(parts: Parts, size: int) -> Matrices:
    hidden, width = parts.shape.hidden_size, size / parts.num_gpus
    return _matrices(parts, [(hidden, 2 * size / parts.num_gpus), (width, hidden)])


def _matrices(parts: Parts, matrices: Sequence[tuple[float, float]]) -> Matrices:
    gpu, fit = parts.gpu, parts.gpu.gemm[parts.compute]
    weights = sum([a * b for a, b in matrices], 0.0)
    inputs, outputs = sum([a for a, _ in matrices], 0.0), sum([b for _, b in matrices], 0.0)
    return Matrices(
        rate=Rate(gpu.flops[parts.compute] * fit.compute, gpu.bandwidth * fit.memory, fit.sharpness),
        weights=weights,
        size=weights * BYTES[parts.weights],
        moved=inputs * BYTES[parts.compute] + outputs * HALF,
        inputs=inputs,
        quantised=HALF + BYTES[parts.compute],
        quantise=(fit.quantise, parts.engine.quantise),
        bandwidth=gpu.bandwidth,
        launch_s=len(matrices) * fit.launch_s,
    )


def _all_reduce(parts: Parts, num_gpus: int, link_gbps: float | None) -> AllReduce:
    measured = parts.gpu.all_reduce.get(num_gpus, [])
    if measured and link_gbps is not None:
        measured = over_link(measured, num_gpus, link_gbps * 1e9)
    return AllReduce(
        measured=measured,
        token_bytes=parts.shape.hidden_size * HALF,
        num_gpus=num_gpus,
        fused_s=parts.engine.fused_s,
        fused_bytes=parts.engine.fused_bytes.get(str(num_gpus), 0.0),
    )


def _experts(parts: Parts, expert_parallel_size: int, attention_ranks: int, exchange: AllReduce) -> ExpertLayer | None:
    shape, gpu = parts.shape, parts.gpu
    fit = gpu.experts.get(parts.weights) or gpu.experts.get("bfloat16") if shape.num_experts else None
    if fit is None:
        return None
    peak = gpu.flops.get(parts.weights) or gpu.flops["bfloat16"]
    return ExpertLayer(
        fit=fit,
        rate=Rate(peak * fit.compute, gpu.bandwidth * fit.memory, fit.sharpness),
        shape=shape,
        share=1 / expert_parallel_size,
        weights=3 * shape.hidden_size * shape.expert_size / (parts.num_gpus if expert_parallel_size == 1 else 1),
        weight_bytes=BYTES[parts.weights],
        bandwidth=gpu.bandwidth,
        shared=_ffn(parts, shape.shared_expert_size) if shape.shared_expert_size else None,
        attention_ranks=attention_ranks,
        exchange=exchange,
        exchange_s=parts.engine.exchange_s if exchange.measured else 0.0,
    )


def _attention(parts: Parts) -> Attention:
    shape, gpu, engine, n = parts.shape, parts.gpu, parts.engine, parts.num_gpus
    full, row_s = shape.num_full_attention_layers, _decode_fit(parts).row_s
    head_dim = shape.nope_head_dim + shape.rope_head_dim if shape.is_mla else shape.head_dim
    pair_s = 4 * shape.num_heads / n * head_dim / (gpu.flops["bfloat16"] * gpu.prefill)
    kv_s = full * _kv_s(parts) * engine.scale
    rows = shape.num_layers * engine.scale * (1 if shape.is_mla else shape.kv_heads(n))
    return Attention(
        pair_s=full * pair_s * engine.scale,
        pad=gpu.prefill_pad,
        kv_s=kv_s,
        mixed_kv_s=kv_s * max(1.0, gpu.mixed_decode_slowdown * shape.num_heads / shape.num_kv_heads),
        row_s=rows * row_s,
        mixed_row_s=rows * max(row_s, gpu.mixed_row_s),
        tile_s=full * engine.scale * shape.num_heads / n * gpu.mixed_tile_s,
    )


def _kv_s(parts: Parts) -> float:
    """Return the time to read the KV of one token in one layer (s)."""
    shape, gpu, n = parts.shape, parts.gpu, parts.num_gpus
    kv_s = shape.kv_values(n) * BYTES[parts.kv_dtype] / (gpu.bandwidth * _decode_fit(parts).memory)
    if not shape.is_mla:
        return kv_s
    # Every head works on the whole compressed vector.
    flops = 2 * shape.num_heads / n * (2 * shape.kv_lora_rank + shape.rope_head_dim)
    return max(kv_s, flops / (gpu.flops["bfloat16"] * MLA_EFFICIENCY))


def _decode_fit(parts: Parts) -> Decode:
    return parts.gpu.decode.get(parts.kv_dtype) or parts.gpu.decode["bfloat16"]


def _head(parts: Parts) -> Head:
    shape, gpu = parts.shape, parts.gpu
    rate = Rate(gpu.flops["bfloat16"] * HEAD_EFFICIENCY, gpu.bandwidth * gpu.gemm["bfloat16"].memory, 2.0)
    return Head(parts.engine.scale, rate, shape.hidden_size * shape.vocab_size / parts.num_gpus)


def _host(parts: Parts) -> Host:
    engine = parts.engine
    launches_s = parts.shape.num_layers * engine.launch_layer_s
    if parts.async_scheduling:
        return Host(0.0, 0.0, engine.step_s, engine.step_s + launches_s, engine.sequence_s)
    return Host(engine.step_s, engine.sequence_s, 0.0, launches_s, 0.0)
