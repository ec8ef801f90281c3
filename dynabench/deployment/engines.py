"""The simulated engines of a deployment, and whether a workload fits them."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynabench.deployment.description import OWN, Deployment, Pool
from dynabench.deployment.kv_store import KvStoreConfig, refuse_idle_store
from mocker import EngineConfig, SglangConfig, TrtllmConfig
from mocker.config import (
    flag_of,
    own_name,
    refuse_idle_decoding,
    refuse_idle_encoder,
    refuse_idle_hicache,
    refuse_idle_lora,
    refuse_idle_speculation,
)
from mocker.contract import KV_EVENTS_OF_RANKS, EngineSettings
from mocker.tiers.config import refuse_idle_tiers
from mocker.timing.choose import SimulatedEngine, resolve
from mocker.timing.groups import refuse_idle_retention
from serving.model.card import Role
from serving.model.context import refusal
from serving.router import wants_kv_events
from workloads import Workload, WorkloadError

SIZES = (
    "kv_offloading_size",
    "num_host_blocks",
    "enable_hierarchical_cache",
    "hicache_ratio",
    "hicache_size",
    "kv_disk_size",
    "kv_store_size",
)
"""Settings that create a KV tier."""

PARTS = {None: "an", "kv_producer": "a prefill", "kv_consumer": "a decode"}
"""Names of engines in messages."""


def check_one_model(deployment: Deployment) -> None:
    """Refuse a deployment of several models, because requests are sent to only one.

    Raises:
        ValueError: its pools serve several.
    """
    if len(deployment.models) > 1:
        raise ValueError(f"pools serve {', '.join(deployment.models)}; an experiment sends its requests to one model")


@dataclass(frozen=True, slots=True)
class SimulatedPool:
    """A pool for the simulation."""

    name: str
    role: Role
    engine: SimulatedEngine
    """The engine of each worker."""
    replicas: int
    """Initial number of workers."""
    gpus_per_worker: int
    startup_s: float
    """Mean time to start a worker (s)."""

    @property
    def gpus_per_rank(self) -> int:
        """GPUs of each engine of a worker."""
        return self.gpus_per_worker // self.engine.num_engines


def pools_of(deployment: Deployment) -> list[SimulatedPool]:
    """Return the pools of a deployment for the simulation.

    Raises:
        ValueError: a pool is not simulated, pools serve several models, or a setting cannot be used.
    """
    check_one_model(deployment)
    check_ranks(deployment)
    pools: list[SimulatedPool] = []
    for pool in deployment.pools:
        if pool.engine in OWN:
            raise ValueError(
                f"pools.{pool.name}: {pool.engine_name} is an engine of your own, whose steps are not known in advance; "
                "use run or rehearse, which call it, or simulate its step times: engine mocker with a timing_file"
            )
        if pool.engine != "mocker":
            raise ValueError(
                f"pools.{pool.name}.engine is {pool.engine!r}; expected 'mocker', the only engine that can be simulated"
            )
        engine = _with_store(resolve(pool.engine_config, pool.timing), deployment.kv_store)
        startup_s = deployment.fleet.mean_startup_s(pool.timing)
        pools.append(SimulatedPool(pool.name, pool.role, engine, pool.replicas, pool.gpus_per_worker, startup_s))
    if deployment.kv_store.kv_store_size:
        _check_store(deployment, [pool.engine for pool in pools if pool.replicas])
    return pools


def check_ranks(deployment: Deployment) -> None:
    """Refuse to route by the caches of ranks with attention DP.

    Raises:
        ValueError: a router mode looks at them.
    """
    for pool in deployment.pools:
        config, mode = pool.engine_config, deployment.mode_of(pool.role)
        has_cache = (
            config.has_tree
            if isinstance(config, SglangConfig)
            else config.enable_block_reuse
            if isinstance(config, TrtllmConfig)
            else True
        )
        if pool.num_attention_ranks > 1 and has_cache and wants_kv_events(mode, deployment.router):
            raise ValueError(f"router_mode {mode}: {KV_EVENTS_OF_RANKS}")


def engines_of(deployment: Deployment) -> list[SimulatedEngine]:
    """Return the engine of each initial worker of a deployment, in the order of `Deployment.worker_pools`.

    Raises:
        ValueError: as for `pools_of`.
    """
    return [pool.engine for pool in pools_of(deployment) for _ in range(pool.replicas)]


def _with_store(engine: SimulatedEngine, store: KvStoreConfig) -> SimulatedEngine:
    """Put the store that workers share behind an engine's host memory, if there is host memory."""
    tier = None if engine.host is None else store.tier(engine.host)
    if engine.host is None or tier is None:
        return engine
    return replace(engine, host=replace(engine.host, tiers=(*engine.host.tiers, tier)))


