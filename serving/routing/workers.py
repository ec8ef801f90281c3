"""What those who send requests see of the workers of one stage, and of the stages of a model."""

from typing import Any, Protocol

from serving.life import DisaggregationConfig
from serving.model.card import Role
from serving.routing.placement import Placement, RankAddress, WantedRank
from serving.runtime.connection import ReplyStream


class Workers(Protocol):
    """The workers of one stage: somewhere on the network, or in this process."""

    @property
    def stage(self) -> Role:
        """The part of each request that they do."""
        ...

    @property
    def num_ranks(self) -> int:
        """Ranks that can be chosen."""
        ...

    async def wait_for_workers(self) -> None:
        """Wait until there is one."""
        ...

    def pick(self, wanted: WantedRank) -> Placement:
        """Choose a rank, or use the requested one, and book the request there.

        Raises:
            NoWorkersError: there is none, or not the requested one.
            AllBusyError: all are busy.
            AllFullError: all are full, and the request is refusable.
        """
        ...

    def send(self, placement: Placement, request: Any) -> ReplyStream:
        """Send a request where it was placed.

        Raises:
            CallError: the instance is gone.
        """
        ...

    def on_first_token(self, placement: Placement) -> None:
        """Record that its prompt is computed."""
        ...

    def on_finish(self, placement: Placement) -> None:
        """Record that it is over, whichever way it ended."""
        ...


class Course(Protocol):
    """Where a request of a model may go, stage by stage, and how two workers that share it meet."""

    @property
    def config(self) -> DisaggregationConfig:
        """How requests are spread over the stages."""
        ...

    @property
    def decode(self) -> Workers:
        """The workers that answer."""
        ...

    @property
    def prefill(self) -> Workers | None:
        """The workers that prefill for them, if there are any now."""
        ...

    def bypass(self, num_tokens: int, hashes: list[int]) -> RankAddress | None:
        """Return the rank that should both compute a prompt and answer it, if any."""
        ...

    def meet(self, placement: Placement) -> dict[str, Any] | None:
        """Return the data with which a request's two workers meet, None if the prompt is computed first."""
        ...
