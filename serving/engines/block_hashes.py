"""The blocks of KV events of vLLM and SGLang under our hashes.

An event is a map with its kind under `type` (older vLLM: an array that begins with the kind). The engine names a block
by its own hash; we hash its tokens again, chained to its parent, so that every engine's blocks have the names that the
router looks for.

A block may be on the GPU, in host memory and on disks at the same time, under one name. LMCache names chunks of several
blocks by its own hashes. vLLM says of which layers blocks on the GPU are: we take those of the first group of layers that
keeps all tokens, and those of groups that keep only a part as theirs.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np

from serving.router.events import BlocksCleared, BlocksEvent, BlocksRemoved, BlocksStored, Medium, layer_group
from serving.router.hashing import block_hashes, sequence_hashes

log = logging.getLogger(__name__)

STORED_FIELDS = ("block_hashes", "parent_block_hash", "token_ids", "block_size")
MEDIA: dict[str | None, Medium] = {
    None: "GPU",  # older engines keep blocks nowhere else
    "GPU": "GPU",
    "CPU": "CPU",
    "cpu": "CPU",  # LMCache in vLLM's process
    "STORAGE": "STORAGE",
    "CPU_PINNED": "CPU",  # SGLang, from here
    "DISK": "STORAGE",
    "EXTERNAL": "SHARED",
}
"""Where blocks are: the engines' words for it, and ours."""

KEEP_ALL = (None, "full_attention", "mla_attention", "sink_full_attention")
KEEP_A_PART = ("sliding_window", "sliding_window_mla", "mamba")
"""vLLM's kinds of layers: those that keep all tokens, and those whose part is known by an event alone."""


class _Run(NamedTuple):
    """What an engine names as one: a block, or a chunk of several."""

    hashes: list[int]
    above: int | None
    """The block before the first of them."""


