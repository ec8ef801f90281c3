"""`python -m serving.router_service`: the router as a separate process, between frontends and workers.

It registers the workers' model under its own address and forwards. Frontends that see only its namespace
(`--namespace`) then leave all routing to it. In front of workers that only prefill or only decode, it has their
role: each of the two pools has its own router.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np

from foundation.settings import Wait, check_settings
from serving.model.card import ModelCard
from serving.model.errors import ModelError
from serving.model.files import ModelFiles, files_address
from serving.model.watch import watch_cards
from serving.router import RouterConfig, check_live_mode
from serving.router.decision import AllBusyError, AllFullError, NoWorkersError
from serving.routing.following import traits_of
from serving.routing.live import LiveRouting
from serving.routing.placement import Placement, WantedRank
from serving.runtime.address import EndpointAddress
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.messages import CallError, pack_u32, pack_u64
from serving.runtime.server import AnswerStream, GeneratorService
from serving.runtime.stopping import until_stopped
from serving.runtime.world import world
from serving.supervision.process import report_ready
from serving.worker.protocol import PreprocessedRequest

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterServiceConfig:
    """Settings of a router process."""

    workers: str = "dyn://workers.backend.generate"
    """Endpoint of the workers to route to."""

    endpoint: str = "dyn://dynamo.router.generate"
    """Where the router itself serves."""

    router_mode: str = "kv"
    """How requests are spread over the workers."""

    seed: int = 0
    """Seed of the router's random choices."""

    drain_s: Wait = 30.0
    """How long requests in progress may take to finish after the process is asked to end (s)."""

    def __post_init__(self) -> None:
        """Refuse values without a meaning."""
        check_settings(self)
        check_live_mode(self.router_mode)


