"""How many drafts a model accepts: rates by position.

    draft           1      2      3     ... K
    accepted        p_1 >= p_2 >= p_3 >= ... p_K     the rate of steps that accept it, and with it all before it
    mean length     1 + p_1 + ... + p_K              tokens of a step that verifies K drafts, the model's own included

The rates come from whoever measured them: `files.py`, or a mean length, from which they follow if each draft that is
reached has the same chance.
"""

from collections.abc import Sequence


def rates_of_length(length: float, num_measured: int, num_drafts: int) -> tuple[float, ...]:
    """Return rates of `num_drafts` drafts for a mean length that was measured with `num_measured`.

    Each draft that is reached is accepted at the same rate r, so p_i = r ** i and length = 1 + r + ... + r ** num_measured.

    Raises:
        ValueError: no rates have this mean length.
    """
    most = num_measured + 1
    if not 1 <= length <= most:
        raise ValueError(
            f"acceptance_length is {length:g}; expected 1 to {most}, as {num_measured} drafts were verified"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        if sum([rate**i for i in range(most)]) < length:
            low = rate
        else:
            high = rate
    return tuple([high**i for i in range(1, num_drafts + 1)])


def rates_of_curve(lengths: dict[int, float], num_drafts: int) -> tuple[float, ...]:
    """Return rates of `num_drafts` drafts from mean lengths by the number of drafts, as InferenceX publishes them.

    One more draft adds its rate to the mean length. Where noise makes a later draft likelier than an earlier one, or worse
    than useless, both get their mean, so that the mean length stays the one that was measured.

    Raises:
        ValueError: fewer drafts were measured, or the lengths cannot be.
    """
    missing = [count for count in range(1, num_drafts + 1) if count not in lengths]
    if missing:
        raise ValueError(
            f"num_speculative_tokens is {num_drafts}, and the curve has no length for {missing[0]} drafts; it has "
            f"{', '.join(map(str, sorted(lengths)))}"
        )
    runs: list[tuple[float, int]] = []  # the mean rate of drafts, and how many have it
    before = 1.0
    for count in range(1, num_drafts + 1):
        rate, width = lengths[count] - before, 1
        before = lengths[count]
        while runs and (runs[-1][0] < rate or rate < 0):
            earlier, times = runs.pop()
            rate = (rate * width + earlier * times) / (width + times)
            width += times
        runs.append((rate, width))
    rates = [rate for rate, width in runs for _ in range(width)]
    check_rates(rates)
    return tuple(rates)


def check_rates(rates: Sequence[float]) -> None:
    """Refuse what cannot be rates by position.

    Raises:
        ValueError: one is not between 0 and 1, or is more than the one before.
    """
    before = 1.0
    for place, rate in enumerate(rates, 1):
        if not 0 <= rate <= 1:
            raise ValueError(f"draft {place} is accepted at a rate of {rate:g}; expected 0 to 1")
        if rate > before:
            raise ValueError(
                f"draft {place} is accepted at a rate of {rate:g}, the one before it at {before:g}; expected no more, "
                "because a draft counts only if all before it were accepted"
            )
        before = rate
