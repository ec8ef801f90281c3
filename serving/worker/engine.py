"""What an engine is to the rest of us: a protocol, and what an engine says of itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec

from serving.model.card import Bootstrap, ModelType
from serving.model.files import ModelFiles
from serving.runtime.server import Stream
from serving.worker.kv_events import KvEventPublisher


class EngineError(Exception):
    """An engine that cannot be loaded or started; the message says why and what would help."""


@dataclass(frozen=True)
class EngineCall:
    """An exact call that makes an engine, as `--dry-run` shows it."""

    function: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = "".join(f"    {name}={value!r},\n" for name, value in self.arguments.items())
        return f"{self.function}(\n{lines})" if lines else f"{self.function}()"


@dataclass(frozen=True, kw_only=True)
class EngineTraits:
    """What an engine says of itself once it runs."""

    model_type: ModelType = ModelType.Backend
    block_size: int = 16
    """Tokens in a KV block."""
    context_length: int | None = None
    num_ranks: int = 1
    """Data-parallel ranks, each of which is routed to by itself."""
    has_kv_events: bool = False
    bootstrap: Bootstrap | None = None
    """Of a prefill worker that may be called together with a decode worker."""


class KvTransfers(NamedTuple):
    """What a worker that shares its requests with others has done with their KV since it was started."""

    num_held: int = 0
    """Prompts whose KV it keeps for others now."""
    num_waiting: int = 0
    """Those that wait now, for room in its memory or for their other worker."""
    num_loading: int = 0
    """Those whose KV is on its way here now."""
    num_offered: int = 0
    num_read: int = 0
    num_failed: int = 0
    """Reads, or those that could not even begin."""
    num_expired: int = 0
    """Offers whose lease ran out."""
    num_bytes: int = 0
    """Read."""
    seconds: float = 0.0
    """That reads took, together."""


class KvTier(NamedTuple):
    """What a rank keeps in a place beyond its GPU, and what it did there since it was started.

    Bytes are those of the whole KV, also where less is really moved.
    """

    name: str
    """`host`, `disk` or `store`."""
    used_bytes: float = 0.0
    """Of a store, what this rank knows of."""
    capacity_bytes: float = 0.0
    num_asked: int = 0
    """Chunks that were looked up there; not counted for host memory."""
    num_hits: int = 0
    num_reads: int = 0
    read_bytes: float = 0.0
    read_s: float = 0.0
    """That reads took, together, as `write_s`."""
    num_writes: int = 0
    write_bytes: float = 0.0
    write_s: float = 0.0
    num_faults: int = 0
    """Chunks that were wrong; reads, writes and look-ups that failed or took too long."""
    num_refused: int = 0
    """Chunks for which there was no room; in host memory, requests."""
    num_evicted: int = 0
    num_flushes: int = 0
    """Copies between GPU and host for which a step had to wait."""
    stall_s: float = 0.0
    """How long steps did."""


class Work(NamedTuple):
    """What a rank has to do, in tokens, as planners ask for it."""

    queued_prefill_tokens: int = 0
    """Prompt tokens that are still to be computed."""
    decode_kv_tokens: int = 0
    """Context of the requests that are decoding."""
    queued_decode_kv_tokens: int = 0
    """Context of those that wait to decode."""


class EngineLoad(NamedTuple):
    """What a rank of an engine is doing now."""

    num_running: int = 0
    num_waiting: int = 0
    kv_active_blocks: int = 0
    kv_total_blocks: int = 0
    max_num_seqs: int = 0
    kv_transfers: KvTransfers = KvTransfers()
    """Of the whole worker; its first rank has them."""
    kv_tiers: tuple[KvTier, ...] = ()
    work: Work | None = None
    """None of an engine that does not know."""


class Engine(Protocol):
    """An engine in this process (its own processes may be others)."""

    @property
    def calls(self) -> tuple[EngineCall, ...]:
        """How it is made; known before anything is loaded."""
        ...

    @property
    def traits(self) -> EngineTraits:
        """Known once started."""
        ...

    async def start(self, files: ModelFiles) -> None:
        """Load the model.

        Raises:
            EngineError: it cannot be loaded, or does not start.
        """
        ...

    def publish_to(self, publishers: Sequence[KvEventPublisher]) -> None:
        """Report KV events from now on, each rank's to its publisher; called once, if it has any."""
        ...

    def service(self, request: msgspec.Raw, stream: Stream) -> None:
        """Take up a request."""
        ...

    def load(self, rank: int) -> EngineLoad:
        """Return what a rank is doing."""
        ...

    async def failed(self) -> None:
        """Wait until the engine has failed for good, and raise why."""
        ...

    async def close(self) -> None:
        """Stop everything and give everything back, also after a start that failed."""
        ...


@runtime_checkable
class TransferringEngine(Engine, Protocol):
    """An engine that moves KV between workers, or to a store, by agents of ours."""

    @property
    def needs_token(self) -> bool:
        """Whether it will, as it is set."""
        ...

    def transfer_with(self, token: Callable[[], bytes]) -> None:
        """Prove with the token that this returns, as it is then, to be of our cluster; called before it is started."""
        ...


@runtime_checkable
class HoldingEngine(Engine, Protocol):
    """An engine that may hold KV for others."""

    async def released(self) -> None:
        """Wait until nobody will read KV any more that it holds: a worker that drains does."""
        ...
