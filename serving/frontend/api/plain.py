"""Values from clients that are sent on as they are: what is nested too deeply or too large cannot be."""

from typing import Any

from serving.frontend.api.errors import ApiError

MAX_DEPTH = 64
"""Nested levels of lists and objects."""


def check_plain(value: Any, field: str | None = None) -> None:
    """Reject what cannot be sent: nesting that would exhaust a stack, integers beyond 64 bits.

    Raises:
        ApiError: there is such a thing in it.
    """
    name, level = field or "the request", [value]
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for entry in level:
            if isinstance(entry, dict):
                below += entry.values()
            elif isinstance(entry, list):
                below += entry
            elif isinstance(entry, int) and not -(1 << 63) <= entry < 1 << 64:
                raise ApiError(
                    400, f"{name} has an integer of {entry.bit_length()} bits; at most 64 are supported", param=field
                )
        if not below:
            return
        level = below
    raise ApiError(400, f"{name} is nested more than {MAX_DEPTH} levels deep", param=field)
