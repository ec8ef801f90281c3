"""The names that vLLM gives to blocks: a hash of each block's tokens and of the block before it.

    name of block i = hash(name of block i - 1, its tokens, its extra keys)

The first block's parent is the hash of a seed. Extra keys say what its KV depends on beside tokens.
"""

import hashlib
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

from xxhash import xxh3_128_digest

from serving.runtime.world import world
from serving.stand_in.config import HashAlgorithm, KvEventsConfig
from serving.worker.protocol import CacheScope

DEFAULT_SEED = "vllm-none-hash"
"""The seed of cryptographic hashes if PYTHONHASHSEED is not set, so that all servers name blocks alike."""

Key = tuple[str, ...]
ExternalHash = bytes | int
"""A name as events have it."""

_pickled = partial(pickle.dumps, protocol=pickle.HIGHEST_PROTOCOL)


def extra_keys(scope: CacheScope | None, *, is_first: bool) -> tuple[Key, ...] | None:
    """Return what a block's KV depends on beside its tokens; the salt is only in the first block."""
    if scope is None:
        return None
    keys: list[Key] = []
    if scope.lora_name:
        keys.append(("lora", scope.lora_name, scope.lora_path))
    if scope.salt and is_first:
        keys.append(("cache_salt", scope.salt))
    return tuple(keys) or None


def untagged(keys: tuple[Key, ...] | None) -> tuple[str, ...] | None:
    """Return extra keys as events have them: names of adapters and salts alone."""
    return None if keys is None else tuple([key[1] for key in keys])


class BlockHasher:
    """Names blocks."""

    def __init__(self, config: KvEventsConfig) -> None:
        self._hash = FUNCTIONS[config.hash_algorithm]
        self._is_short = config.use_int_block_hashes
        self.root = self._hash(_seed(config))
        """What stands for the parent of a first block."""

    def name(self, parent: bytes | None, tokens: list[int], keys: tuple[Key, ...] | None) -> bytes:
        """Name a block after `parent` (none: it is a first one)."""
        return self._hash((parent or self.root, tuple(tokens), keys))

    def external(self, name: bytes) -> ExternalHash:
        """Return a name as events have it."""
        return int.from_bytes(name[-8:], "big") if self._is_short else name


def _seed(config: KvEventsConfig) -> str:
    if config.hash_seed is not None:
        return config.hash_seed
    # Where collisions can be computed, nobody may know the seed beforehand.
    return DEFAULT_SEED if config.hash_algorithm.startswith("sha256") else world().token_hex(32)


def _sha256(value: Any) -> bytes:
    return hashlib.sha256(_pickled(value)).digest()


def _sha256_cbor(value: Any) -> bytes:
    return hashlib.sha256(cbor(value)).digest()


def _xxhash(value: Any) -> bytes:
    return xxh3_128_digest(_pickled(value))


def _xxhash_cbor(value: Any) -> bytes:
    return xxh3_128_digest(cbor(value))


FUNCTIONS: dict[HashAlgorithm, Callable[[Any], bytes]] = {
    "sha256": _sha256,
    "sha256_cbor": _sha256_cbor,
    "xxhash": _xxhash,
    "xxhash_cbor": _xxhash_cbor,
}


def cbor(value: Any) -> bytes:
    """Encode what is hashed in CBOR's canonical form (RFC 8949): numbers from 0 on, bytes, text, tuples and None."""
    match value:
        case None:
            return b"\xf6"
        case int():
            return _head(0, value)
        case bytes():
            return _head(2, len(value)) + value
        case str():
            data = value.encode()
            return _head(3, len(data)) + data
    return b"".join([_head(4, len(value)), *map(cbor, value)])


def _head(kind: int, number: int) -> bytes:
    """Write a kind and a number in as few bytes as possible."""
    if number < 24:
        return bytes([kind << 5 | number])
    size = next(size for size in range(4) if number < 1 << (8 << size))
    return bytes([kind << 5 | (24 + size)]) + number.to_bytes(1 << size, "big")
