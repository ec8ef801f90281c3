"""What the rest of the stack sees of an engine: a protocol, its traits and its load."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec

from serving.model.card import Bootstrap, ModelCard, ModelType
from serving.model.files import ModelFiles
from serving.router import StepCosts
from serving.runtime.server import AnswerStream
from serving.worker.kv_events import KvEventPublisher


class EngineError(Exception):
    """An engine cannot be loaded or started; the message says why and what would help."""


@dataclass(frozen=True)
class EngineCall:
    """The exact call that makes an engine, as `--dry-run` shows it."""

    function: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = "".join(f"    {name}={value!r},\n" for name, value in self.arguments.items())
        return f"{self.function}(\n{lines})" if lines else f"{self.function}()"


@dataclass(frozen=True, kw_only=True)
class EngineTraits:
    """What an engine reports about itself once it runs."""

    model_type: ModelType = ModelType.Backend
    block_size: int = 16
    """Tokens in a KV block."""
    context_length: int | None = None
    num_ranks: int = 1
    """Data-parallel ranks; each is routed to separately."""
    has_kv_events: bool = False
    step_costs: StepCosts | None = None
    """What its steps cost, for router modes that predict times; None if it does not know."""
    guided_decoding: tuple[str, ...] = ()
    """What it can make an answer look like: some of `json`, `regex`, `choice` and `grammar`."""
    continues_constrained: bool = False
    """Whether an answer that must look like something can continue here after its worker was lost: a grammar begins again."""
    has_embeddings: bool = False
    adapters: tuple[str, ...] = ()
    """The LoRA adapters that clients may ask for, by name."""
    tool_call_parser: str = ""
    """The format in which it calls tools, if it has no model that decides that (see `ModelCard`)."""
    bootstrap: Bootstrap | None = None
    """For a prefill worker that may be called together with a decode worker."""


class KvTransfers(NamedTuple):
    """What a worker that shares its requests with others has done with their KV since it started."""

    num_held: int = 0
    """Prompts whose KV it keeps for others now."""
    num_waiting: int = 0
    """Prompts that wait now for room in its memory or for their other worker."""
    num_loading: int = 0
    """Prompts whose KV it is reading now."""
    num_offered: int = 0
    num_read: int = 0
    num_failed: int = 0
    """Reads that failed, including those that could not even start."""
    num_expired: int = 0
    """Offers whose lease ran out."""
    num_bytes: int = 0
    """Bytes read."""
    seconds: float = 0.0
    """Total time of all reads."""


class KvTier(NamedTuple):
    """What a rank keeps in one tier beyond its GPU, and what it has done there since it started.

    Bytes are those of the whole KV, even if less is actually moved.
    """

    name: str
    """`host`, `disk` or `store`."""
    used_bytes: float = 0.0
    """For a store: the bytes that this rank knows of."""
    capacity_bytes: float = 0.0
    num_asked: int = 0
    """Chunks looked up in the tier; not counted for host memory."""
    num_hits: int = 0
    num_reads: int = 0
    read_bytes: float = 0.0
    read_s: float = 0.0
    """Total time of all reads; `write_s` likewise."""
    num_writes: int = 0
    write_bytes: float = 0.0
    write_s: float = 0.0
    num_faults: int = 0
    """Chunks that were wrong; reads, writes and look-ups that failed or took too long."""
    num_refused: int = 0
    """Chunks for which there was no room; in host memory, requests."""
    num_evicted: int = 0
    num_flushes: int = 0
    """Copies between GPU and host that a step had to wait for."""
    stall_s: float = 0.0
    """How long steps waited for them."""


class RankWork(NamedTuple):
    """The work of a rank in tokens, as planners need it."""

    queued_prefill_tokens: int = 0
    """Prompt tokens still to be computed."""
    decode_kv_tokens: int = 0
    """Context of the requests that are decoding."""
    queued_decode_kv_tokens: int = 0
    """Context of the requests that wait to decode."""


class RankDrafts(NamedTuple):
    """What came of a rank's drafts so far, as vLLM counts it."""

    num_drafts: int = 0
    """How often drafts of a request were verified."""
    num_draft_tokens: int = 0
    """How many tokens that were."""
    num_accepted: tuple[int, ...] = ()
    """How often each draft was accepted, by position."""
    num_batches: int = 0
    """In how many steps of the engine."""


class EngineLoad(NamedTuple):
    """What a rank of an engine is doing now."""

    num_running: int = 0
    num_waiting: int = 0
    kv_active_blocks: int = 0
    kv_total_blocks: int = 0
    max_num_seqs: int = 0
    kv_transfers: KvTransfers = KvTransfers()
    """Of the whole worker, reported by its first rank."""
    kv_tiers: tuple[KvTier, ...] = ()
    work: RankWork | None = None
    """None if the engine does not report it."""
    drafts: RankDrafts | None = None
    """None if it does not speculate, or does not report it."""


class Engine(Protocol):
    """An engine in this process (it may run processes of its own)."""

    @property
    def calls(self) -> tuple[EngineCall, ...]:
        """The calls that make it; known before anything is loaded."""
        ...

    @property
    def traits(self) -> EngineTraits:
        """What it reports about itself; known once it has started."""
        ...

    async def start(self, files: ModelFiles) -> None:
        """Load the model.

        Raises:
            EngineError: it cannot be loaded, or does not start.
        """
        ...

    def publish_to(self, publishers: Sequence[KvEventPublisher]) -> None:
        """Report KV events from now on, each rank's to its publisher; called once (an empty list: report none)."""
        ...

    def service(self, request: msgspec.Raw, stream: AnswerStream) -> None:
        """Start to serve a request."""
        ...

    def load(self, rank: int) -> EngineLoad:
        """Return what a rank is doing."""
        ...

    async def failed(self) -> None:
        """Wait until the engine has failed for good, and raise the reason."""
        ...

    async def close(self) -> None:
        """Stop everything and release everything, even after a failed start."""
        ...


@runtime_checkable
class TransferringEngine(Engine, Protocol):
    """An engine that moves KV between workers, or to a store, with our own agents."""

    @property
    def needs_token(self) -> bool:
        """Whether it will do so with its current settings."""
        ...

    def transfer_with(self, token: Callable[[], bytes]) -> None:
        """Set a function that returns the current cluster token, which proves membership; called before the start."""
        ...


@runtime_checkable
class HoldingEngine(Engine, Protocol):
    """An engine that may hold KV for others."""

    async def released(self) -> None:
        """Wait until nobody will read the KV that it holds any more; a draining worker waits for this."""
        ...


@runtime_checkable
class RegisteredEngine(Engine, Protocol):
    """An engine that needs to know under which card it was registered."""

    def registered_as(self, card: ModelCard) -> None:
        """Set its model's card; called before the first request."""
        ...
