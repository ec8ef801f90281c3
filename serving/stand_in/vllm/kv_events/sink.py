"""From the events of a simulated engine to vLLM's: blocks get vLLM's names, and their tokens."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from collections.abc import Sequence as Several

import numpy as np
import numpy.typing as npt

from serving.engines.mock.events import (
    AllBlocksCleared,
    BlockChain,
    BlockRemoved,
    BlockStored,
    GroupRemoved,
    GroupStored,
    KvEvent,
    TierRemoved,
    TierStored,
)
from serving.router.events import BlocksEvent
from serving.runtime.world import world
from serving.stand_in.vllm.kv_events import messages
from serving.stand_in.vllm.kv_events.hashes import BlockHasher, extra_keys, untagged
from serving.stand_in.vllm.kv_events.messages import EventBatch, Message
from serving.worker.protocol import CacheScope, PreprocessedRequest

GPU = "GPU"
GROUP = 0
"""The group of layers of which events tell if there is only one."""


class BlockContent:
    """What the blocks of a chain contain."""

    __slots__ = ("_output", "_prompt", "scope", "session_id")

    def __init__(self, request: PreprocessedRequest, prompt: npt.NDArray[np.uint32], output: list[int]) -> None:
        self._prompt = prompt
        self._output = output
        self.scope: CacheScope | None = request.cache_scope
        self.session_id = request.session_id

    def tokens(self, start: int, stop: int) -> list[int]:
        """Return tokens of prompt and answer."""
        length = len(self._prompt)
        found: list[int] = self._prompt[start:stop].tolist()
        return found + self._output[max(start - length, 0) : max(stop - length, 0)]


class Names:
    """vLLM's names of the blocks that are cached, by ours; in each medium, a block may be cached several times."""

    def __init__(self, hasher: BlockHasher, block_size: int) -> None:
        self._hasher = hasher
        self._size = block_size
        self._held: dict[str, dict[Hashable, tuple[bytes, int]]] = {}

    def of(self, chain: BlockChain, start: int, stop: int) -> list[bytes]:
        """Name the blocks of a chain from `start` to `stop`; only those that are not cached are hashed."""
        first = start
        while first and self._find(chain.key(first - 1)) is None:
            first -= 1
        parent = self._find(chain.key(first - 1)) if first else None
        found = []
        for block in range(first, stop):
            parent = self._find(chain.key(block)) or self._hash(chain, block, parent)
            found.append(parent)
        return found[start - first :]

    def add(self, medium: str, chain: BlockChain, start: int, names: list[bytes]) -> None:
        """Keep the names of blocks that are cached now."""
        held = self._held.setdefault(medium, {})
        for block, name in enumerate(names, start):
            key = chain.key(block)
            held[key] = name, held[key][1] + 1 if key in held else 1

    def discard(self, medium: str, chain: BlockChain, start: int, stop: int) -> None:
        """Forget the names of blocks that were evicted, unless they are cached elsewhere."""
        held = self._held[medium]
        for block in range(start, stop):
            key = chain.key(block)
            name, count = held.pop(key)
            if count > 1:
                held[key] = name, count - 1

    def clear(self, medium: str) -> None:
        """Forget the names of all blocks of a medium."""
        self._held.pop(medium, None)

    def _find(self, key: Hashable) -> bytes | None:
        return next((held[key][0] for held in self._held.values() if key in held), None)

    def _hash(self, chain: BlockChain, block: int, parent: bytes | None) -> bytes:
        content, size = content_of(chain), self._size
        keys = extra_keys(content.scope, is_first=block == 0)
        return self._hasher.name(parent, content.tokens(block * size, (block + 1) * size), keys)


