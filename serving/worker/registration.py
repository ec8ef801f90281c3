"""Register a model: announce what an engine serves to every frontend and router with a model card."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from serving.model.card import Bootstrap, ModelCard, ModelType, Role
from serving.model.context import BYTES_CONTEXT
from serving.model.errors import ModelError
from serving.model.files import ModelFiles, files_address
from serving.model.hub import model_name
from serving.model.parsers import check_parsers
from serving.model.watch import present_cards
from serving.router import StepCosts, check_registered_mode
from serving.runtime.distributed import DistributedRuntime, Endpoint
from serving.runtime.server import GeneratorService
from serving.runtime.world import world
from serving.worker.own_engines import dialect


async def register_llm(
    model_type: ModelType,
    endpoint: Endpoint,
    model_path: str,
    model_name: str | None = None,
    *,
    context_length: int | None = None,
    kv_cache_block_size: int | None = None,
    router_mode: str | None = None,
    migration_limit: int = 0,
    user_data: dict[str, Any] | None = None,
    has_kv_events: bool = False,
    num_ranks: int = 1,
    files: ModelFiles | None = None,
    role: Role = "aggregated",
    bootstrap: Bootstrap | None = None,
    step_costs: StepCosts | None = None,
    guided_decoding: Sequence[str] = (),
    continues_constrained: bool = False,
    has_embeddings: bool = False,
    adapters: Sequence[str] = (),
    tool_call_parser: str = "",
    reasoning_parser: str = "",
) -> ModelCard:
    """Announce on the network which model an endpoint serves; frontends then offer it.

    A function given to the endpoint's `serve_endpoint` then gets requests for `ModelType.Backend` in full, with every
    name that Dynamo's requests have.

    Args:
        model_type: the kind of requests that the engine takes.
        endpoint: where the model is served.
        model_path: a folder with tokenizer.json and config.json or a Hugging Face id; empty: tokens are bytes of UTF-8.
        model_name: the name that clients use (default: the folder's or repository's).
        context_length: maximum tokens of a sequence (default: the model's context length).
        kv_cache_block_size: tokens in a KV block (default 16).
        router_mode: overrides the frontend's router mode.
        migration_limit: how often a request may continue on another instance after losing its own.
        user_data: any data for the engine's users.
        has_kv_events: whether the engine reports its KV events; otherwise routers predict what it holds.
        num_ranks: data-parallel ranks; each is routed to separately.
        files: the model's files, if they have been read.
        role: which part of a request the engine does. Prefill workers and decode workers need different endpoints.
        bootstrap: how a decode worker meets this prefill worker, if both may be called at once.
        step_costs: what the engine's steps cost, for router modes that predict times.
        guided_decoding: what the engine can make an answer look like: some of json, regex, choice and grammar.
        continues_constrained: whether such an answer can continue on another worker after its own was lost.
        has_embeddings: whether the engine returns embeddings.
        adapters: the LoRA adapters that clients may ask for, by name, as if they were models.
        tool_call_parser: the format in which the model calls tools (default: calls stay text).
        reasoning_parser: the format in which the model thinks before it answers (default: it stays text).

    Raises:
        ModelError: the model's files cannot be found, a parser is unknown, or the endpoint already serves another model or role.
    """
    if files is None:
        files = await asyncio.to_thread(ModelFiles.read, model_path)
    try:
        if router_mode is not None:
            check_registered_mode(router_mode)
        check_parsers(tool_call_parser, reasoning_parser)
    except ValueError as error:
        raise ModelError(str(error)) from error
    if not 0 <= migration_limit <= 1023:
        raise ModelError(f"migration_limit must be from 0 to 1023, not {migration_limit}")
    if role != "aggregated" and model_type is not ModelType.Backend:
        raise ModelError(f"a {role} worker must take token ids (ModelType.Backend), not {model_type}")
    runtime, address = endpoint.runtime, endpoint.address
    card = ModelCard(
        name=model_name or _name(model_path),
        model_type=model_type,
        namespace=address.namespace,
        component=address.component,
        endpoint=address.endpoint,
        instance_id=runtime.instance_id,
        role=role,
        bootstrap=bootstrap,
        step_costs=step_costs,
        guided_decoding=list(guided_decoding),
        continues_constrained=continues_constrained,
        has_embeddings=has_embeddings,
        adapters=list(adapters),
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        model_path=model_path,
        context_length=_context(context_length, files),
        kv_cache_block_size=kv_cache_block_size or 16,
        migration_limit=migration_limit,
        files=files.digests,
        eos_token_ids=files.eos_token_ids,
        num_ranks=num_ranks,
        has_kv_events=has_kv_events,
        router_mode=router_mode,
        user_data=user_data,
        created=int(world().wall_s()),
    )
    await _check_alike(runtime, card)
    if model_type is ModelType.Backend:
        runtime.dialects[address] = dialect(card)
    await runtime.serve(files_address(address), GeneratorService(files.send), is_public=False)
    await runtime.register(card.key, msgspec.json.encode(card))
    return card


async def _check_alike(runtime: DistributedRuntime, card: ModelCard) -> None:
    """Refuse to serve a model at an address that serves another, or the same with another role, block size or tokenizer."""
    for other in await present_cards(runtime.discovery, *card.address):
        if other.checksum != card.checksum:
            raise ModelError(
                f"{card.address} already serves {other.name!r} with KV blocks of {other.kv_cache_block_size} tokens; "
                f"{card.name!r} with blocks of {card.kv_cache_block_size} needs its own address, or the same files"
            )
        if other.role != card.role:
            raise ModelError(
                f"{card.address} already has {other.role} workers of {other.name!r}; its {card.role} workers need "
                f"their own address (--endpoint), such as {card.address._replace(component=card.role)}"
            )


def _context(asked: int | None, files: ModelFiles) -> int:
    """Return the context length: never more than the model's own, if it has one."""
    return min(asked or files.context_length, files.context_length) if files.contents else asked or BYTES_CONTEXT


def _name(model_path: str) -> str:
    if not model_path:
        raise ModelError("a model without a path needs a name (--model-name)")
    return model_name(model_path)
