"""The properties of a GPU and its engine that determine step times: peaks, measured efficiencies, host times."""

from dataclasses import dataclass, field
from typing import NamedTuple


class Gemm(NamedTuple):
    """t = ((flops / (peak * compute))^sharpness + (bytes / (bandwidth * memory))^sharpness)^(1/sharpness) + launch_s."""

    compute: float
    memory: float
    launch_s: float
    sharpness: float
    quantise: float
    """Passes over the inputs at full bandwidth to quantise them, if the engine does not fuse that."""


class Experts(NamedTuple):
    """A routed layer: like `Gemm` over the experts that any token chose, each padded to `pad` rows, plus moving the rows."""

    compute: float
    memory: float
    launch_s: float
    sharpness: float
    spread: float
    """How much faster experts are reached than by T independent draws (1: as fast)."""
    pad: float
    passes: float
    """Passes over the routed activations at full bandwidth."""
    token_passes: float = 0.0
    """Passes over all tokens' activations, which every rank makes, whichever experts it has."""


class Decode(NamedTuple):
    """t = KV bytes / (bandwidth * memory) + row_s for every sequence and KV head; `launch_s` once a layer."""

    memory: float
    launch_s: float
    row_s: float
    compute: float = 0.5
    """Share of the 16-bit peak that latent attention reaches, if its operations take longer than its bytes."""


class PrefillAttention(NamedTuple):
    """t = 4 * heads * head_dim * (length^2 / 2 + pad * length) / (peak * compute) for each new prompt's attention."""

    compute: float
    pad: float
    """Tokens by which a prompt's attention is padded."""


AllReduces = list[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU: peaks from its data sheet (dense), efficiencies from measured kernels."""

    name: str
    memory: float
    """Bytes, as torch reports them."""
    bandwidth: float
    """Bytes/s."""
    flops: dict[str, float] = field(hash=False)
    """Peak flop/s by dtype."""
    gemm: dict[str, Gemm] = field(hash=False)
    experts: dict[str, Experts] = field(hash=False)
    decode: dict[str, Decode] = field(hash=False)
    prefill: PrefillAttention
    latent_decode: dict[str, Decode] = field(hash=False)
    """Of latent attention, by the type of the cache; empty: as other attention."""
    latent_prefill: PrefillAttention
    all_reduce: dict[int, AllReduces] = field(hash=False)
    """By number of GPUs: (bytes, seconds), in order."""
    architecture: str = ""
    engine: str = "vllm"
    """Whose kernels these are."""
    mixed_decode_slowdown: float = 0.0
    """Factor on reading a decode's KV next to a prefill, for each query head that shares a KV head (at least 1)."""
    mixed_row_s: float = 0.0
    """A sequence's and KV head's time next to a prefill, if it is longer."""
    mixed_tile_s: float = 0.0
    """For each decode, query head and token of the prefill: such kernels' grid is equally long for every sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimes:
    """The times that an engine adds to its kernels, and one scale for all of them."""

    step_s: float
    """Host time of a step: to schedule it, to prepare its inputs and to take its tokens."""
    sequence_s: float
    """The same for each sequence of a step."""
    layer_s: float
    """Small kernels of a layer: norms, rotation, cache writes."""
    launch_layer_s: float
    """Host time of a layer of a step with prefill, if that has no CUDA graph: its kernels are launched one by one."""
    launch_experts_s: float
    """The same, added for a layer with routed experts, which has several times as many kernels."""
    launch_latent_s: float
    """The same, added for latent attention, which computes keys and values of prompts before it attends to them."""
    request_s: float
    """Time between client and scheduler, both ways together."""
    prompt_token_s: float
    """The same for each prompt token: reading and tokenizing it."""
    quantise: dict[str, float] = field(hash=False)
    """Share of the inputs' quantisation that other kernels do not hide, by the type in which weights are multiplied."""
    exchange_s: float
    """Added in each layer whose experts are shared by ranks with separate attention: launches, agreeing on sizes."""
    fused_s: float
    """The least time of an all-reduce that is fused with the norm after it."""
    fused_bytes: dict[str, float] = field(hash=False)
    """Largest message that is fused, by number of GPUs."""
    scale: float
    """Factor on the time of kernels."""


def over_link(measured: AllReduces, num_gpus: int, bandwidth: float) -> AllReduces:
    """Return all-reduces over a link of another bandwidth (bytes/s): the least time + 2 (n-1)/n bytes / bandwidth."""
    least = measured[0][1]
    return [(size, least + 2 * (num_gpus - 1) / num_gpus * size / bandwidth) for size, _ in measured]
