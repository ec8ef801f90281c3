"""What an answer must look like, in the words that engines have for it."""

import re
from collections.abc import Collection
from typing import Any, NamedTuple

from serving.runtime.messages import CallError

META = re.compile(r"[\\.^$*+?{}\[\]|()]")


class Guide(NamedTuple):
    """What a request's answer must look like."""

    kind: str
    """One of `serving.model.constraints.CONSTRAINTS`."""
    value: Any


def guide(request: dict[str, Any], honoured: Collection[str], engine: str) -> Guide | None:
    """Return what a request's answer must look like, if it says so.

    Raises:
        CallError: the engine cannot make it look like that.
    """
    wanted = request["sampling_options"].get("guided_decoding")
    if wanted is None:
        return None
    ((kind, value),) = wanted.items()
    if kind not in honoured:
        able = ", ".join(honoured) or "nothing"
        raise CallError(f"{engine} cannot guide answers by {kind}; as it is set up, it can by {able}", "invalid")
    return Guide(kind, value)


def choice_regex(texts: list[str]) -> str:
    """Return a regular expression that matches exactly these texts."""
    return f"({'|'.join(META.sub(_escaped, text) for text in texts)})"


def _escaped(found: re.Match[str]) -> str:
    return f"\\{found[0]}"
