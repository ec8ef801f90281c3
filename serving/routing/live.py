"""Placing requests on a live system: the router core, fed by discovery, KV events, load reports and other routers."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from serving.model.card import Role
from serving.router import Prompt, PromptBlocks, Router, RouterConfig, RoutingDecision, choices_of
from serving.router.books import RankBooks
from serving.router.decision import NoWorkersError
from serving.routing.following import Following, WorkerTraits
from serving.routing.peers import Peers
from serving.routing.placement import Placement, RankAddress, WantedRank
from serving.runtime.address import EndpointAddress
from serving.runtime.connection import ReplyStream
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.messages import CallError
from serving.worker.load_reports import LoadReport

log = logging.getLogger(__name__)

NUM_SHOWN = 8
"""Candidates that are logged with a decision, the cheapest first."""


class LiveRouting:
    """Routes to the instances of one endpoint (see `Workers`)."""

    def __init__(
        self,
        runtime: DistributedRuntime,
        address: EndpointAddress,
        *,
        mode: str,
        config: RouterConfig,
        block_size: int,
        seed: int,
        traits: Callable[[int], WorkerTraits | None],
        stage: Role = "aggregated",
        follows_events: bool = False,
    ) -> None:
        """Prepare to route; `stage` and `follows_events` are those of the router core."""
        self.core = Router(
            mode,
            config,
            block_size=block_size,
            rng=choices_of(stage, seed),
            stage=stage,
            follows_events=follows_events,
        )
        self.address = address
        self.block_size = block_size
        self._traits = traits
        self._following = Following(runtime, address, self.core, traits)
        self._peers = Peers(runtime, address, self.core, self._following.slots)
        self._requests = itertools.count()

    async def start(self) -> None:
        """Follow discovery, events and other routers."""
        await self._peers.start()
        await self._following.start()

    async def close(self) -> None:
        """Stop following."""
        self._peers.close()
        await self._following.close()

    @property
    def stage(self) -> Role:
        """See `Workers`."""
        return self.core.stage

    @property
    def num_ranks(self) -> int:
        """See `Workers`."""
        return len(self._following.ranks)

    @property
    def loads(self) -> Mapping[RankAddress, LoadReport]:
        """The last report of each rank."""
        return self._following.loads

    def ranks(self) -> list[RankAddress]:
        """Return the ranks that can be routed to, in order of their slots."""
        return [rank for _, rank in sorted(self._following.ranks.items())]

    def books(self) -> list[tuple[RankAddress, RankBooks]]:
        """Return the router core's books of each rank."""
        return [(rank, self.core.load(slot)) for slot, rank in sorted(self._following.ranks.items())]

    def traits(self, instance_id: int) -> WorkerTraits | None:
        """Return what is known of an instance."""
        return self._traits(instance_id)

    def rank(self, slot: int) -> RankAddress:
        """Return the rank that has this slot in the router core."""
        return self._following.ranks[slot]

    async def wait_for_workers(self) -> None:
        """See `Workers`."""
        await self._following.client.wait_for_instances()

    def on_card(self, instance_id: int) -> None:
        """Record that an instance's model card has arrived, perhaps after the instance itself."""
        self._following.on_card(instance_id)

    def pick(self, wanted: WantedRank) -> Placement:
        """See `Workers`."""
        if not self.num_ranks:
            raise NoWorkersError(f"{self.address} has no instance")
        num_tokens, hashes, is_local = wanted.num_tokens, wanted.hashes, wanted.is_local
        only = None if wanted.instance_id is None else self._slot(wanted.instance_id, wanted.dp_rank or 0)
        request, now = next(self._requests), asyncio.get_running_loop().time()
        prompt = Prompt(num_tokens, PromptBlocks.of(hashes), wanted.session, wanted.adapter)
        avoided = self._slots(wanted.avoid)
        decision = self.core.pick(
            request,
            prompt,
            now,
            only,
            avoided,
            wanted.is_refusable,
            is_local=is_local,
            wants_costs=wanted.wants_costs or log.isEnabledFor(logging.DEBUG),
        )
        rank, overlap = self.rank(decision.slot), decision.overlap_blocks
        is_remote = self.core.stage == "decode" and not is_local
        self._peers.on_booked(
            request,
            rank,
            num_tokens=num_tokens,
            hashes=hashes,
            prefill_tokens=0 if is_remote else decision.prefill_tokens,
        )
        if is_remote:
            self._peers.on_first_token(request)
        depth = self.core.load(decision.slot).num_requests - 1
        if log.isEnabledFor(logging.DEBUG):
            log.debug("request %d, %d tokens: %s", request, num_tokens, self._in_words(decision, depth))
        return Placement(request, rank, decision.slot, overlap, decision, depth)

    def peek(self, num_tokens: int, hashes: list[int]) -> RoutingDecision:
        """Return what `pick` would choose for a local prompt, without booking anything.

        Raises:
            NoWorkersError, AllBusyError, AllFullError: as `pick`.
        """
        return self.core.peek(Prompt(num_tokens, PromptBlocks.of(hashes)), asyncio.get_running_loop().time())

    def _in_words(self, decision: RoutingDecision, depth: int) -> str:
        cheapest = sorted(decision.candidates, key=lambda candidate: candidate[1])[:NUM_SHOWN]
        costs = [f"{_name(self.rank(slot))} costs {cost:g}, {overlap} blocks" for slot, cost, overlap in cheapest]
        chosen = f"to {_name(self.rank(decision.slot))}, which has {decision.overlap_blocks} of its blocks"
        return f"{chosen} and {depth} requests ({'; '.join(costs)})"

    def _slot(self, instance_id: int, dp_rank: int) -> int:
        """Return the slot of the rank that a request must go to."""
        slot = self._following.slots.get(RankAddress(instance_id, dp_rank))
        if slot is None:
            raise NoWorkersError(f"{self.address} has no instance {instance_id:x} (rank {dp_rank})")
        return slot

    def _slots(self, instances: Collection[int]) -> frozenset[int]:
        if not instances:
            return frozenset()
        return frozenset(slot for rank, slot in self._following.slots.items() if rank.instance_id in instances)

    def send(self, placement: Placement, request: Any) -> ReplyStream:
        """See `Workers`."""
        return self._following.client.direct(request, placement.rank.instance_id)

    def on_first_token(self, placement: Placement) -> None:
        """See `Workers`."""
        self.core.on_first_token(placement.request)
        self._peers.on_first_token(placement.request)

    def on_finish(self, placement: Placement) -> None:
        """See `Workers`."""
        self.core.on_finish(placement.request)
        self._peers.on_finish(placement.request)

    def call_any(self, address: EndpointAddress, request: Any) -> ReplyStream:
        """Call another endpoint of any instance's process.

        Raises:
            CallError: there is no instance.
        """
        client = self._following.client
        ids = client.instance_ids()
        if not ids:
            raise CallError(f"no instance of {self.address} is known", "lost")
        return client.side_call(ids[0], address, request)


def _name(rank: RankAddress) -> str:
    return f"{rank.instance_id:x}/{rank.dp_rank}"
