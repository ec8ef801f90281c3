"""Block ids from tokens, from tokens' number alone, and from ids of another block size."""

import hashlib
import itertools
import re
import zlib
from collections.abc import Callable, Sequence

Encode = Callable[[str], Sequence[int]]

_PIECE = re.compile(r"\s?\w{1,6}|\s?[^\w\s]|\s")


def estimate_tokens(text: str) -> list[int]:
    """Split text into about as many pieces as a tokenizer would; equal pieces get equal numbers."""
    return [zlib.crc32(piece.encode()) & 0x7FFFFFFF for piece in _PIECE.findall(text)]


class BlockNamer:
    """Gives small numbers to blocks: chained, so that an id stands for its block and all before it."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._ids: dict[bytes, int] = {}
        self._fresh = itertools.count()

    def named(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Name the blocks of a prompt, a partial last one included."""
        size, ids = self.block_size, []
        digest = b""
        for start in range(0, len(tokens), size):
            block = tokens[start : start + size]
            digest = hashlib.blake2b(digest + b",".join(b"%d" % token for token in block), digest_size=12).digest()
            if digest not in self._ids:
                self._ids[digest] = next(self._fresh)
            ids.append(self._ids[digest])
        return tuple(ids)

    def unshared(self, num_tokens: int) -> tuple[int, ...]:
        """Name blocks that no other prompt has."""
        return tuple(itertools.islice(self._fresh, -(-num_tokens // self.block_size)))

    def renamed(self, scope: str, ids: Sequence[int]) -> tuple[int, ...]:
        """Translate ids that are chained and unique within a scope, such as a session."""
        found = []
        for id in ids:
            key = f"{scope}\0{id}".encode()
            if key not in self._ids:
                self._ids[key] = next(self._fresh)
            found.append(self._ids[key])
        return tuple(found)


def split_ids(ids: tuple[int, ...], length: int, before: int, after: int) -> tuple[int, ...]:
    """Name the same prompt in smaller blocks: each id becomes `before / after` ids."""
    parts = before // after
    return tuple(id * parts + part for id in ids for part in range(parts))[: -(-length // after)]


def join_ids(ids: tuple[int, ...], length: int, before: int, after: int) -> tuple[int, ...]:
    """Name the same prompt in larger blocks: the last id of each group stands for all of it, ids being chained."""
    parts = after // before
    full = ids[parts - 1 :: parts][: length // after]
    return full if len(full) * after == length else (*full, ids[-1])
