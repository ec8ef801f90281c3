"""Model cards: what a worker registers of the model it serves, and how the frontend gets its tokenizer and template.

A card names its files by their SHA-256; the frontend fetches them from any instance that has them, once, so that it
needs no access to the worker's disk.
"""

import hashlib
import os
from collections.abc import AsyncIterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta

from serving.model.hub import SCHEME, WEIGHTS, ModelError, fetch, is_hub_id
from serving.router import check_live_mode
from serving.runtime.address import EndpointAddress

__all__ = ["ModelCard", "ModelError", "ModelFiles", "ModelType", "local_weights", "model_name", "vocab_size"]

CARDS = "v1/mdc/"
"""Where cards are registered, as `v1/mdc/{namespace}/{component}/{endpoint}/{instance id, hexadecimal}`."""

FILES = "model_files"
"""The endpoint that sends a card's files."""

FILE_NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
CHUNK_BYTES = 256 * 1024
MAX_RANKS = 1024
BYTES_CONTEXT = 131_072


class ModelType(Enum):
    """What an engine takes: token ids, or whole OpenAI requests of one kind."""

    Backend = "backend"
    Chat = "chat"
    Completion = "completion"


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """What one instance serves."""

    name: str
    model_type: ModelType
    namespace: str
    component: str
    endpoint: str
    instance_id: int
    model_path: str = ""
    context_length: Annotated[int, Meta(ge=1)] = BYTES_CONTEXT
    kv_cache_block_size: Annotated[int, Meta(ge=1)] = 16
    migration_limit: Annotated[int, Meta(ge=0, le=1023)] = 0
    files: dict[str, str] = {}
    """SHA-256 of each file of the model that the frontend needs; without a tokenizer.json tokens are bytes of UTF-8."""
    eos_token_ids: list[int] = []
    num_ranks: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    has_kv_events: bool = False
    router_mode: str | None = None
    """Overrides the frontend's router mode for this model."""
    user_data: dict[str, Any] | None = None
    created: int = 0

    @classmethod
    def parse(cls, key: str, value: bytes) -> Self:
        """Read what discovery holds under a key.

        Raises:
            ValueError: it is no card, another key's, or asks for what does not exist.
        """
        try:
            card = msgspec.json.decode(value, type=cls)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        if card.key != key:
            raise ValueError(f"its key is {card.key}")
        if card.router_mode is not None:
            check_live_mode(card.router_mode)
        return card

    @property
    def address(self) -> EndpointAddress:
        """The endpoint that serves the model."""
        return EndpointAddress(self.namespace, self.component, self.endpoint)

    @property
    def key(self) -> str:
        """Its key in discovery."""
        return f"{CARDS}{self.namespace}/{self.component}/{self.endpoint}/{self.instance_id:x}"

    @property
    def checksum(self) -> str:
        """What two instances must agree on to serve one model together."""
        common = [self.name, self.model_type.value, *self.address, self.kv_cache_block_size, sorted(self.files.items())]
        return hashlib.sha256(msgspec.json.encode(common)).hexdigest()

    def is_like(self, other: "ModelCard") -> bool:
        """Tell whether two instances were started with the same settings."""
        return msgspec.structs.replace(self, instance_id=other.instance_id, created=other.created) == other


class ModelFiles:
    """A model's small files, by name."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self.contents = contents

    @classmethod
    def read(cls, model_path: str, model_config: str = "") -> "ModelFiles":
        """Read them from a folder or a GGUF file, or fetch them from the Hugging Face hub; no path: there are none.

        Args:
            model_path: the model.
            model_config: a folder or Hugging Face id whose files go before those that a GGUF file tells.

        Raises:
            ModelError: they cannot be had.
        """
        if not model_path:
            return cls({})
        given = cls._folder(model_config).contents if model_config else {}
        path = Path(model_path).expanduser()
        if path.suffix == ".gguf" and path.is_file():
            from serving.model.gguf import read_gguf

            return cls(read_gguf(path, with_tokenizer="tokenizer.json" not in given) | given)
        return cls(cls._folder(model_path).contents | given)

    @classmethod
    def _folder(cls, model_path: str) -> "ModelFiles":
        folder = Path(model_path).expanduser()
        if is_hub_id(model_path):
            folder = fetch(model_path, FILE_NAMES)
        elif not folder.is_dir():
            problem = "is not a folder or a GGUF file" if folder.exists() else "does not exist"
            raise ModelError(f"{model_path} {problem}; a folder, a GGUF file or a Hugging Face id was expected")
        contents = {name: (folder / name).read_bytes() for name in FILE_NAMES if (folder / name).is_file()}
        if "tokenizer.json" not in contents:
            raise ModelError(f"{model_path} has no tokenizer.json; a folder of a Hugging Face model was expected")
        return cls(contents)

    def json(self, name: str) -> dict[str, Any]:
        """Return a JSON file, empty if there is none.

        Raises:
            ModelError: it is not a JSON object.
        """
        try:
            value: dict[str, Any] = msgspec.json.decode(self.contents.get(name, b"{}"), type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ModelError(f"{name} of the model is not a JSON object: {error}") from error
        return value

    @property
    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of each."""
        return {name: hashlib.sha256(content).hexdigest() for name, content in self.contents.items()}

    @property
    def context_length(self) -> int:
        """Return the model's longest sequence, from its config.json."""
        config = self.json("config.json")
        config = config | config.get("text_config", {})
        return int(config.get("max_position_embeddings") or config.get("n_positions") or BYTES_CONTEXT)

    @property
    def vocab_size(self) -> int | None:
        """Return how many tokens the model has, where its config.json tells."""
        config = self.json("config.json")
        size = (config | config.get("text_config", {})).get("vocab_size")
        return None if size is None else int(size)

    @property
    def eos_token_ids(self) -> list[int]:
        """Return the tokens that end an answer, from generation_config.json or config.json."""
        for name in ("generation_config.json", "config.json"):
            value = self.json(name).get("eos_token_id")
            if value is not None:
                return list(value) if isinstance(value, list) else [int(value)]
        return []

    async def send(self, request: Any) -> AsyncIterator[bytes]:
        """Serve the files by name, in pieces."""
        content = self.contents.get(str(request), b"")
        for start in range(0, len(content), CHUNK_BYTES):
            yield content[start : start + CHUNK_BYTES]


def model_name(model_path: str) -> str:
    """Derive the served name: the repository, folder or file name."""
    if is_hub_id(model_path):
        return model_path.removeprefix(SCHEME).rstrip("/")
    local = Path(os.path.abspath(Path(model_path).expanduser()))  # noqa: PTH100 (links keep their own names)
    return local.stem if local.suffix == ".gguf" else local.name


def vocab_size(model_path: str) -> int:
    """Return how many tokens a model has.

    Raises:
        ModelError: its files cannot be had, or do not tell.
    """
    files = ModelFiles.read(model_path)
    size = files.vocab_size or len(files.json("tokenizer.json").get("model", {}).get("vocab", ()))
    if not size:
        raise ModelError(f"the files of {model_path} do not tell how many tokens it has")
    return int(size)


def local_weights(model_path: str) -> str:
    """Return the path of a model with its weights, fetched from the hub if need be.

    Raises:
        ModelError: they cannot be had.
    """
    if is_hub_id(model_path):
        return str(fetch(model_path, (*FILE_NAMES, *WEIGHTS)))
    return str(Path(model_path).expanduser())
