"""The KV that flights take from one rank to another, on the links between them."""

from collections.abc import Callable
from functools import partial

from dynabench.virtual.clock import Clock
from dynabench.virtual.overlap import hidden_bytes
from mocker import Sequence as EngineSequence
from mocker.network.config import TransferConfig
from mocker.network.traffic import Traffic
from mocker.timing.kv_size import KvSize
from serving.life.effects import Extend, Transfer
from serving.life.flight import Flight


class Transfers:
    """Carries out the transfers of flights."""

    def __init__(
        self,
        config: TransferConfig,
        kv_size: KvSize | None,
        traffic: Traffic,
        clock: Clock,
        *,
        block_size: int,
    ) -> None:
        self._kv_size = kv_size  # None: no KV is sent
        self.sends_chunks = config.overlap == "chunk"
        """Whether KV is sent chunk by chunk while a prompt is computed."""
        self._sends_layers = config.overlap == "layer"
        self._traffic = traffic
        self._clock = clock
        self._block_size = block_size

    @property
    def kv_size(self) -> KvSize:
        """The size of KV that is sent."""
        assert self._kv_size is not None
        return self._kv_size

    def start(self, flight: Flight, transfer: Transfer, on_end: Callable[[Flight], object]) -> None:
        """Begin to read the KV of a flight, and call back when it has arrived."""
        target, source = flight.decode, flight.leaving or flight.prefill
        assert target is not None
        assert source is not None
        assert source.slot is not None
        assert target.slot is not None
        assert isinstance(target.call, EngineSequence)
        count, hidden = transfer.num_blocks, 0.0
        if count is None:
            count = -(-target.call.num_prompt // self._block_size) - target.call.num_cached_blocks
        num_bytes = self.kv_size.of(count)
        if transfer.num_blocks is None and self._sends_layers and flight.leaving is None:
            assert isinstance(source.call, EngineSequence)
            hidden = self._num_hidden_bytes(num_bytes, source.slot, target.slot, source.call.first_scheduled_s)
        self._traffic.start(
            flight.number,
            partial(on_end, flight),
            source=source.slot,
            target=target.slot,
            num_bytes=num_bytes - hidden,
            num_blocks=count,
            num_bytes_ahead=hidden,
            is_last=transfer.is_last,
        )

    def extend(self, flight: Flight, more: Extend) -> None:
        """Read more blocks."""
        num_bytes = self.kv_size.of(more.num_blocks)
        self._traffic.extend(flight.number, num_bytes=num_bytes, num_blocks=more.num_blocks, is_last=more.is_last)

    def drop(self, flight: Flight) -> None:
        """End a transfer early."""
        self._traffic.drop(flight.number)

    def _num_hidden_bytes(self, num_bytes: float, source: int, target: int, since_s: float) -> float:
        """Return the bytes that were sent layer by layer before the prefill ended, which began at `since_s`."""
        return hidden_bytes(
            num_bytes,
            bandwidth=self._traffic.links.bandwidth(source, target),
            prefill_s=self._clock.now - since_s,
            num_layers=self.kv_size.num_layers,
        )