class RouterService:
    """Serves `generate`, which routes and forwards, and `best_worker`, which only answers where a request would go."""

    def __init__(self, runtime: DistributedRuntime, config: RouterServiceConfig, router: RouterConfig) -> None:
        self._runtime = runtime
        self._config = config
        self._router = router
        self._cards: dict[str, ModelCard] = {}
        self._news = asyncio.Event()
        self._routing: LiveRouting | None = None

    async def run(self) -> None:
        """Wait for workers, then serve until the process is asked to stop."""
        runtime = self._runtime
        target, own = EndpointAddress.parse(self._config.workers), EndpointAddress.parse(self._config.endpoint)
        if target == own:
            raise ModelError(f"the router cannot serve at its workers' own address {own}")
        await watch_cards(runtime.discovery, self._on_card, *target)
        if not await until_stopped(runtime.stopping, self._news.wait()):
            return
        await self._serve(next(iter(self._cards.values())), target, own)
        await runtime.stopping.wait()
        await runtime.drain()

    async def _serve(self, card: ModelCard, target: EndpointAddress, own: EndpointAddress) -> None:
        """Route to the workers at `target`, and serve their model at our own address.

        Raises:
            ModelError: their requests cannot be passed on.
        """
        if card.bootstrap is not None and card.bootstrap.is_needed:
            raise ModelError(
                f"the {card.role} workers at {target} must be called together with the decode workers, by a "
                "router that picks both: let the frontend route to them itself"
            )
        runtime = self._runtime
        self._routing = routing = LiveRouting(
            runtime,
            target,
            mode=self._config.router_mode,
            config=self._router if card.step_costs is None else self._router.with_costs(card.step_costs),
            block_size=card.kv_cache_block_size,
            seed=self._config.seed,
            traits=partial(traits_of, self._cards),
            stage=card.role,
        )
        await routing.start()
        await routing.wait_for_workers()
        files = await ModelFiles.receive(card.files, partial(routing.call_any, files_address(target)), {})
        await runtime.serve(files_address(own), GeneratorService(files.send), is_public=False)
        await runtime.serve(own.beside("best_worker"), GeneratorService(self._best_worker))
        ours = _own_card(card, own, runtime.instance_id)
        await runtime.register(ours.key, msgspec.json.encode(ours))
        await runtime.serve(own, self._forward)
        report_ready()
        log.info("routing %s from %s to %s", card.name, own, target)

    def _on_card(self, key: str, card: ModelCard | None) -> None:
        if card is None:
            self._cards.pop(key, None)
            return
        self._cards[key] = card
        self._news.set()
        if self._routing is not None:
            self._routing.on_card(card.instance_id)

    def _pick(self, wanted: WantedRank) -> Placement:
        assert self._routing is not None
        try:
            return self._routing.pick(wanted)
        except AllFullError as error:
            raise CallError(str(error), "full") from error
        except (NoWorkersError, AllBusyError) as error:
            raise CallError(str(error), "unavailable") from error

    async def _best_worker(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Answer where a request, given as `num_tokens` and `sequence_hashes`, would go."""
        assert self._routing is not None
        num_tokens, hashes = int(request["num_tokens"]), list(request["sequence_hashes"])
        placement = self._pick(WantedRank(num_tokens, hashes, is_refusable=False, wants_costs=True))
        self._routing.on_finish(placement)
        yield {
            "instance_id": placement.rank.instance_id,
            "dp_rank": placement.rank.dp_rank,
            "overlap_blocks": placement.overlap_blocks,
            "candidates": [
                {"instance_id": self._routing.rank(slot).instance_id, "cost": cost, "overlap_blocks": overlap}
                for slot, cost, overlap in placement.decision.candidates
            ],
        }

    def _forward(self, raw: msgspec.Raw, stream: AnswerStream) -> None:
        request = msgspec.msgpack.decode(raw, type=PreprocessedRequest)
        task = asyncio.ensure_future(self._relay(request, stream))
        stream.on_cancel = task.cancel

    async def _relay(self, request: PreprocessedRequest, stream: AnswerStream) -> None:
        assert self._routing is not None
        hashes = np.frombuffer(bytes(request.sequence_hashes.data), "<u8").tolist() if request.sequence_hashes else []
        tokens = np.frombuffer(bytes(request.token_ids.data), "<u4")
        is_local = not (request.kv_transfer_params or {}).get("do_remote_prefill")
        try:
            wanted = WantedRank(
                len(tokens),
                hashes,
                adapter="" if request.cache_scope is None else request.cache_scope.lora_name,
                is_refusable=request.is_refusable,
                is_local=is_local,
            )
            placement = self._pick(wanted)
        except CallError as error:
            stream.end(str(error), error.kind)
            return
        request.dp_rank = placement.rank.dp_rank
        request.token_ids = pack_u32(tokens)
        request.sequence_hashes = pack_u64(np.array(hashes, np.uint64))
        gate = asyncio.Event()
        stream.on_unblocked = gate.set
        reply, is_first = None, True
        try:
            reply = self._routing.send(placement, request)
            while reply.end is None or reply.items:
                for item in await reply.take():
                    stream.send(item)
                if is_first:
                    is_first = False
                    self._routing.on_first_token(placement)
                while stream.is_blocked:
                    gate.clear()
                    await gate.wait()
            stream.end(reply.end.error, reply.end.kind)
        except CallError as error:
            stream.end(str(error), error.kind)
        finally:
            if reply is not None:
                reply.cancel()
            self._routing.on_finish(placement)


def _own_card(card: ModelCard, own: EndpointAddress, instance_id: int) -> ModelCard:
    """Return the card under which the router serves the workers' model, as one worker without further data."""
    return msgspec.structs.replace(
        card,
        namespace=own.namespace,
        component=own.component,
        endpoint=own.endpoint,
        instance_id=instance_id,
        num_ranks=1,
        has_kv_events=False,
        bootstrap=None,  # it is the address of one worker, and the router chooses among several
        router_mode="round-robin",
        created=int(world().wall_s()),
    )
