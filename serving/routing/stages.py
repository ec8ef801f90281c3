"""The workers of a model, stage by stage: those that answer, and those that compute prompts for them, if any."""

import sys
from collections.abc import Callable
from typing import Any

from serving.life import DisaggregationConfig
from serving.life.bypass import bypasses
from serving.life.room import room
from serving.router.decision import AllBusyError, AllFullError, NoWorkersError
from serving.routing.live import LiveRouting
from serving.routing.placement import Placement, RankAddress
from serving.runtime.world import world

ROOM = "bootstrap_room"


def _nobody() -> LiveRouting | None:
    return None


class Stages:
    """The stages of a model on the network (see `Course`)."""

    def __init__(
        self,
        decode: LiveRouting,
        config: DisaggregationConfig = DisaggregationConfig(),  # noqa: B008 (frozen)
        *,
        find_prefill: Callable[[], LiveRouting | None] = _nobody,
    ) -> None:
        """Combine the routing to workers that answer and to those that prefill for them, which may join and leave.

        Args:
            decode: the routing to those that answer.
            config: how requests are spread.
            find_prefill: returns the routing to the others, while there is one.
        """
        self.decode = decode
        self.config = config
        self._find_prefill = find_prefill

    @property
    def prefill(self) -> LiveRouting | None:
        """See `Course`."""
        routing = self._find_prefill()
        return routing if routing is not None and routing.num_ranks else None

    def bypass(self, num_tokens: int, hashes: list[int]) -> RankAddress | None:
        """See `Course`."""
        prefill, decode = self.prefill, self.decode
        if prefill is None or self.config.conditional_disagg == "never":
            return None
        try:
            there = decode.peek(num_tokens, hashes)
        except (NoWorkersError, AllBusyError, AllFullError):
            return None
        try:
            prefill_tokens = prefill.core.load(prefill.peek(num_tokens, hashes).slot).prefill_tokens
        except (NoWorkersError, AllBusyError, AllFullError):
            prefill_tokens = sys.maxsize  # it would be refused there
        rank, block_size = decode.rank(there.slot), decode.block_size
        report, usage = decode.loads.get(rank), None
        if report is not None and report.kv_total_blocks:
            num_needed = -(-num_tokens // block_size) - there.gpu_blocks
            usage = (report.kv_active_blocks + num_needed) / report.kv_total_blocks
        is_bypassed = bypasses(
            self.config,
            num_tokens=num_tokens,
            num_cached=there.overlap_blocks * block_size,
            prefill_tokens=prefill_tokens,
            decode_usage=usage,
        )
        return rank if is_bypassed else None

    def meet(self, placement: Placement) -> dict[str, Any] | None:
        """See `Course`."""
        prefill = self.prefill
        traits = None if prefill is None else prefill.traits(placement.rank.instance_id)
        bootstrap = None if traits is None else traits.bootstrap
        if traits is None or bootstrap is None:
            return None  # such a worker can only go first
        if self.config.flow != "destination-first" and not bootstrap.is_needed:
            return None
        # Not drawn from a seed: the rooms of several frontends must differ.
        number = room(world().entropy.getrandbits(63), rank=placement.rank.dp_rank, dp_size=traits.num_ranks)
        return {**bootstrap.params, ROOM: number}
