"""How vLLM's hybrid KV cache manager groups the layers of a model: which share a table, and how large a block is.

All groups take blocks from one pool. A block holds the same tokens of every layer of its group, one page for each:

    gemma-3-27b: 10 full and 52 windowed layers -> 1 + 6 groups of up to 10 layers; a block is 10 pages
    a prompt of 900 tokens in blocks of 16         57 blocks in each of 7 groups: 399 of the pool

Pages are made equally large: by more tokens in a block where that comes out even, by padding where not. With a layout in
which the block is the outermost dimension they may differ, and the layers of a kind are then divided so that groups are
about equally wide.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

BLOCK_UNIT = 16
"""Blocks grow in these steps where a state needs larger ones."""
MOST_UNEVEN = 1.5
"""The most frequent kind of layer decides how many form a group if it has less than this many times the rarest."""


class LayerKv(NamedTuple):
    """What one layer keeps on one GPU."""

    token: float
    """Bytes of a token; 0: it keeps a state."""
    window: int = 0
    """Most tokens kept; 0: all."""
    is_chunked: bool = False
    state: float = 0.0
    """Bytes of a sequence's state."""

    @property
    def is_full(self) -> bool:
        """Whether it keeps all tokens."""
        return bool(self.token) and not self.window

    @property
    def kind(self) -> str:
        """What it keeps, in vLLM's words."""
        if not self.token:
            return "mamba"
        if not self.window:
            return "full_attention"
        return "chunked_local_attention" if self.is_chunked else "sliding_window"

    @property
    def in_words(self) -> str:
        """Its kind, and how many tokens it keeps if it does not keep all."""
        return f"{self.kind} ({self.window})" if self.window else self.kind


class KvGroup(NamedTuple):
    """Layers that share a table of blocks."""

    layer: LayerKv
    """What each of them keeps; the first of them, if they differ in bytes."""
    layers: tuple[int, ...]
    """Their places in the model."""
    block_size: int
    """Tokens in a block."""
    page: float
    """Bytes of a block in one layer, padding included."""
    width: float
    """Bytes of a block in all of them."""

    def num_blocks_at_once(self, max_model_len: int, num_in_flight: int, *, is_aligned: bool) -> int:
        """Return the most blocks that one sequence holds, of which the steps in flight compute so many tokens."""
        if not self.layer.token:
            return 2 if is_aligned else 1
        return blocks_at_once(self.layer, self.block_size, num_in_flight, max_model_len)

    def num_blocks_of(self, num_tokens: int, num_in_flight: int, num_drafts: int) -> int:
        """Return the most blocks that a sequence of this many tokens holds at once; there is a state for each draft."""
        blocks = ceil(num_tokens / self.block_size)
        if not self.layer.token:
            return min(blocks, 2) + num_drafts
        return min(blocks, blocks_at_once(self.layer, self.block_size, num_in_flight, max(num_tokens, 1)))


