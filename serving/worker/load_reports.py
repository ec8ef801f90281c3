"""Load reports: what each rank of a worker is doing, published when it changes and at least every second."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from serving.runtime.address import EndpointAddress
from serving.runtime.server import AnswerStream
from serving.worker.engine import KvTier, KvTransfers, RankDrafts, RankWork

if TYPE_CHECKING:
    from serving.runtime.distributed import DistributedRuntime

REPORT_S = 0.25
HEARTBEAT_S = 1.0

TOPIC = "load_metrics"


class LoadReport(msgspec.Struct, array_like=True):
    """What a rank of a worker is doing; `epoch` and `number` identify the KV events that it has sent."""

    instance_id: int
    rank: int
    epoch: int
    number: int
    num_running: int
    num_waiting: int
    kv_active_blocks: int
    kv_total_blocks: int
    max_num_seqs: int
    kv_transfers: KvTransfers = KvTransfers()
    kv_tiers: tuple[KvTier, ...] = ()
    work: RankWork | None = None
    drafts: RankDrafts | None = None

    def metrics(self) -> dict[str, Any]:
        """Return the report in the form of Dynamo's `load_metrics` endpoint."""
        total = max(self.kv_total_blocks, 1)
        return {
            "worker_stats": {
                "data_parallel_rank": self.rank,
                "request_active_slots": self.num_running,
                "request_total_slots": self.max_num_seqs,
                "num_requests_waiting": self.num_waiting,
            },
            "kv_stats": {
                "kv_active_blocks": self.kv_active_blocks,
                "kv_total_blocks": self.kv_total_blocks,
                "gpu_cache_usage_perc": self.kv_active_blocks / total,
            },
        }


class LoadReporter:
    """Publishes a worker's load, and serves it next to its endpoint as `load_metrics`."""

    def __init__(
        self,
        runtime: "DistributedRuntime",
        address: EndpointAddress,
        load: Callable[[int], LoadReport],
        *,
        num_ranks: int = 1,
    ) -> None:
        """Prepare to report what `load` returns for each rank."""
        self._runtime = runtime
        self._address = address
        self._load = load
        self._ranks = range(num_ranks)

    async def start(self) -> None:
        """Serve load, and report it until closed."""
        await self._runtime.events.announce(self._address.subject(TOPIC))
        await self._runtime.serve(self._address.beside(TOPIC), self._serve)
        self._task = asyncio.create_task(self._report())

    async def close(self) -> None:
        """Stop reporting."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _serve(self, request: Any, stream: AnswerStream) -> None:
        for rank in self._ranks:
            stream.send(self._load(rank).metrics())
        stream.end()

    async def _report(self) -> None:
        loop = asyncio.get_running_loop()
        sent: dict[int, tuple[LoadReport, float]] = {}
        subject = self._address.subject(TOPIC)
        while True:
            for rank in self._ranks:
                report = self._load(rank)
                before = sent.get(rank)
                if before is None or before[0] != report or loop.time() - before[1] > HEARTBEAT_S:
                    sent[rank] = (report, loop.time())
                    await self._runtime.events.publish(subject, msgspec.msgpack.encode(report))
            await asyncio.sleep(REPORT_S)