def _check_store(deployment: Deployment, engines: Iterable[SimulatedEngine]) -> None:
    """Refuse a store that no worker uses, or that would contain chunks of several sizes."""
    size = deployment.kv_store.kv_store_size
    hosts = [engine.host for engine in engines if engine.host is not None]
    if not hosts:
        raise ValueError(
            f"kv_store_size is {size:g}, but no worker has kv_offloading_size; expected workers with host memory, "
            "because all KV "
            "of the store passes through it"
        )
    chunks = {(host.blocks_per_chunk, host.chunk_bytes) for host in hosts}
    if len(chunks) > 1:
        raise ValueError(
            f"kv_store_size is {size:g}, but workers have chunks of "
            f"{' and '.join(f'{b:g} bytes' for _, b in sorted(chunks))}; expected "
            "one chunk size in a shared store"
        )


def refuse_idle_settings(deployments: Sequence[Deployment]) -> None:
    """Refuse settings of a KV tier that no worker in any of these deployments has, such as the arms of an experiment.

    Raises:
        ValueError: such a setting is not at its default.
    """
    stores = [deployment.kv_store for deployment in deployments]
    refuse_idle_store(stores)
    has_store = any(
        store.kv_store_size or deployment.kv_transfer.kv_store
        for store, deployment in zip(stores, deployments, strict=True)
    )
    engines = [pool.mocker for deployment in deployments for pool in deployment.pools]
    refuse_idle_tiers(engines, has_store=has_store)
    refuse_idle_lora(engines)
    refuse_idle_encoder(engines)
    refuse_idle_speculation(engines)
    pools = [pool for deployment in deployments for pool in deployment.pools]
    refuse_idle_hicache([pool.sglang for pool in pools])
    if not any(pool.role == "decode" for pool in pools):
        refuse_idle_decoding([pool.sglang for pool in pools])
    refuse_idle_retention([(pool.mocker, pool.timing) for pool in pools if pool.engine == "mocker"])


def refuse_encoders(deployment: Deployment) -> None:
    """Refuse what would have no effect where engines are served.

    Raises:
        ValueError: a simulated engine has an encoder, and the frontend takes text only.
    """
    for pool in deployment.pools:
        most = pool.mocker.max_tokens_per_mm_item
        if pool.engine == "mocker" and most is not None:
            raise ValueError(
                f"max_tokens_per_mm_item is {most}, but images are not sent to workers that are served; expected none (dynabench "
                "simulate, sweep and plan use it)"
            )


def context_of(engines: Iterable[SimulatedEngine]) -> int:
    """Return the maximum tokens of one request, including the last, that every decoding engine supports."""
    return min(
        min(engine.longest_sequence + 1, engine.config.max_model_len or sys.maxsize)
        for engine in engines
        if engine.config.kv_role != "kv_producer"
    )


class Longest(NamedTuple):
    """The longest requests that are answered, in tokens; None: of any length. A server refuses others one by one."""

    context: int | None = None
    """Prompt and output together."""
    prompt: int | None = None
    """If prompts are not cut: what one step takes."""

    def __str__(self) -> str:
        context = "" if self.context is None else f"the context of {self.context:,} tokens"
        step = "" if self.prompt is None else f"a step of {self.prompt:,} tokens, in which a whole prompt is computed"
        return " or ".join(filter(None, (context, step)))

    def refusal(self, num_prompt: int, max_tokens: int) -> str | None:
        """Return why a request is refused; None if it is answered."""
        if self.prompt is not None and num_prompt > self.prompt:
            return f"the prompt has {num_prompt} tokens; a step takes {self.prompt} and prompts are not cut"
        return None if self.context is None else refusal(self.context, num_prompt, max_tokens)


