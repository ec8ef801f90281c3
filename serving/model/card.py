"""Model cards: what a worker registers about the model it serves."""

import hashlib
from enum import Enum
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta

from serving.model.context import BYTES_CONTEXT
from serving.role import Role as Role
from serving.router import StepCosts, check_registered_mode
from serving.runtime.address import EndpointAddress

MAX_RANKS = 1024

COMMON = (
    "name",
    "type",
    "namespace",
    "KV block size",
    "parser of tool calls",
    "parser of reasoning",
    "files of the model",
    "adapters",
)
"""The settings on which instances that serve one model together must agree."""

Migrations = Annotated[int, Meta(ge=0, le=1023)]
"""How often a request may move to another worker."""


def key_prefix(*place: str) -> str:
    """Return the key prefix of the cards of a namespace, component and endpoint, of all if none is named."""
    return "".join(f"{part}/" for part in ("v1/mdc", *place))


class ModelType(Enum):
    """The input of an engine: token ids, or whole OpenAI requests of one kind."""

    Backend = "backend"
    Chat = "chat"
    Completion = "completion"


class Bootstrap(msgspec.Struct, frozen=True):
    """How the two workers of a request meet, if they are called at the same time (destination first)."""

    params: dict[str, Any]
    """Goes into the `kv_transfer_params` of both calls, with a `bootstrap_room` that is drawn for the request."""
    is_needed: bool = False
    """Whether the engine supports no other way."""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """The model that one instance serves."""

    name: str
    model_type: ModelType
    namespace: str
    component: str
    endpoint: str
    instance_id: int
    role: Role = "aggregated"
    bootstrap: Bootstrap | None = None
    """Set by a prefill worker that can be called together with a decode worker."""
    model_path: str = ""
    context_length: Annotated[int, Meta(ge=1)] = BYTES_CONTEXT
    kv_cache_block_size: Annotated[int, Meta(ge=1)] = 16
    migration_limit: Migrations = 0
    files: dict[str, str] = {}
    """SHA-256 of each file of the model that the frontend needs; without a tokenizer.json tokens are bytes of UTF-8."""
    eos_token_ids: list[int] = []
    num_ranks: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    has_kv_events: bool = False
    step_costs: StepCosts | None = None
    """What the engine's steps cost, for router modes that predict times; None if it does not know."""
    guided_decoding: list[str] = []
    """What the engine can make an answer look like: some of `json`, `regex`, `choice` and `grammar`."""
    continues_constrained: bool = False
    """Whether such an answer can continue on another worker after its own was lost."""
    has_embeddings: bool = False
    """Whether the engine returns embeddings."""
    adapters: list[str] = []
    """The LoRA adapters that clients may ask for, by name."""
    tool_call_parser: str = ""
    """The format in which the model calls tools, by vLLM's name of its parser."""
    reasoning_parser: str = ""
    """The format in which the model thinks before it answers, by vLLM's name of its parser."""
    router_mode: str | None = None
    """Overrides the frontend's router mode for this model."""
    user_data: dict[str, Any] | None = None
    created: int = 0

    @classmethod
    def parse(cls, key: str, value: bytes) -> Self:
        """Read the value that discovery has under a key.

        Raises:
            ValueError: it is not a card, belongs to another key, or asks for something that does not exist.
        """
        try:
            card = msgspec.json.decode(value, type=cls)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        if card.key != key:
            raise ValueError(f"it belongs under the key {card.key}")
        if card.router_mode is not None:
            check_registered_mode(card.router_mode)
        return card

    @property
    def address(self) -> EndpointAddress:
        """The endpoint that serves the model."""
        return EndpointAddress(self.namespace, self.component, self.endpoint)

    @property
    def key(self) -> str:
        """Its key in discovery: `v1/mdc/{namespace}/{component}/{endpoint}/{instance id, hexadecimal}`."""
        return f"{key_prefix(*self.address)}{self.instance_id:x}"

    @property
    def checksum(self) -> str:
        """What instances must agree on to serve one model together, whatever their roles and addresses."""
        return hashlib.sha256(msgspec.json.encode(self._common())).hexdigest()

    def differences(self, other: "ModelCard") -> str:
        """Describe the differences that keep this card and another of the same name from serving one model together."""
        pairs = zip(self._common(), other._common(), strict=True)
        differing = [(what, *pair) for what, pair in zip(COMMON, pairs, strict=True) if pair[0] != pair[1]]
        return ", ".join(
            what if isinstance(mine, list) else f"{what} {mine} and not {its}" for what, mine, its in differing
        )

    def _common(self) -> list[Any]:
        files = sorted(self.files.items())
        parsers = self.tool_call_parser, self.reasoning_parser
        return [
            self.name,
            self.model_type.value,
            self.namespace,
            self.kv_cache_block_size,
            *parsers,
            files,
            self.adapters,
        ]

    def is_like(self, other: "ModelCard") -> bool:
        """Return whether two instances were started with the same settings."""
        own = {name: getattr(other, name) for name in ("instance_id", "created", "bootstrap")}
        return msgspec.structs.replace(self, **own) == other
