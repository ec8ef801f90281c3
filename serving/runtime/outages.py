"""When a server that the runtime needs is away: noticed within two seconds, logged once, and shown on /health and /metrics."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from serving.runtime.stopping import cancel_all
from serving.runtime.world import world

log = logging.getLogger(__name__)

ASK_S = 0.5
"""How often a server is asked whether it is there."""

ANSWER_S = 1.4
"""How long it may take to answer before it counts as away. It counts as back with its next answer."""

ALONE_S = 0.4
"""How long only its first address is asked; if that gives no answer, so are the others."""

LATE_S = 0.2
"""How late a time-out may be. If it is later, our own process hung, and the server is asked again before it is blamed."""


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
        return 0.0 if self._since is None else world().now() - self._since

    def __str__(self) -> str:
        """Say for how long it has been away, and why we think so."""
        return f"{self._place} has not answered for {self.seconds:.0f} s ({self._reason})" if self.is_away else ""

    def begin(self, reason: str) -> None:
        """Record that it does not answer."""
        self._reason = reason
        if self._since is not None:
            return
        self._since = world().now()
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
        """Ask it forever whether it is there.

        Args:
            ask: asks all of its addresses, for at most `ANSWER_S` altogether.
            errors: what that raises if it does not answer.
            reason: describes such an error.
        """
        while True:
            asked_s = world().now()
            try:
                await ask()
            except errors as error:
                if world().now() - asked_s > ANSWER_S + LATE_S:
                    continue
                self.begin(reason(error))
            else:
                self.end()
            await asyncio.sleep(ASK_S)


async def first_to_answer(
    ask: Callable[[str], Awaitable[object]], addresses: Sequence[str], errors: tuple[type[Exception], ...]
) -> str:
    """Return an address of a server that answers: the first, if it is not slow.

    Raises:
        TimeoutError: none answers within `ANSWER_S`.
        errors: none answers, as asking failed at each.
    """

    async def answering(address: str, after_s: float) -> str:
        await asyncio.sleep(after_s)
        await ask(address)
        return address

    asked = [
        asyncio.create_task(answering(address, ALONE_S if place else 0.0)) for place, address in enumerate(addresses)
    ]
    failed: Exception | None = None
    try:
        for answer in asyncio.as_completed(asked, timeout=ANSWER_S):
            try:
                return await answer
            except errors as error:
                failed = error
    finally:
        await cancel_all(*asked)
    assert failed is not None
    raise failed
