"""The mocker's KV events in the fields of vLLM's, so that the two can be compared."""

import zlib
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

from dynabench.fidelity.vllm.entries import OF_GROUP, Action, Event
from mocker import AllBlocksCleared, BlockChain, BlockStored
from mocker.events import BlockEvent, BlockRemoved, GroupRemoved, GroupStored

FULL = "full_attention"


class EventFields:
    """Writes them down."""

    def __init__(self, block_size: int, *, num_ahead: int, names_groups: bool) -> None:
        """Say how blocks are named: by so many tokens after them, too; and by groups of layers or not."""
        self._size = block_size
        self._num_ahead = num_ahead
        self._names_groups = names_groups

    def rows(self, events: Iterable[BlockEvent]) -> Iterator[Event]:
        """Yield an event for each of vLLM's, which removes blocks one by one; chains know their `Action`."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                yield Event("cleared", [], {})
            elif isinstance(event, BlockStored):
                yield self._stored(event)
            elif isinstance(event, GroupStored):
                yield self._group_stored(event)
            else:
                yield from self._removed(event)

    def _removed(self, event: BlockRemoved | GroupRemoved) -> Iterator[Event]:
        group = event.group.number if isinstance(event, GroupRemoved) else 0
        for key in event.keys():  # noqa: SIM118 (an event, not a dict)
            yield Event(self._kind("removed", group), [key], {"medium": "GPU", "group_idx": group})

    def _stored(self, event: BlockStored) -> Event:
        start, stop = event.start * self._size, event.stop * self._size
        ends = range(start + self._size, stop + 1, self._size)
        parent = event.chain.key(event.start - 1) if event.start else None
        facts = self._facts(event.chain, start, stop, self._size, tuple(ends))
        facts |= {"parent_block_hash": parent, "kv_cache_spec_kind": FULL, "group_idx": 0}
        return Event(self._kind("stored", 0), event.keys(), facts | {"kv_cache_spec_sliding_window": None})

    def _group_stored(self, event: GroupStored) -> Event:
        group = event.group
        parent = group.name(event.chain, event.start) if event.start else None
        facts = self._facts(event.chain, event.start, event.stop, event.size, event.ends)
        facts |= {"parent_block_hash": parent, "kv_cache_spec_kind": group.kind, "group_idx": group.number}
        facts["kv_cache_spec_sliding_window"] = group.window or None
        return Event(self._kind("stored", group.number), event.keys(), facts)

    def _facts(self, chain: BlockChain, start: int, stop: int, size: int, ends: tuple[int, ...]) -> dict[str, Any]:
        """Return what an event says of the request whose blocks these are, tokens `start` to `stop`, stored up to `ends`."""
        action = chain.payload
        assert isinstance(action, Action)
        known = action.prompt + action.output
        tokens, ahead = known[start:stop], self._num_ahead
        extra = [_extra_keys(action, is_first=end == size) for end in ends]
        after = [known[end : end + ahead] for end in ends]
        return {
            "block_size": size,
            "token_ids": tokens,
            "tokens": [len(tokens), zlib.crc32(",".join(map(str, tokens)).encode())],
            "lora_name": action.adapter or None,
            "lora_id": action.adapter_number,
            "extra_keys": extra or None,
            "lookahead_token_ids": after if ahead else None,
            "medium": "GPU",
        }

    def _kind(self, kind: str, group: int) -> str:
        return f"{kind}{OF_GROUP}{group}" if self._names_groups else kind


def _extra_keys(action: Action, *, is_first: bool) -> list[Hashable] | None:
    """Return what names a block beside its tokens: the adapter, and for the first block the salt."""
    keys = [action.adapter] if action.adapter else []
    if is_first and action.salt is not None:
        keys.append(action.salt)
    return list(keys) or None
