"""In which room the two sides of a KV transfer meet."""

MAX_ROOM = (1 << 63) - 1


def room(draw: int, *, rank: int | None = None, dp_size: int = 1) -> int:
    """Return the number of the room in which both sides of a transfer meet, from a random number in [0, 2^63).

    If the prefill worker's data-parallel rank is known, the number is congruent to it, and so leads there (SGLang).
    """
    if rank is None:
        return draw
    assert rank < dp_size
    return draw % ((MAX_ROOM - rank) // dp_size + 1) * dp_size + rank
