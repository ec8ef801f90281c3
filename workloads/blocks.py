"""Block ids from tokens, from a number of tokens alone, and from ids of another block size."""

import hashlib
import itertools
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import msgspec

from workloads.request import Request, WorkloadError
from workloads.workload import Workload

Encode = Callable[[str], Sequence[int]]

_PIECE = re.compile(r"\s?\w{1,6}|\s?[^\w\s]|\s")


def estimate_tokens(text: str) -> list[int]:
    """Split text into about as many pieces as a tokenizer would; equal pieces get equal numbers."""
    return [zlib.crc32(piece.encode()) & 0x7FFFFFFF for piece in _PIECE.findall(text)]


def wrong_count(num_tokens: int, ids: Sequence[int], block_size: int, name: str = "hash_ids") -> str | None:
    """Return what is wrong with the number of a prompt's block ids, if anything."""
    expected = -(-num_tokens // block_size)
    if len(ids) == expected:
        return None
    return f"{num_tokens} tokens in blocks of {block_size} need {expected} {name}, not {len(ids)}"


MAX_MEAN_UNSHARED, FREE_UNSHARED = 2_000, 4_000_000
"""The most blocks that prompts without ids may have on average (a million tokens); any workload may have this many."""


class BlockNamer:
    """Gives small, chained numbers to blocks: an id identifies its block and all blocks before it."""

    def __init__(self, block_size: int) -> None:
        """Start with no blocks.

        Raises:
            WorkloadError: blocks would have no tokens.
        """
        if block_size < 1:
            raise WorkloadError(f"block_size is {block_size}; expected at least 1 token")
        self.block_size = block_size
        self._ids: dict[bytes, int] = {}
        self._scopes: dict[str, dict[int, int]] = {}
        self._chains: dict[tuple[int, int], int] = {}
        self._kept: dict[int, int] = {}
        self._next = 0  # made-up ids are below it
        self._fresh = self._made_up()
        self._num_prompts = self._num_unshared = 0

    def named(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Name the blocks of a prompt, including a partial last one."""
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
        """Name blocks that no other prompt has.

        Raises:
            WorkloadError: there are too many of them for memory; a short line may ask for any number.
        """
        num_blocks = -(-num_tokens // self.block_size)
        self._num_prompts += 1
        self._num_unshared += num_blocks
        if self._num_unshared > max(FREE_UNSHARED, MAX_MEAN_UNSHARED * self._num_prompts):
            raise WorkloadError(
                f"the first {self._num_prompts:,} prompts have {self._num_unshared:,} blocks of {self.block_size} tokens "
                f"in all; the limit is {MAX_MEAN_UNSHARED:,} per prompt on average (use larger blocks: --trace-block-size)"
            )
        return tuple(itertools.islice(self._fresh, num_blocks))

    def kept(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Keep ids that are chained; only a negative one, or one that was made up before, becomes another."""
        known = self._kept
        for id in dict.fromkeys([id for id in ids if id not in known]):
            known[id] = id
            if id < self._next:
                known[id] = next(self._fresh)
        return tuple(map(known.__getitem__, ids))

    def extended(self, before: Request, num_tokens: int) -> tuple[int, ...]:
        """Name a prompt that begins with another one; an addition starts inside a block, which is a new one then."""
        kept = before.hash_ids[: before.input_length // self.block_size]
        return kept + self.unshared(num_tokens - len(kept) * self.block_size)

    def renamed(self, scope: str, ids: Sequence[int]) -> tuple[int, ...]:
        """Translate ids that are chained and unique within a scope, such as a session."""
        known, found = self._scopes.setdefault(scope, {}), []
        for id in ids:
            if id not in known:
                known[id] = next(self._fresh)
            found.append(known[id])
        return tuple(found)

    def _made_up(self) -> Iterator[int]:
        """Make up ids that no block has."""
        for id in itertools.count():
            if id not in self._kept:
                self._next = id + 1
                yield id

    def chained(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Name blocks whose ids identify only their own tokens, not what comes before."""
        found, before = [], -1
        for id in ids:
            if (before, id) not in self._chains:
                self._chains[before, id] = next(self._fresh)
            before = self._chains[before, id]
            found.append(before)
        return tuple(found)


def chained(workload: Workload) -> Workload:
    """Return the workload unchanged if each id follows the same id everywhere; otherwise rename its blocks so that it does.

    A KV block is looked up by its tokens and all tokens before them, so an id after other ids is another block.
    """
    if workload.columns.is_chained:
        return workload
    namer = BlockNamer(workload.block_size)
    requests = [msgspec.structs.replace(request, hash_ids=namer.chained(request.hash_ids)) for request in workload]
    notes = (*workload.notes, "an id that follows different ids names different blocks")
    return replace(workload, requests=requests, notes=notes)


def reblocked(workload: Workload, size: int) -> Workload:
    """Name the same prompts in blocks of another size.

    Raises:
        WorkloadError: neither size divides the other.
    """
    before = workload.block_size
    if before == size:
        return workload
    if before % size and size % before:
        raise WorkloadError(
            f"blocks of {before} tokens cannot be turned into blocks of {size}: neither size divides the other"
        )
    cut = split_ids if size < before else join_ids
    requests = [
        msgspec.structs.replace(request, hash_ids=cut(request.hash_ids, request.input_length, before, size))
        for request in workload
    ]
    return replace(workload, block_size=size, requests=requests)


def split_ids(ids: tuple[int, ...], length: int, before: int, after: int) -> tuple[int, ...]:
    """Name the same prompt in smaller blocks: each id becomes `before / after` ids."""
    parts = before // after
    return tuple(id * parts + part for id in ids for part in range(parts))[: -(-length // after)]


def join_ids(ids: tuple[int, ...], length: int, before: int, after: int) -> tuple[int, ...]:
    """Name the same prompt in larger blocks: ids are chained, so the last id of each group identifies the whole group."""
    parts = after // before
    full = ids[parts - 1 :: parts][: length // after]
    return full if len(full) * after == length else (*full, ids[-1])
