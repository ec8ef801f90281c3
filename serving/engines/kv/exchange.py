"""What both sides of a transfer need: an agent, notices and counts."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from foundation.ordered_set import OrderedSet
from serving.engines.kv.notices import Notice, decode, encode
from serving.engines.kv.tickets import NUM_BYTES
from serving.runtime.world import world
from serving.transfer.agent import Agent, TransferError
from serving.transfer.config import TransferRunConfig
from serving.transfer.make import make_agent
from serving.worker.engine import KvTransfers

log = logging.getLogger(__name__)

OnSent = Callable[[TransferError | None], object]

NOTICE_S = 5.0
"""How long a notice may take."""

MAX_NOTICES = 4096
"""Most notices on their way at once; more are dropped, as if they were lost."""


def ignore(_: TransferError | None) -> None:
    """Do nothing: time-outs and leases handle it."""


class KvExchange:
    """The transfers of one worker."""

    def __init__(
        self,
        transfer: TransferRunConfig,
        token: Callable[[], bytes] | None = None,
        *,
        folder: Path | None = None,
    ) -> None:
        """Prepare it.

        Args:
            transfer: how workers reach each other.
            token: returns the secret that the processes of our cluster share, for TCP.
            folder: for the socket of shared memory (default: a private folder of this user).
        """
        self.agent: Agent = make_agent(
            transfer.transfer,
            NUM_BYTES,
            on_notice=self._receive,
            folder=folder,
            host=transfer.transfer_host,
            token=token,
        )
        self.id = world().token_hex(8)
        self.counts = KvTransfers()
        self.on_notice: Callable[[Notice], object] = log.debug
        """Called with each notice that arrives; set by the user of the exchange."""
        self._notices: OrderedSet[asyncio.Task[None]] = OrderedSet()

    async def start(self) -> None:
        """Allocate memory, and become reachable.

        Raises:
            TransferError: this is not possible here.
        """
        await self.agent.start()

    async def close(self) -> None:
        """Release everything."""
        for task in self._notices:
            task.cancel()
        await asyncio.gather(*self._notices, return_exceptions=True)
        await self.agent.close()

    def count(self, **more: float) -> None:
        """Add to the counts."""
        self.counts = self.counts._replace(**{name: getattr(self.counts, name) + more[name] for name in more})

    def tell(self, agent: dict[str, Any], *notices: Notice, on_sent: OnSent = ignore) -> None:
        """Send notices in the background, in order; if one does not arrive, time-outs and leases make up for it.

        Args:
            agent: the recipient.
            notices: the notices.
            on_sent: called at the end: with an error if some did not arrive, with None if all did, or may have.
        """
        if len(self._notices) < MAX_NOTICES:
            task = asyncio.create_task(self._tell(agent, notices, on_sent))
            self._notices.add(task)
            task.add_done_callback(self._notices.discard)
        else:
            on_sent(None)

    async def ask(self, agent: dict[str, Any], notice: Notice) -> None:
        """Send a notice.

        Raises:
            TransferError: it did not arrive.
        """
        await self.agent.notify(agent, encode(notice), timeout_s=NOTICE_S)

    async def _tell(self, agent: dict[str, Any], notices: Sequence[Notice], on_sent: OnSent) -> None:
        problem = None
        try:
            for notice in notices:
                await self.ask(agent, notice)
        except TransferError as error:
            log.debug("a notice did not arrive: %s", error)
            problem = None if error.kind == "late" else error
        on_sent(problem)

    def _receive(self, data: bytes) -> None:
        notice = decode(data)
        if notice is None:
            log.warning("ignored a notice of %d bytes that cannot be read", len(data))
        else:
            self.on_notice(notice)
