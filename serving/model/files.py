"""A model's small files: a worker reads them from a folder, a GGUF file or the hub, and sends them to others.

A card names its files by their SHA-256; a frontend gets them once, from any instance that has them, so that it needs
no access to the worker's disk.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from serving.model.context import BYTES_CONTEXT
from serving.model.errors import ModelError
from serving.model.hub import WEIGHTS, fetch, is_hub_id
from serving.runtime.address import EndpointAddress

FILE_NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
)
CHUNK_BYTES = 256 * 1024
RECEIVE_TIMEOUT_S = 30.0
EXPECTED = "expected a folder, a GGUF file or a Hugging Face id"


def check_exists(model_path: str) -> None:
    """Refuse a model that is neither on this host nor an id, before anything is started for it.

    Raises:
        ModelError: it does not exist.
    """
    if model_path and not is_hub_id(model_path) and not Path(model_path).expanduser().exists():
        raise ModelError(f"{model_path} does not exist; {EXPECTED}")


class ModelFiles:
    """A model's small files, by name."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self.contents = contents

    @classmethod
    def read(cls, model_path: str, model_config: str = "") -> "ModelFiles":
        """Read them from a folder or a GGUF file, or from the Hugging Face hub; without a path, there are none.

        Args:
            model_path: the model.
            model_config: a folder or Hugging Face id whose files take precedence over those in a GGUF file.

        Raises:
            ModelError: they cannot be found or read.
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
            check_exists(model_path)
            raise ModelError(f"{model_path} is not a folder or a GGUF file; {EXPECTED}")
        contents = {name: (folder / name).read_bytes() for name in FILE_NAMES if (folder / name).is_file()}
        if "tokenizer.json" not in contents:
            raise ModelError(f"{model_path} has no tokenizer.json; expected a folder of a Hugging Face model")
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
        """Return the size of the model's vocabulary, if its config.json has it."""
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

    @classmethod
    async def receive(
        cls, digests: Mapping[str, str], ask: Callable[[str], AsyncIterable[bytes]], known: dict[str, bytes]
    ) -> "ModelFiles":
        """Get files from an instance that serves them by `send`; `known` keeps them by SHA-256, so each is sent once.

        Raises:
            ModelError: one arrives damaged, or not in time.
        """
        for name, digest in digests.items():
            if digest not in known:
                known[digest] = await _received(name, digest, ask(name))
        return cls({name: known[digest] for name, digest in digests.items()})

    async def send(self, request: Any) -> AsyncIterator[bytes]:
        """Serve the files by name, in pieces."""
        content = self.contents.get(str(request), b"")
        for start in range(0, len(content), CHUNK_BYTES):
            yield content[start : start + CHUNK_BYTES]


async def _received(name: str, digest: str, pieces: AsyncIterable[bytes]) -> bytes:
    try:
        async with asyncio.timeout(RECEIVE_TIMEOUT_S):
            content = b"".join([piece async for piece in pieces])
    except TimeoutError as error:
        raise ModelError(f"{name} of the model did not arrive within {RECEIVE_TIMEOUT_S:g} s") from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise ModelError(f"{name} of the model arrived damaged")
    return content


def files_address(address: EndpointAddress) -> EndpointAddress:
    """Return the endpoint that sends the files of an address's model."""
    return address.beside("model_files")


def vocab_size(model_path: str) -> int:
    """Return the size of a model's vocabulary.

    Raises:
        ModelError: its files cannot be found, or do not contain it.
    """
    files = ModelFiles.read(model_path)
    size = files.vocab_size or len(files.json("tokenizer.json").get("model", {}).get("vocab", ()))
    if not size:
        raise ModelError(f"the files of {model_path} do not give its vocabulary size")
    return int(size)


def local_weights(model_path: str) -> str:
    """Return the path of a model with its weights, fetched from the hub if need be.

    Raises:
        ModelError: they cannot be found or downloaded.
    """
    if is_hub_id(model_path):
        return str(fetch(model_path, (*FILE_NAMES, *WEIGHTS)))
    return str(Path(model_path).expanduser())
