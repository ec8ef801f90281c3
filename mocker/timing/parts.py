"""The coefficients of a roofline: from a model's layers, a GPU's measured efficiencies and an engine's host times."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mocker.models.kv_cache import INDEX_BYTES, KV_BYTES
from mocker.models.layers import FeedForward, Matrix, Mixer, WeightType
from mocker.models.shape import ModelShape
from mocker.models.weight_types import MXFP4
from mocker.timing.gpu import Decode, EngineTimes, Experts, Gemm, Gpu, PrefillAttention, over_link
from mocker.timing.kernels import HALF, AllReduce, ExpertLayer, Head, KernelPart, Matrices, Rate
from mocker.timing.roofline import Attention, Coefficients, Host, Reach
from mocker.timing.sampling import SAMPLERS, Sampler, Sampling

BLOCKS = "fp8_block"
OWN_CHOICE = {("vllm", "int4"): "marlin"}
"""The names of kernels that engines choose themselves for experts with such weights, where a GPU has a row of them."""
ELEMENTWISE_EFFICIENCY = 0.6
HEAD_EFFICIENCY = 0.75
SQUARES_BYTES = 8.0
"""A token's sums of squares of queries and of keys, in 32 bits."""
STATE_EFFICIENCY = 0.5
"""Of updating a state: the share of the bandwidth in a decode, and of the 16-bit peak in a prefill. It was not measured."""


def coefficients(
    shape: ModelShape,
    gpu: Gpu,
    engine: EngineTimes,
    *,
    tensor_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    attention_ranks: int = 1,
    kv_dtype: str = "bfloat16",
    link_gbps: float | None = None,
    async_scheduling: bool = True,
    sampling: Sampling = "greedy",
    graph_tokens: int = 0,
    moe_backend: str = "auto",
) -> Coefficients:
    """Compute the parts of a model's step times on a GPU.

    Raises:
        ValueError: the GPU does not support these weights, or was not measured with this many others or with these
            kernels of experts.
    """
    if moe_backend != "auto" and not shape.num_experts:
        raise ValueError(f"moe_backend is {moe_backend}, but the model has no routed experts; expected auto")
    device = Device(
        gpu,
        engine,
        tensor_parallel_size,
        kv_dtype,
        link_gbps,
        is_mixture=bool(shape.num_experts),
        has_blocks=bool(shape.weight_block),
        moe_backend=moe_backend,
    )
    reduce = device.all_reduce(shape.hidden_size, tensor_parallel_size)
    if tensor_parallel_size > 1 and not reduce.measured:
        raise ValueError(
            f"tensor_parallel_size {tensor_parallel_size} was not measured on {gpu.name}; "
            f"expected 1 or one of {sorted(gpu.all_reduce)}"
        )
    exchange = device.all_reduce(shape.hidden_size, expert_parallel_size if attention_ranks > 1 else 1)
    parts = [_mixer(device, mixer, count, shape.hidden_size, reduce) for mixer, count in shape.mixers]
    for network, count in shape.feed_forwards:
        experts = _experts(device, network, expert_parallel_size, attention_ranks, exchange)
        parts.append(_feed_forward(device, network, count, shape.hidden_size, reduce, experts))
    reaches = _reaches(device, shape)
    everything = reaches.pop(0, Reach())
    return Coefficients(
        scale=engine.scale,
        parts=parts,
        attention=_attention(device, shape, everything),
        reaches=[reaches[window] for window in sorted(reaches)],
        head=_head(device, shape, SAMPLERS[sampling]),
        host=_host(device, shape, async_scheduling, graph_tokens),
    )


def drafter_coefficients(
    shape: ModelShape,
    gpu: Gpu,
    engine: EngineTimes,
    *,
    tensor_parallel_size: int,
    expert_parallel_size: int,
    kv_dtype: str,
    link_gbps: float | None,
    moe_backend: str = "auto",
) -> Coefficients:
    """Compute the parts of the times of a drafter, whose host work is hidden: a model, or one layer with a head.

    Raises:
        ValueError: as for `coefficients`.
    """
    found = coefficients(
        shape,
        gpu,
        engine,
        tensor_parallel_size=tensor_parallel_size,
        expert_parallel_size=expert_parallel_size,
        kv_dtype=kv_dtype,
        link_gbps=link_gbps,
        moe_backend=moe_backend if shape.num_experts else "auto",
    )
    return found._replace(host=Host(0.0, 0.0, 0.0, 0.0, 0.0))


