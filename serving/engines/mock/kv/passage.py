"""How long KV takes from other workers to this one: the links of virtual time, under the real clock.

Each of our ranks and each rank of another worker has its links. What others send and receive meanwhile is not known here, and
neither are the links of nodes and racks.
"""

from collections.abc import Hashable
from typing import NamedTuple

from mocker.network.config import TransferConfig
from mocker.network.links import Links
from mocker.network.traffic import Clock, Traffic
from mocker.timing.kv_size import KvSize
from serving.engines.kv.params import RemoteKv
from serving.engines.mock.clock import WallClock
from serving.engines.mock.kv.moved import move
from serving.transfer.config import TransferRunConfig


class KvShape(NamedTuple):
    """What the KV of a worker is like for others."""

    size: KvSize
    num_gpus: int
    """How many GPUs of a rank send or receive it."""


class Passage:
    """See the module."""

    def __init__(self, shape: KvShape, transfer: TransferRunConfig, clock: Clock | None = None) -> None:
        """Prepare links, on the wall clock if no other is given."""
        config = TransferConfig(
            bandwidth_gb_s=transfer.transfer_bandwidth_gb_s,
            latency_ms=transfer.transfer_latency_ms,
            block_us=transfer.transfer_block_us,
        )
        self._shape = shape
        self._clock = clock or WallClock()
        self._links = Links(config)
        self._traffic = Traffic(self._links, self._clock)
        self._places: dict[Hashable, int] = {}

    async def move(self, kv: RemoteKv, num_blocks: int, rank: int) -> float:
        """Wait as long as the last so many blocks of a prompt take to one of our ranks; return how many bytes they have."""
        num_bytes = self._shape.size.of(num_blocks)
        await move(
            self._traffic,
            object(),
            source=self._place(kv.remote_engine_id, kv.remote_num_gpus),
            target=self._place(rank, self._shape.num_gpus),
            num_bytes=num_bytes,
            num_blocks=num_blocks,
        )
        return num_bytes

    def _place(self, who: Hashable, num_gpus: int) -> int:
        if who not in self._places:
            self._links.add_rank(num_gpus, self._clock.now)
            self._places[who] = len(self._places)
        return self._places[who]