ANY_LENGTH = Longest()
UNLIMITED = np.iinfo(np.int32).max
"""More tokens than any request of a workload has."""


def longest_of(engines: Iterable[SimulatedEngine]) -> Longest:
    """Return the longest requests that every engine takes."""
    each = list(map(longest_in, engines))
    context = min((one.context for one in each if one.context), default=None)
    return Longest(context, min((one.prompt for one in each if one.prompt), default=None))


def longest_in(engine: SimulatedEngine) -> Longest:
    """Return the longest requests that an engine takes."""
    return Longest(engine.config.max_model_len, longest_prompt(engine.settings))


def longest_prompt(settings: EngineSettings) -> int | None:
    """Return the tokens of the longest prompt, if a step has to take all of it.

    vLLM that does not cut prompts does not start with a longer context than a step.
    """
    if isinstance(settings, TrtllmConfig) and not (settings.enable_chunked_context or _is_generation_server(settings)):
        return settings.max_num_tokens
    return None


def _is_generation_server(settings: EngineSettings) -> bool:
    """Return whether TensorRT-LLM computes the prompts elsewhere."""
    return isinstance(settings, TrtllmConfig) and settings.server_role == "generation"


def answered(workload: Workload, longest: Longest) -> Workload:
    """Return what engines with these limits compute of a workload: without what they refuse or cut."""
    columns = workload.columns
    are = are_answered(workload, longest)
    room = UNLIMITED if longest.context is None else longest.context
    if are.all() and (columns.input_length + columns.output_length <= room).all():
        return workload
    kept = columns.select(np.flatnonzero(are).tolist())
    lengths = np.minimum(kept.output_length, room - kept.input_length)
    return replace(workload, requests=kept.replace(output_length=lengths))


def are_answered(workload: Workload, longest: Longest) -> npt.NDArray[np.bool_]:
    """Return which requests a server with these limits answers, as `Longest.refusal` decides it for each."""
    columns = workload.columns
    context = UNLIMITED if longest.context is None else longest.context
    prompt = UNLIMITED if longest.prompt is None else longest.prompt
    return (columns.input_length < context) & (columns.input_length <= prompt) & (columns.output_length <= context)


def beyond_context(workload: Workload, pool: Pool) -> str:
    """Say how many requests no number of workers of a pool can serve; nothing if there are none."""
    config, context = pool.engine_config, pool.engine_config.max_model_len
    if context is None and pool.timing.timing_name == "roofline":
        context = pool.timing.shape.context_length
    longest = Longest(context, longest_prompt(config))
    refused = int((~are_answered(workload, longest)).sum())
    if not refused:
        return ""
    return (
        f"{refused:,} of {len(workload):,} requests do not fit {longest}. They are refused (HTTP 400) "
        "and count as failed, whatever the number of GPUs; use a model with a longer context, or cut prompts with --cap-isl."
    )


def check_fits(workload: Workload, engine: SimulatedEngine, *, fail_on_too_long: bool = False) -> None:
    """Refuse a workload with a request that is too long for the engine, or with adapters or media that it cannot take.

    Args:
        workload: the requests.
        engine: the engine.
        fail_on_too_long: refuse requests beyond max_model_len, too, which a server refuses or cuts one by one.

    Raises:
        WorkloadError: there is such a request; the message names the first, and a remedy.
    """
    if engine.adapters is None and (names := workload.columns.adapters):
        raise WorkloadError(
            f"{workload.name}: requests ask for adapters, the first for {names[0]!r}, and enable_lora is false; expected "
            "--enable-lora with vLLM's scheduler, or requests without"
        )
    if workload.columns.has_media:
        _check_media(workload, engine)
    if fail_on_too_long:
        _check_limits(workload, longest_in(engine), engine)
    _check_room(workload, engine)


