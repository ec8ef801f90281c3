"""Watch the frontend's /metrics during a live run for the use of KV blocks and of KV tiers, and for drafts."""

import asyncio
import contextlib
import math
import re
from collections.abc import AsyncIterator, Mapping

import aiohttp

from dynabench.kv_use import KvUse
from dynabench.live.draft_watch import DraftWatch
from dynabench.live.http_client import clock
from dynabench.live.scrape import PATIENCE_S, Exporter, ScrapeError, fetch
from dynabench.live.tier_watch import TierWatch

EVERY_S = 0.5
LATE_S = 1.0
"""Time after the run until workers have reported the last activity of their tiers, and their last drafts."""
_GAUGE = re.compile(rb'^\w+_kv_(active|total)_blocks\{[^}\n]*worker_type="(\w+)"[^}\n]*\} (\S+)$', re.MULTILINE)


class KvWatch:
    """The share over time, by role, since this object was made; a role counts once all its ranks have reported."""

    def __init__(self, url: str, num_ranks: Mapping[str, int], *, has_counts: bool = False) -> None:
        """Prepare to watch.

        Args:
            url: of the frontend.
            num_ranks: by role.
            has_counts: whether workers count what belongs to a run: then it ends with their report.
        """
        self._has_counts = has_counts
        self._exporter = Exporter(f"{url}/metrics")
        self._num_ranks = num_ranks
        self._start_s = self._until_s = clock()
        self._uses: dict[str, KvUse] = {}
        self._end_s = math.inf
        self.tiers = TierWatch()
        self.drafts = DraftWatch()

    def shares(self) -> dict[str, tuple[float, tuple[float, ...]]]:
        """Return the length of a window (s) and the mean share in each, by role; roles without reports are left out."""
        length_s = self._until_s - self._start_s
        return {role: use.shares(length_s, [(0.0, length_s)]) for role, use in self._uses.items()}

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator["KvWatch"]:
        """Poll until the block ends; unanswered polls leave a gap."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as session:
            await self._ask(session)  # what workers have counted by now is not of the run
            asking = asyncio.create_task(self._keep_asking(session))
            try:
                yield self
            finally:
                self._end_s = clock()
                if self._has_counts or self.tiers.has_any:
                    await asyncio.sleep(LATE_S)
                asking.cancel()
                await asyncio.wait([asking])

    async def _keep_asking(self, session: aiohttp.ClientSession) -> None:
        while True:
            await self._ask(session)
            await asyncio.sleep(EVERY_S)

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        with contextlib.suppress(ScrapeError, ValueError):
            self._note(await fetch(session, self._exporter))

    def _note(self, text: bytes) -> None:
        """Record the present share for the time since the last answer."""
        blocks: dict[tuple[str, str], list[float]] = {}
        for kind, role, value in _GAUGE.findall(text):
            blocks.setdefault((kind.decode(), role.decode()), []).append(float(value))
        now = min(clock(), self._end_s)
        for role, num_ranks in self._num_ranks.items():
            totals = blocks.get(("total", role), [])
            if len(totals) >= num_ranks:
                self._uses.setdefault(role, KvUse())
            if role in self._uses and sum(totals) > 0:
                share = min(max(sum(blocks.get(("active", role), ())) / sum(totals), 0.0), 1.0)
                self._uses[role].add(self._until_s - self._start_s, now - self._start_s, share)
        self._until_s = now
        self.tiers.note(text)
        self.drafts.note(text)