class HashTranslator:
    """Names an engine's blocks by our sequence hashes."""

    def __init__(self, block_size: int, roots: Mapping[str, int] | None = None) -> None:
        """Know nothing yet; `roots` are the hashes below which the first blocks of LoRA adapters are named, by adapter."""
        self._block_size = block_size
        self._roots = roots or {}
        self._ours: dict[Any, _Run] = {}
        self._copies: dict[Medium, dict[Any, int]] = {medium: {} for medium in get_args(Medium)}
        self._whole: int | None = None  # the number of the first group that keeps all tokens
        self._parts: dict[int, dict[Any, tuple[int, int]]] = {}  # of groups that keep a part: our name, and copies
        self._has_warned = False

    def stored(
        self,
        theirs: Sequence[Any],
        parent: Any,
        tokens: Sequence[int],
        *,
        medium: Medium = "GPU",
        root: int | None = None,
    ) -> BlocksStored | None:
        """Translate a chain of blocks, or of chunks of blocks, that begins below `parent` (none: at the root, or at an adapter's)."""
        if not tokens:
            return None  # a placeholder: vLLM also names chunks whose tokens it no longer knows
        if parent is not None and parent not in self._ours:
            self._warn(f"ignored a block stored below {parent!r}, which the engine never reported")
            return None
        size, rest = divmod(len(tokens), self._block_size * len(theirs)) if theirs else (0, 1)
        if rest or not size:
            self._warn(
                f"ignored {len(theirs)} blocks of {self._block_size} tokens: there are {len(tokens)} tokens for them"
            )
            return None
        above, new = self._below(parent, tokens, root)
        for place, name in enumerate(theirs):
            start = place * size
            self._ours[name] = _Run(new[start : start + size], new[start - 1] if start else above)
            self._add(name, medium)
        return BlocksStored(new, above, medium)

    def _below(self, parent: Any, tokens: Sequence[int], root: int | None) -> tuple[int | None, list[int]]:
        """Return our names of a known parent, and of the blocks below it; without one, below a root."""
        above = None if parent is None else self._ours[parent].hashes[-1]
        found = block_hashes(np.array(tokens, np.uint32), self._block_size)
        return above, sequence_hashes(found, root if above is None else above)

    def _stored_part(self, number: int, fields: dict[str, Any], root: int | None) -> BlocksStored | None:
        """Translate blocks of layers that keep only a part: those that other layers have, or all below a parent."""
        theirs, parent = fields["block_hashes"], fields["parent_block_hash"]
        tokens, size = fields["token_ids"], fields["block_size"]
        each, rest = divmod(size, self._block_size)
        if rest or each < 1:
            self._warn(f"ignored blocks of {size} tokens in a group of layers: other blocks have {self._block_size}")
            return None
        group = layer_group([number, self._block_size, size, fields.get("kv_cache_spec_sliding_window") or 0, 0])
        if len(tokens) == size * len(theirs) and (parent is None or parent in self._ours):
            ours = dict(zip(theirs, self._below(parent, tokens, root)[1][each - 1 :: each], strict=True))
        else:
            ours = {name: self._ours[name].hashes[-1] for name in theirs if name in self._ours}
        held = self._parts.setdefault(number, {})
        for name, block in ours.items():
            held[name] = block, held.get(name, (0, 0))[1] + 1
        return BlocksStored(list(ours.values()), None, group=group)

    def _removed_part(self, number: int, theirs: Sequence[Any]) -> BlocksRemoved:
        held, gone = self._parts.get(number, {}), []
        for name in theirs:
            block, copies = held.pop(name, (0, 0))
            if copies:
                gone.append(block)
            if copies > 1:
                held[name] = block, copies - 1
        return BlocksRemoved(gone, group=number)

    def _of_group(self, kind: str, number: int, fields: dict[str, Any], root: int | None) -> BlocksEvent | None:
        """Translate an event about a group of layers that routers do not take for the model."""
        if kind == "BlockRemoved":
            return self._removed_part(number, fields["block_hashes"]) if number in self._parts else None
        layers = fields.get("kv_cache_spec_kind")
        if layers in KEEP_A_PART:
            return self._stored_part(number, fields, root)
        if layers not in KEEP_ALL:
            self._warn(f"ignored blocks of {layers!r} layers: routers may expect more of a prompt to be cached than is")
        return None

    def removed(self, theirs: Sequence[Any], *, medium: Medium = "GPU") -> BlocksRemoved | None:
        """Translate blocks that were removed from a medium.

        Routers count copies on the GPU only; beyond it a block is gone when its last copy is.
        """
        gone: list[int] = []
        copies = self._copies[medium]
        for name in theirs:
            if name not in copies:
                continue
            copies[name] -= 1
            if medium == "GPU" or not copies[name]:
                gone += reversed(self._ours[name].hashes)
            if not copies[name]:
                del copies[name]
                if not any(name in held for held in self._copies.values()):
                    del self._ours[name]
        return BlocksRemoved(gone, medium) if gone else None

    def moved(self, name: Any, before: Medium, now: Medium) -> list[BlocksEvent]:
        """Translate a block that left a medium for another."""
        if name not in self._copies[before]:
            return []
        run = self._ours[name]
        self._add(name, now)
        removed = self.removed([name], medium=before)
        return [BlocksStored(run.hashes, run.above, now), *([] if removed is None else [removed])]

    def cleared(self) -> BlocksCleared:
        """Forget everything."""
        self._ours.clear()
        self._parts.clear()
        for held in self._copies.values():
            held.clear()
        return BlocksCleared()

    def translate(self, events: Sequence[Any]) -> list[BlocksEvent]:
        """Translate the events of a message; what other layers store goes first, because it has the names of all blocks.

        Raises:
            ValueError: one is not a KV event.
        """
        read = [_fields(event) for event in events]
        parts = set(self._parts) | {
            each.get("group_idx") for _, each in read if each.get("kv_cache_spec_kind") in KEEP_A_PART
        }
        if parts and not any(kind == "AllBlocksCleared" for kind, _ in read):
            read.sort(key=lambda event: event[1].get("group_idx") in parts)
        return [found for event in read if (found := self._translate(*event)) is not None]

    def _translate(self, kind: str, fields: dict[str, Any]) -> BlocksEvent | None:
        if kind == "AllBlocksCleared":
            return self.cleared()
        medium = MEDIA.get(fields.get("medium"))
        if medium is None:
            self._warn(f"ignored a block in the unknown medium {fields['medium']!r}")
            return None
        if medium == "STORAGE" and fields.get("locality") == "REMOTE":
            medium = "SHARED"
        adapter = fields.get("lora_name") or fields.get("lora_id")
        if adapter and adapter not in self._roots:
            return None  # nobody can ask for it here
        root = self._roots[adapter] if adapter else None
        number = fields.get("group_idx")
        if medium == "GPU" and number is not None:
            if self._whole is None and kind == "BlockStored" and fields.get("kv_cache_spec_kind") in KEEP_ALL:
                self._whole = number
            if number != self._whole:
                return self._of_group(kind, number, fields, root)
        if kind == "BlockStored":
            hashes, parent, tokens = fields["block_hashes"], fields["parent_block_hash"], fields["token_ids"]
            return self.stored(hashes, parent, tokens, medium=medium, root=root)
        if kind == "BlockRemoved":
            return self.removed(fields["block_hashes"], medium=medium)
        raise ValueError(f"unknown KV event {kind!r}")

    def _add(self, name: Any, medium: Medium) -> None:
        copies = self._copies[medium]
        copies[name] = copies.get(name, 0) + 1

    def _warn(self, message: str) -> None:
        if not self._has_warned:
            log.warning("%s (and others like it)", message)
            self._has_warned = True


def _fields(event: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(event, dict):
        return str(event.get("type")), event
    if not isinstance(event, list) or not event:
        raise ValueError(f"not a KV event: {str(event)[:100]}")
    names = ("block_hashes", "medium") if event[0] == "BlockRemoved" else (*STORED_FIELDS, "lora_id", "medium")
    return str(event[0]), dict(zip(names, event[1:], strict=False))
