"""What verdicts call metrics, arms, points, and the modes of other routers."""

import re
from collections.abc import Iterable, Mapping, Sequence

from foundation.text import listed

LABELS = {"ttft_sched": "mean TTFT", "tpot": "mean TPOT", "e2e_sched": "mean E2E latency"}
MOST = 4
"""The most that are named one by one; if there is one more, its name takes no more room than its count."""


def named(names: Sequence[str]) -> str:
    """Join names, the first few if they are many."""
    return listed(_first(names))


def parted(texts: Sequence[str]) -> str:
    """Join texts that may have commas by semicolons, the first few if they are many."""
    *texts, last = _first(texts)
    return " and ".join(filter(None, ["; ".join(texts), last])) if last.endswith(" more") else "; ".join([*texts, last])


def quoted(text: str, names: Iterable[str]) -> str:
    """Return a text with those of these names in quotes that have commas, so that a list of them can be read."""
    found = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True) if ", " in name)
    return re.sub(rf"(?<![\w'-])(?:{found})(?![\w'-])", lambda name: f"'{name[0]}'", text) if found else text


def only_here(names: Sequence[str], others: Mapping[str, str]) -> str:
    """Say that the best modes exist only in dynabench, and where the best modes of other routers are."""
    text = f"{named(names)} exist{'s' * (len(names) == 1)} only in dynabench"
    each = "; ".join(f"{mode} is {where}" for mode, where in others.items())  # all of them: each reader has one router
    return f"{text}; the best mode here of each other router: {each}." if others else f"{text}."


def there(others: Mapping[str, str]) -> str:
    """Say what modes are in other routers."""
    return parted([f"{mode} is {where}" for mode, where in others.items()])


def _first(names: Sequence[str]) -> list[str]:
    more = len(names) - MOST
    return [*names[:MOST], f"{more:,} more"] if more > 1 else list(names)
