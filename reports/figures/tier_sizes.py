"""How much KV tiers hold: which arm or point has the smallest, and beyond which size more helps little."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from foundation.settings import short_value

SIZES = ("kv_offloading_size", "hicache_ratio", "hicache_size", "kv_disk_size", "kv_store_size")
"""Settings that give a tier's size, by their last words."""
_SIZE = re.compile(rf"[\w.]*(?:{'|'.join(SIZES)}) \S+?(?=,|$| \()")
"""The mention of such a setting in the name of an arm."""
NEAR = 0.05
"""A figure that is worse than the best by no more than this counts as near it."""
MOST = 4
"""The most lines that are named one by one."""


def bases(sizes: Mapping[str, float]) -> dict[str, str]:
    """Return the arm with which each is compared, perhaps itself, from the capacity of each arm's tiers.

    It is the arm with the smallest tiers among those that differ only in tier size or, without such an arm, the first.
    """
    groups: dict[str, list[str]] = {}
    for arm in sizes:
        groups.setdefault(_SIZE.sub("", arm), []).append(arm)
    first, found = next(iter(sizes)), dict[str, str]()
    for group in groups.values():
        base = min(group, key=sizes.__getitem__) if len(group) > 1 or not sizes[group[0]] else first
        found |= dict.fromkeys(group, base)
    return found


Changed = TypeVar("Changed")


def is_size(setting: str) -> bool:
    """Return whether a setting, by its name or path, gives a tier's size."""
    return setting.endswith(SIZES)


def smallest(points: Iterable[tuple[Mapping[str, Any], Changed]]) -> Iterator[tuple[Changed, Changed]]:
    """Yield each point, passed with its distinguishing settings, and the otherwise equal one with the smallest tiers."""
    groups: dict[str, list[tuple[tuple[float, ...], Changed]]] = {}
    for changes, point in points:
        alike = str(sorted((name, str(value)) for name, value in changes.items() if not is_size(name)))
        size = tuple(float(value) for name, value in sorted(changes.items()) if is_size(name))
        groups.setdefault(alike, []).append((size, point))
    for group in groups.values():
        first = min(group, key=lambda each: each[0])[1]
        yield from ((point, first) for _, point in group)


class Sized(NamedTuple):
    """A figure that was reached with tiers of some size."""

    changes: Mapping[str, Any]
    """The settings that distinguish it."""
    capacity: float
    """The capacity of all tiers together."""
    figure: float
    shown: str
    """The figure as text."""


def enough(rows: Sequence[Sized], what: str, *, is_lower_better: bool) -> str:
    """Name the smallest size with a figure near the best, for each otherwise equal group; nothing without sizes."""
    varied = [name for name in dict.fromkeys(name for row in rows for name in row.changes) if _varies(name, rows)]
    sizes = [name for name in varied if is_size(name)]
    if not sizes:
        return ""
    groups: dict[str, list[Sized]] = {}
    for row in rows:
        alike = [_named(name, row.changes.get(name)) for name in varied if name not in sizes]
        groups.setdefault(", ".join(alike), []).append(row)
    known = {name: group for name, group in groups.items() if len({row.capacity for row in group}) > 1}
    best_of = min if is_lower_better else max
    best = {name: best_of(row.figure for row in group) for name, group in known.items()}
    order = sorted(known, key=best.__getitem__, reverse=not is_lower_better)
    if not order:
        return ""
    said = [_near(known[name], best[name], sizes) + f" with {name}" * bool(name) for name in order[:MOST]]
    more = f"; {len(order) - MOST:,} more in the table" * (len(order) > MOST)
    each = "each " * (len(order) > 1)
    return f"Smallest {sizes[0] if len(sizes) == 1 else 'tiers'} within {NEAR:.0%} of {each or 'the '}{what}: {'; '.join(said)}{more}."


def _near(group: Sequence[Sized], best: float, sizes: Sequence[str]) -> str:
    """Say which size is the smallest near the best."""
    by_size = sorted(group, key=lambda row: row.capacity)
    first = next(row for row in by_size if abs(row.figure - best) <= NEAR * abs(best))
    size = (
        short_value(first.changes[sizes[0]])
        if len(sizes) == 1
        else ", ".join(_named(n, first.changes.get(n)) for n in sizes)
    )
    hint = ""
    if first.capacity == by_size[0].capacity:
        hint = "; more helps little"
    elif first.capacity == by_size[-1].capacity:
        hint = ", the largest tried"
    return f"{size} ({first.shown}{hint})"


def _varies(name: str, rows: Sequence[Sized]) -> bool:
    return len({str(row.changes.get(name)) for row in rows}) > 1


def _named(name: str, value: Any) -> str:
    return short_value(value) if name == "router_mode" else f"{name} {short_value(value)}"