def moe_backends_of(shape: ModelShape, gpu: Gpu) -> set[str]:
    """Return the `moe_backend` that a model may have on a GPU: auto, and those that were measured with all its experts."""
    experts = [network.expert_matrices[0] for network, _ in shape.feed_forwards if network.num_experts]
    return set.intersection(*[set(_kernels(gpu, matrix.weight)) for matrix in experts]) if experts else {"auto"}


def _kernels(gpu: Gpu, weight: WeightType) -> dict[str, Experts]:
    """Return the kernels that route tokens to experts with such weights, by `moe_backend`."""
    kernels, kind = gpu.experts, _kind(gpu, weight)
    found = {"auto": kernels.get(kind) or kernels["bfloat16"]}
    if kind in kernels and (chosen := OWN_CHOICE.get((gpu.engine, kind))):
        found[chosen] = kernels[kind]
    return found | {name.partition("/")[2]: kernel for name, kernel in kernels.items() if name.startswith(f"{kind}/")}


def _kind(gpu: Gpu, weight: WeightType) -> str:
    """Return what such weights of experts are called among a GPU's kernels."""
    return "mxfp4" if weight == MXFP4 and "mxfp4" in gpu.experts else weight.name


def layer_with_head(shape: ModelShape) -> ModelShape:
    """Return the last layer of a model that has attention, with the model's head: about what EAGLE and MTP compute."""
    layer = next(layer for layer, _ in reversed(shape.layers) if any(mixer.num_heads for mixer in layer.mixers))
    return replace(shape, layers=((layer, 1),), kinds=(("drafter", 1),), num_other_parameters=0)


@dataclass(frozen=True, slots=True)
class Device:
    """One of the GPUs that share a model, and the engine on it."""

    gpu: Gpu
    engine: EngineTimes
    num_gpus: int
    kv_dtype: str
    link_gbps: float | None
    is_mixture: bool
    has_blocks: bool
    """Whether weights of 8 bits are scaled in blocks."""
    moe_backend: str = "auto"

    def decode(self, mixer: Mixer) -> Decode:
        """Return the efficiency of reading KV in a decode."""
        kernels = (mixer.latent_flops and self.gpu.latent_decode) or self.gpu.decode
        return kernels.get(self.kv_dtype) or kernels["bfloat16"]

    def prefill(self, mixer: Mixer) -> PrefillAttention:
        """Return the efficiency of attention over prompts."""
        return self.gpu.latent_prefill if mixer.latent_flops else self.gpu.prefill

    def gemm(self, weight: WeightType) -> Gemm:
        """Return the efficiency of multiplying by such weights."""
        return self.gpu.gemm[BLOCKS if self._in_blocks(weight) else self.compute_type(weight)]

    def experts(self, weight: WeightType) -> Experts:
        """Return the kernel that routes tokens to experts with such weights.

        Raises:
            ValueError: the one that was asked for was not measured.
        """
        gpu, found = self.gpu, _kernels(self.gpu, weight)
        if self.moe_backend not in found:
            raise ValueError(
                f"moe_backend {self.moe_backend} was not measured for {gpu.engine} on {gpu.name} with {_kind(gpu, weight)} "
                f"experts; expected {' or '.join(found)}"
            )
        return found[self.moe_backend]

    def compute_type(self, weight: WeightType) -> str:
        """Return the type in which the GPU multiplies by such weights.

        Raises:
            ValueError: it does not support them.
        """
        if weight.compute == "fp4" and self.is_mixture and "fp4" not in self.gpu.gemm:
            return "bfloat16"  # unpacked on the way
        if weight.compute not in self.gpu.gemm:
            raise ValueError(
                f"{self.gpu.name} does not support {weight.compute} weights; "
                f"expected one of {', '.join([name for name in self.gpu.gemm if name != BLOCKS])}"
            )
        return weight.compute

    def all_reduce(self, hidden_size: int, num_gpus: int) -> AllReduce:
        """Return a sum over GPUs."""
        measured = self.gpu.all_reduce.get(num_gpus, [])
        if measured and self.link_gbps is not None:
            measured = over_link(measured, num_gpus, self.link_gbps * 1e9)
        return AllReduce(
            measured=measured,
            token_bytes=hidden_size * HALF,
            num_gpus=num_gpus,
            fused_s=self.engine.fused_s,
            fused_bytes=self.engine.fused_bytes.get(str(num_gpus), 0.0),
        )

    def matrices(self, matrices: Iterable[Matrix]) -> tuple[Matrices, ...]:
        """Return the times of a layer's matrices, those of one type together."""
        by_type: dict[WeightType, list[Matrix]] = {}
        for matrix in matrices:
            by_type.setdefault(matrix.weight, []).append(matrix)
        return tuple([self._together(weight, some) for weight, some in by_type.items()])

    def _in_blocks(self, weight: WeightType) -> bool:
        return self.has_blocks and weight.name == "fp8" and BLOCKS in self.gpu.gemm

    def _together(self, weight: WeightType, matrices: Sequence[Matrix]) -> Matrices:
        gpu, compute = self.gpu, self.compute_type(weight)
        fit, sizes = self.gemm(weight), [matrix.on_gpu(self.num_gpus) for matrix in matrices]
        weights = sum([inputs * outputs for inputs, outputs in sizes], 0.0)
        inputs, outputs = sum([a for a, _ in sizes], 0.0), sum([b for _, b in sizes], 0.0)
        width = 1.0 if compute == "fp8" else HALF if compute == "bfloat16" else weight.bytes
        return Matrices(
            rate=Rate(gpu.flops[compute] * fit.compute, gpu.bandwidth * fit.memory, fit.sharpness),
            weights=weights,
            size=weights * weight.bytes,
            moved=inputs * width + outputs * HALF,
            inputs=inputs,
            quantised=HALF + width,
            quantise=(fit.quantise, 1.0 if self._in_blocks(weight) else self.engine.quantise.get(compute, 0.0)),
            bandwidth=gpu.bandwidth,
            launch_s=len(matrices) * fit.launch_s,
        )


