"""When a server that the runtime needs is away: noticed within two seconds, logged once, and shown on /health and /metrics."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import monotonic

log = logging.getLogger(__name__)

ASK_S = 0.5
"""How often a server is asked whether it is there."""

ANSWER_S = 1.0
"""How long it may take to answer before it counts as away. It counts as back with its next answer."""


class Outages:
    """The outages of one server, as this process sees them."""

    def __init__(self, name: str, place: str, *, consequence: str = "", carries_requests: bool = False) -> None:
        """Start with the server there.

        Args:
            name: its short name, a label in metrics.
            place: its name and address, for people.
            consequence: what its absence means; goes into the log (empty: nothing is logged).
            carries_requests: whether no worker can be called while it is away.
        """
        self.name = name
        self.carries_requests = carries_requests
        self.num_outages = 0
        """How often it went away."""
        self.num_given_up = 0
        """Calls that were given up because it was away."""
        self._place = place
        self._consequence = consequence
        self._reason = ""
        self._since: float | None = None

    @property
    def is_away(self) -> bool:
        """Whether it is away now."""
        return self._since is not None

    @property
    def seconds(self) -> float:
        """For how long it has been away, 0 if it is there."""
        return 0.0 if self._since is None else monotonic() - self._since

    def __str__(self) -> str:
        """Say for how long it has been away, and why we think so."""
        return f"{self._place} has not answered for {self.seconds:.0f} s ({self._reason})" if self.is_away else ""

    def begin(self, reason: str) -> None:
        """Record that it does not answer."""
        self._reason = reason
        if self._since is not None:
            return
        self._since = monotonic()
        self.num_outages += 1
        if self._consequence:
            log.warning("%s does not answer (%s); %s", self._place, reason, self._consequence)

    def end(self) -> None:
        """Record that it answers."""
        if self._since is not None and self._consequence:
            log.info("%s answers again, after %.0f s", self._place, self.seconds)
        self._since = None

    async def follow(
        self,
        ask: Callable[[], Awaitable[object]],
        errors: tuple[type[Exception], ...],
        reason: Callable[[Exception], str],
    ) -> None:
        """Ask it forever whether it is there; one of these errors means that it is not, for this reason."""
        while True:
            try:
                await ask()
            except errors as error:
                self.begin(reason(error))
            else:
                self.end()
            await asyncio.sleep(ASK_S)