def _check_media(workload: Workload, engine: SimulatedEngine) -> None:
    """Refuse images and other media of a workload that an engine cannot encode."""
    if not isinstance(engine.settings, EngineConfig):
        kind = "SGLang" if isinstance(engine.settings, SglangConfig) else "TensorRT-LLM"
        raise WorkloadError(
            f"{workload.name}: requests have images or other media, which are not simulated with {kind}; expected "
            "engine_type vllm"
        )
    items = [(item, number) for number, media in enumerate(workload.columns.values("media")) for item in media]
    largest, number = max(items, key=lambda each: each[0].tokens)
    if why := engine.config.why_not_encoded(largest.tokens):
        raise WorkloadError(f"{workload.name}: item {largest.id!r} of request {number} cannot be encoded: {why}")


def _check_limits(workload: Workload, longest: Longest, engine: SimulatedEngine) -> None:
    columns, context = workload.columns, longest.context
    if longest.prompt is not None:
        number = _first(columns.input_length > longest.prompt)
        if number is not None:
            raise WorkloadError(_uncut(workload, number, engine))
    if context is None:
        return
    number = _first(columns.input_length + columns.output_length > context)
    if number is not None:
        input_length, output_length = columns.lengths(number)
        name = own_name(engine.settings, "max_model_len")
        raise WorkloadError(
            f"{workload.name}: request {number} has {input_length} prompt and {output_length} output "
            f"tokens, more than {name} ({context}) of {PARTS[engine.config.kv_role]} engine: use a model with a longer "
            f"context (or a larger --{name.replace('_', '-')}, if you set it), cut prompts with --cap-isl, or leave out "
            "--fail-on-too-long"
        )


def _check_room(workload: Workload, engine: SimulatedEngine) -> None:
    """Refuse a request that never fits into the KV cache, or into a step; what a server refuses does not count."""
    config, capacity, columns = engine.config, engine.longest_sequence, workload.columns
    context = config.max_model_len or sys.maxsize
    outputs = np.ones_like(columns.output_length) if config.kv_role == "kv_producer" else columns.output_length
    is_beyond = np.minimum(columns.input_length.astype(np.int64) + outputs, context) - 1 > capacity
    is_cut = config.enable_chunked_prefill or _is_generation_server(engine.settings)
    is_whole = columns.input_length > (sys.maxsize if is_cut else config.max_num_batched_tokens)
    number = _first((is_beyond | is_whole) & are_answered(workload, longest_in(engine)))
    if number is None:
        return
    name, part = f"{workload.name}: request {number}", PARTS[config.kv_role]
    if is_beyond[number]:
        raise WorkloadError(
            f"{name} has {columns.input_length[number]} prompt and {outputs[number]} output tokens, more than the {capacity} "
            f"that {part} engine can hold ({_blocks(engine)}); raise "
            f"{flag_of(engine.settings, 'num_gpu_blocks')} or cut prompts with --cap-isl"
        )
    raise WorkloadError(_uncut(workload, number, engine))


def _blocks(engine: SimulatedEngine) -> str:
    """Say how many blocks the KV cache has, and how large they are in each group of layers."""
    if engine.layout is None:
        return f"{engine.num_usable_blocks} blocks of {engine.config.block_size} tokens"
    groups = engine.layout.groups
    sizes = " or ".join(f"{size:,}" for size in sorted({group.block_size for group in groups}))
    shared = f", of which each of {len(groups)} groups of layers takes its own" if len(groups) > 1 else ""
    return f"{engine.num_usable_blocks} blocks of {sizes} tokens{shared}"


def _uncut(workload: Workload, number: int, engine: SimulatedEngine) -> str:
    """Say that a prompt is longer than a step of an engine that does not cut prompts."""
    config = engine.config
    return (
        f"{workload.name}: request {number} has a prompt of {workload.columns.input_length[number]} tokens; "
        f"{PARTS[config.kv_role]} engine computes at most {config.max_num_batched_tokens} in a step and does not cut prompts: "
        f"raise {flag_of(engine.settings, 'max_num_batched_tokens')} or use "
        f"{flag_of(engine.settings, 'enable_chunked_prefill')}"
    )


def _first(flags: npt.NDArray[np.bool_]) -> int | None:
    """Return the number of the first that is true, None if none is."""
    return int(flags.argmax()) if flags.any() else None