def _mixer(device: Device, mixer: Mixer, count: int, hidden_size: int, reduce: AllReduce) -> KernelPart:
    gpu = device.gpu
    sums: tuple[AllReduce, ...] = (reduce,)
    if mixer.is_normed_across and device.num_gpus > 1:
        sums += (replace(reduce, token_bytes=SQUARES_BYTES, fused_bytes=0.0),)
    return KernelPart(
        count=count,
        matrices=device.matrices(mixer.matrices),
        fixed_s=device.decode(mixer).launch_s + device.engine.layer_s / 2,
        elementwise=4 * hidden_size,
        elementwise_bandwidth=gpu.bandwidth * ELEMENTWISE_EFFICIENCY,
        sums=sums,
        token_s=mixer.state_flops / device.num_gpus / (gpu.flops["bfloat16"] * STATE_EFFICIENCY),
    )


def _feed_forward(
    device: Device, network: FeedForward, count: int, hidden_size: int, reduce: AllReduce, experts: ExpertLayer | None
) -> KernelPart:
    activated = network.size + network.experts_per_token * network.expert_size
    return KernelPart(
        count=count,
        matrices=device.matrices(network.matrices),
        fixed_s=device.engine.layer_s / 2,
        elementwise=4 * hidden_size + 3 * activated / device.num_gpus,
        elementwise_bandwidth=device.gpu.bandwidth * ELEMENTWISE_EFFICIENCY,
        sums=(reduce,),
        experts=experts,
    )


def _experts(
    device: Device, network: FeedForward, expert_parallel_size: int, attention_ranks: int, exchange: AllReduce
) -> ExpertLayer | None:
    if not network.num_experts:
        return None
    gpu, weight = device.gpu, network.expert_matrices[0].weight
    device.compute_type(weight)
    fit = device.experts(weight)
    peak = gpu.flops.get(weight.name) or gpu.flops["bfloat16"]
    return ExpertLayer(
        fit=fit,
        rate=Rate(peak * fit.compute, gpu.bandwidth * fit.memory, fit.sharpness),
        num_experts=network.num_experts,
        experts_per_token=network.experts_per_token,
        hidden_size=network.expert_matrices[0].inputs.size,
        share=1 / expert_parallel_size,
        weights=network.expert_parameters / (device.num_gpus if expert_parallel_size == 1 else 1),
        weight_bytes=weight.bytes,
        bandwidth=gpu.bandwidth,
        attention_ranks=attention_ranks,
        exchange=exchange,
        exchange_s=device.engine.exchange_s if exchange.measured else 0.0,
    )


