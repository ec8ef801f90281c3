"""Which of the compared modes each other router has: who can deploy only one router needs the best of its modes."""

import re
from collections.abc import Mapping

SETTING = re.compile(r"(.+?) (?:--|\S+:)")
"""The name of a router, before its first flag or setting."""


def by_router(known: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Group modes by the routers that have them, with their names there.

    Args:
        known: by mode, its names in other routers: `NVIDIA Dynamo --router-mode kv, SGLang's router --policy X`.
    """
    found: dict[str, dict[str, str]] = {}
    for mode, names in known.items():
        for name in names.split(", "):
            router = SETTING.match(name)
            found.setdefault(router[1] if router else name, {})[mode] = name
    return found


def each_best(best: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """Return the best modes with their names in those routers of which they are the best.

    Args:
        best: by router, the best of its modes and its name there.
    """
    found: dict[str, list[str]] = {}
    for mode, name in best.values():
        found.setdefault(mode, []).append(name)
    return {mode: ", ".join(names) for mode, names in found.items()}