class VllmSink:
    """Translates one rank's events (see `EventSink`), and passes them on as a batch for each step."""

    def __init__(
        self,
        send: Callable[[EventBatch], None],
        hasher: BlockHasher,
        *,
        rank: int,
        block_size: int,
        spec_kind: str = "full_attention",
        describes_chunks: bool = False,
    ) -> None:
        """Start with an empty cache.

        Args:
            send: what to do with a batch; it must not wait.
            hasher: what names blocks.
            rank: the data-parallel rank.
            block_size: tokens of a block.
            spec_kind: the kind of the layers that keep all tokens.
            describes_chunks: events of chunks in host memory have tokens, and name each block; as vLLM's setting
                `self_describing_kv_events` of the OffloadingConnector.
        """
        self._send = send
        self._hasher = hasher
        self._names = Names(hasher, block_size)
        self._rank = rank
        self._size = block_size
        self._spec_kind = spec_kind
        self._describes_chunks = describes_chunks

    def content(self, request: PreprocessedRequest, tokens: npt.NDArray[np.uint32], output: list[int]) -> BlockContent:
        """See `EventSink`."""
        return BlockContent(request, tokens, output)

    def publish(self, events: list[KvEvent], beyond: Several[BlocksEvent] = ()) -> None:
        """See `EventSink`; of tiers beyond host memory nothing is published."""
        if found := [message for event in events for message in self._translate(event)]:
            self._send(EventBatch(world().wall_s(), found, self._rank))

    def _translate(self, event: KvEvent) -> Iterable[Message]:
        match event:
            case BlockStored(chain, start, stop):
                return [self._stored(chain, start, stop)]
            case BlockRemoved(chain, start, stop):
                return self._removed(chain, start, stop)
            case GroupStored():
                return [self._group_stored(event)]
            case GroupRemoved():
                return list(self._group_removed(event))
            case AllBlocksCleared():
                self._names.clear(GPU)
                return [messages.AllBlocksCleared()]
            case TierStored():
                return list(self._chunks_stored(event))
            case TierRemoved():
                return [self._chunks_removed(event)]

    def _stored(self, chain: BlockChain, start: int, stop: int) -> messages.BlockStored:
        names, parent = self._named(chain, start, stop)
        self._names.add(GPU, chain, start, names)
        content = content_of(chain)
        keys = [untagged(extra_keys(content.scope, is_first=block == 0)) for block in range(start, stop)]
        return self._describe(GPU, chain, start, names, parent, keys=keys)

    def _removed(self, chain: BlockChain, start: int, stop: int) -> list[Message]:
        names = self._names.of(chain, start, stop)
        self._names.discard(GPU, chain, start, stop)
        return [messages.BlockRemoved([self._hasher.external(name)], GPU, GROUP) for name in reversed(names)]

    def _group_stored(self, event: GroupStored) -> messages.BlockStored:
        """Return the message about one group; its tokens are those of all blocks, also of those that were left out."""
        chain, start, size = event.chain, event.start // self._size, self._size
        before, parent = self._named(chain, start, event.stop // size)
        names = [before[end // size - 1 - start] for end in event.ends]
        for end, name in zip(event.ends, names, strict=True):
            self._names.add(GPU, chain, end // size - 1, [name])
        scope = content_of(chain).scope
        keys = [untagged(extra_keys(scope, is_first=end == event.size)) for end in event.ends]
        message = self._describe(GPU, chain, start, before, parent, keys=keys or None)
        message.block_hashes = list(map(self._hasher.external, names))
        message.block_size = event.size
        message.group_idx, message.kv_cache_spec_kind = event.group.number, event.group.kind
        message.kv_cache_spec_sliding_window = event.group.window or None
        return message

    def _group_removed(self, event: GroupRemoved) -> Iterator[messages.BlockRemoved]:
        """Yield a message for each block of a group."""
        for end in event.ends:
            last = end // self._size - 1
            (name,) = self._names.of(event.chain, last, last + 1)
            self._names.discard(GPU, event.chain, last, last + 1)
            yield messages.BlockRemoved([self._hasher.external(name)], GPU, event.group.number)

    def _chunks_stored(self, event: TierStored) -> Iterator[Message]:
        chain, size, medium = event.chain, event.blocks_per_chunk, event.medium
        for start in range(event.start * size, event.stop * size, size):
            names, parent = self._named(chain, start, start + size)
            self._names.add(medium, chain, start, names)
            if self._describes_chunks:
                yield self._describe(medium, chain, start, names, parent)
            else:
                last = self._hasher.external(names[-1])
                yield messages.BlockStored([last], None, [], 0, None, medium, None, group_idx=GROUP)

    def _chunks_removed(self, event: TierRemoved) -> Message:
        """Return one message for all chunks that leave at once, each named by its blocks or by the last of them."""
        size, start, stop = event.blocks_per_chunk, event.start, event.stop
        names = self._names.of(event.chain, start * size, stop * size)
        self._names.discard(event.medium, event.chain, start * size, stop * size)
        chunks = [names[at : at + size] for at in range(0, len(names), size)]
        if event.is_tail_first:
            chunks.reverse()
        gone = [name for chunk in chunks for name in (chunk if self._describes_chunks else chunk[-1:])]
        return messages.BlockRemoved(list(map(self._hasher.external, gone)), event.medium, GROUP)

    def _named(self, chain: BlockChain, start: int, stop: int) -> tuple[list[bytes], bytes | None]:
        """Return the names of blocks, and of the block before them."""
        if not start:
            return self._names.of(chain, start, stop), None
        parent, *names = self._names.of(chain, start - 1, stop)
        return names, parent

    def _describe(
        self,
        medium: str,
        chain: BlockChain,
        start: int,
        names: list[bytes],
        parent: bytes | None,
        *,
        keys: list[tuple[str, ...] | None] | None = None,
    ) -> messages.BlockStored:
        content, external, size = content_of(chain), self._hasher.external, self._size
        scope = content.scope or CacheScope()
        return messages.BlockStored(
            block_hashes=list(map(external, names)),
            parent_block_hash=None if parent is None else external(parent),
            token_ids=content.tokens(start * size, (start + len(names)) * size),
            block_size=size,
            lora_id=scope.lora_id if scope.lora_name else None,
            medium=medium,
            lora_name=scope.lora_name or None,
            extra_keys=keys,
            group_idx=GROUP,
            kv_cache_spec_kind=self._spec_kind,
            session_id=content.session_id if medium == GPU else None,
        )


def content_of(chain: BlockChain) -> BlockContent:
    """Return what the blocks of a chain contain."""
    assert isinstance(chain.payload, BlockContent)
    return chain.payload