def _attention(device: Device, shape: ModelShape, everything: Reach) -> Attention:
    gpu, scale, n = device.gpu, device.engine.scale, device.num_gpus
    rows_s = mixed_rows_s = tile = 0.0
    for mixer, count in shape.mixers:
        rows, row_s = count * (1 if mixer.latent_flops else mixer.kv_heads(n)), device.decode(mixer).row_s
        state_s = count * 2 * mixer.state_bytes / n / (gpu.bandwidth * STATE_EFFICIENCY)
        rows_s += rows * row_s + state_s
        mixed_rows_s += rows * max(row_s, gpu.mixed_row_s) + state_s
        tile += count * mixer.num_heads / n
    return Attention(
        pair_s=everything.pair_s,
        pad=max([device.prefill(mixer).pad for mixer, _ in shape.mixers if mixer.num_heads], default=0.0),
        kv_s=everything.kv_s,
        mixed_kv_s=everything.mixed_kv_s,
        row_s=scale * rows_s,
        mixed_row_s=scale * mixed_rows_s,
        tile_s=scale * tile * gpu.mixed_tile_s,
    )


def _reaches(device: Device, shape: ModelShape) -> dict[int, Reach]:
    """Return what attention takes in all layers, by the tokens that they see (0: all)."""
    found: dict[int, Reach] = {}
    for mixer, count in shape.mixers:
        for seen in _seen(device, mixer):
            before, times = found.get(seen.window, Reach()), count * device.engine.scale
            found[seen.window] = Reach(
                seen.window,
                before.pair_s + times * seen.pair_s,
                before.kv_s + times * seen.kv_s,
                before.mixed_kv_s + times * seen.mixed_kv_s,
            )
    return found


def _seen(device: Device, mixer: Mixer) -> list[Reach]:
    """Return what one layer's attention takes: of all tokens, of a window, or of what an index picks."""
    if not mixer.num_heads:
        return []
    heads, share = mixer.num_heads / device.num_gpus, 1 / mixer.compression
    flops = heads * ((mixer.latent_flops if mixer.index is not None else 0) or 4 * mixer.head_dim)
    values = mixer.kv_heads(device.num_gpus) * mixer.kv_width * KV_BYTES[device.kv_dtype]
    near = _reach(device, mixer, mixer.window, flops, values, heads * mixer.latent_flops)
    if mixer.compression == 1 and mixer.index is None:
        return [near]
    index = mixer.index
    picked = index.num_picked * mixer.compression if index is not None else 0
    far = _reach(device, mixer, picked, flops * share, values * share, heads * mixer.latent_flops * share)
    seen = [near, far] if mixer.compression > 1 else [far]
    if index is not None and index.num_heads:
        score = 2 * index.num_heads * index.head_dim * share
        seen.append(_reach(device, mixer, 0, score, index.head_dim * INDEX_BYTES * share, score))
    return seen


def _reach(device: Device, mixer: Mixer, window: int, flops: float, values: float, decode_flops: float) -> Reach:
    """Return the time for each pair of a prompt's token and a key, and to decode with each token of context."""
    gpu, decode = device.gpu, device.decode(mixer)
    peak = gpu.flops["bfloat16"]
    kv_s = max(values / (gpu.bandwidth * decode.memory), decode_flops / (peak * decode.compute))
    shared = 1.0 if mixer.latent_flops else mixer.num_heads / mixer.num_kv_heads
    return Reach(
        window,
        flops / (peak * device.prefill(mixer).compute),
        kv_s,
        kv_s * max(1.0, gpu.mixed_decode_slowdown * shared),
    )


def _head(device: Device, shape: ModelShape, sampler: Sampler) -> Head:
    gpu = device.gpu
    rate = Rate(gpu.flops["bfloat16"] * HEAD_EFFICIENCY, gpu.bandwidth * gpu.gemm["bfloat16"].memory, 2.0)
    return Head(
        scale=device.engine.scale,
        rate=rate,
        weights=shape.hidden_size * shape.vocab_size / device.num_gpus,
        launch_s=sampler.launch_s,
        sample_s=sampler.logit_s * shape.vocab_size,
    )


def _host(device: Device, shape: ModelShape, async_scheduling: bool, graph_tokens: int) -> Host:
    engine = device.engine
    launches_s = 0.0
    for mixer, count in shape.mixers:
        launches_s += count * (engine.launch_layer_s / 2 + (engine.launch_latent_s if mixer.latent_flops else 0.0))
    for network, count in shape.feed_forwards:
        launches_s += count * (engine.launch_layer_s / 2 + (engine.launch_experts_s if network.num_experts else 0.0))
    if async_scheduling:
        return Host(0.0, 0.0, engine.step_s, engine.step_s + launches_s, engine.sequence_s, graph_tokens)
    return Host(engine.step_s, engine.sequence_s, 0.0, launches_s, 0.0, graph_tokens)