def blocks_at_once(layer: LayerKv, block_size: int, num_in_flight: int, max_model_len: int) -> int:
    """Return the most blocks in which an attention layer keeps one sequence at once."""
    if not layer.window:
        return ceil(max_model_len / block_size)
    if layer.is_chunked:
        return ceil(min(layer.window + num_in_flight, max_model_len) / block_size)
    # A window need not begin where a block does.
    return ceil(min(layer.window - 1 + num_in_flight, max_model_len) / block_size) + 1


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The groups of a model in the order of their first layers, and the size of the blocks that they share."""

    groups: tuple[KvGroup, ...]
    block: float
    """Bytes of a block in the widest group."""

    @property
    def is_plain(self) -> bool:
        """Whether all layers keep all tokens, in blocks of one kind."""
        return len(self.groups) == 1 and self.groups[0].layer.is_full

    @property
    def summary(self) -> str:
        """The groups in words, alike ones together: `6 sliding_window (1024), 1 full_attention`."""
        kinds = Counter([group.layer.in_words for group in self.groups])
        return ", ".join([f"{count} {kind}" for kind, count in kinds.items()])

    def num_blocks_of(self, num_tokens: int, num_in_flight: int, num_drafts: int) -> int:
        """Return the most blocks that a sequence of this many tokens holds at once: see `num_blocks_at_once`."""
        return sum([group.num_blocks_of(num_tokens, num_in_flight, num_drafts) for group in self.groups])

    def num_blocks_at_once(self, max_model_len: int, num_in_flight: int, *, is_aligned: bool = True) -> int:
        """Return the most blocks that one sequence of full length holds.

        Args:
            max_model_len: its tokens.
            num_in_flight: tokens of the steps that are in flight at once.
            is_aligned: whether states are cached, so that a second one is kept (vLLM's `mamba_cache_mode` align).
        """
        return sum(
            [group.num_blocks_at_once(max_model_len, num_in_flight, is_aligned=is_aligned) for group in self.groups]
        )


def layout_of(
    layers: Sequence[LayerKv],
    block_size: int,
    *,
    state_block_size: int | None = None,
    is_hybrid: bool = True,
    is_block_outermost: bool = False,
) -> KvLayout:
    """Group the layers of a model, given in its order.

    Args:
        layers: what each of them keeps.
        block_size: tokens in a block; it may be made larger for some groups, never smaller.
        state_block_size: tokens between states that are kept (default: a block's).
        is_hybrid: vLLM's hybrid manager is on; else all layers must fit into one table.
        is_block_outermost: the cache's layout (`B...`) lets pages of different groups have different sizes.

    Raises:
        ValueError: a state is larger than a block of attention, or one table is asked for and there cannot be one.
    """
    if not is_hybrid:
        layers = _as_full(layers)
    grouping = _Grouping(layers, block_size, state_block_size or block_size)
    if grouping.is_one_table:
        groups = grouping.in_one()
    elif not is_hybrid:
        raise ValueError("layers of different windows, or with states beside attention, cannot be put into one table")
    elif is_block_outermost and grouping.has_several_pages:
        groups = grouping.split_by_width()
    else:
        groups = grouping.of_equal_pages()
    return KvLayout(groups, max([group.width for group in groups]))


def block_size_beside_states(layers: Iterable[LayerKv], block_size: int) -> int:
    """Return the tokens of a block whose largest page of attention has room for a state; as given, without both."""
    layers = tuple(layers)
    state, token = max([layer.state for layer in layers]), max([layer.token for layer in layers])
    if not token or state <= token * block_size:
        return block_size
    return BLOCK_UNIT * ceil(state / (token * BLOCK_UNIT))


def _as_full(layers: Sequence[LayerKv]) -> Sequence[LayerKv]:
    """Return the layers as one table sees them: with one that keeps everything, those with a window do, too."""
    windows = {(layer.window, layer.is_chunked) for layer in layers if layer.window}
    if not any(layer.is_full for layer in layers) or len(windows) > 1:
        return layers
    return [layer._replace(window=0, is_chunked=False) for layer in layers]


class _Grouping:
    """The layers of a model by what they keep, and the ways to group them."""

    def __init__(self, layers: Sequence[LayerKv], block_size: int, state_block_size: int) -> None:
        self._layers = layers
        self._block_size = block_size
        self._state_block_size = state_block_size
        self._attention_page = max([layer.token for layer in layers]) * block_size
        for layer in layers:
            if self._attention_page and layer.state > self._attention_page:
                raise ValueError(
                    f"a state of {layer.state:,.0f} bytes does not fit into a block of {block_size} tokens, which has "
                    f"{self._attention_page:,.0f} bytes in a layer; expected a larger block_size"
                )

    @property
    def is_one_table(self) -> bool:
        """Whether all of them keep the same tokens, or states of one size."""
        return len({layer._replace(token=min(layer.token, 1)) for layer in self._layers}) == 1

    @property
    def has_several_pages(self) -> bool:
        """Whether the layers' pages have different sizes."""
        return len({self._page(layer) for layer in self._layers}) > 1

    def _page(self, layer: LayerKv) -> float:
        """Return the bytes of a layer's page; a state's is padded to that of attention."""
        return layer.token * self._block_size if layer.token else max(layer.state, self._attention_page)

    def _tokens(self, layer: LayerKv) -> int:
        return self._block_size if layer.token else self._state_block_size

    def in_one(self) -> tuple[KvGroup, ...]:
        """Return one group of all layers, whose pages may differ."""
        first = self._layers[0]
        width = sum([self._page(layer) for layer in self._layers])
        return (KvGroup(first, tuple(range(len(self._layers))), self._tokens(first), self._page(first), width),)

    def split_by_width(self) -> tuple[KvGroup, ...]:
        """Return a group for each kind; windows and states are divided into groups about as wide as the others."""
        kinds = self._places(lambda layer: (layer.kind, layer.window))
        splits = [not layer.is_full and not layer.is_chunked for layer, _ in kinds]
        widest = max(
            [
                self._page(layer) * (1 if is_split else len(places))
                for (layer, places), is_split in zip(kinds, splits, strict=True)
            ]
        )
        groups: list[KvGroup] = []
        for (layer, places), is_split in zip(kinds, splits, strict=True):
            page = self._page(layer)
            number = ceil(len(places) / max(int(widest // page), 1)) if is_split else 1
            groups += self._divided(layer, places, number, self._tokens(layer), page)
        return tuple(groups)

    def of_equal_pages(self) -> tuple[KvGroup, ...]:
        """Return groups of equal pages and about equally many layers, all of which keep the same."""
        page = max([self._page(layer) for layer in self._layers])
        buckets = self._places(lambda layer: layer)
        sizes = [len(places) for _, places in buckets]
        size = max(sizes) if max(sizes) < MOST_UNEVEN * min(sizes) else min(sizes)
        groups: list[KvGroup] = []
        for layer, places in buckets:
            times = page / self._page(layer) if layer.token else 1.0
            tokens = self._tokens(layer) * (int(times) if times == int(times) else 1)
            groups += self._divided(layer, places, ceil(len(places) / size), tokens, page)
        return tuple(groups)

    def _places(self, alike: Callable[[LayerKv], object]) -> list[tuple[LayerKv, list[int]]]:
        """Return the layers of each kind by their places, in the order of the first of each."""
        kinds: dict[object, tuple[LayerKv, list[int]]] = {}
        for place, layer in enumerate(self._layers):
            kinds.setdefault(alike(layer), (layer, []))[1].append(place)
        return list(kinds.values())

    @staticmethod
    def _divided(layer: LayerKv, places: list[int], number: int, tokens: int, page: float) -> list[KvGroup]:
        """Deal layers out to this many groups."""
        hands = [tuple(places[first::number]) for first in range(number)]
        return [KvGroup(layer, hand, tokens, page, page * len(hand)) for hand in hands]
