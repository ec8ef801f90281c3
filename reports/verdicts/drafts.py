"""At which sizes of a step speculation pays, in a sentence."""

from collections.abc import Iterable, Mapping, Sequence

from foundation.text import listed
from reports.record.pools import DraftUse
from reports.verdicts.naming import named, parted

Ratios = dict[int, float]
"""Tokens in the same time, over those without drafts, by the sequences in a step, as the table shows them."""


def where_drafts_pay(uses: Mapping[str, Sequence[DraftUse]]) -> str:
    """Say at which sizes of a step drafts cost more than they give; nothing if none are known.

    Args:
        uses: what each pool drafted, by the names of arms or points.
    """
    lines: dict[tuple[int, ...], list[tuple[str, Ratios]]] = {}
    for arm, pools in uses.items():
        for use in pools:
            ratios = {gain.sequences: round(gain.ratio, 2) for gain in use.gains}
            losing = tuple([size for size, ratio in sorted(ratios.items()) if ratio < 1])
            if ratios:
                lines.setdefault(losing, []).append((f"{arm}: {use.name}" if len(pools) > 1 else arm, ratios))
    said = [
        (alike([name for name, _ in its]), _of([ratios for _, ratios in its], losing)) for losing, its in lines.items()
    ]
    if not said:
        return ""
    each = [text for _, text in said] if len(said) == 1 else [f"{text} with {names}" for names, text in said]
    return f"In steps that only decode, speculation {parted(each)}."


def alike(names: Sequence[str]) -> str:
    """Return the settings that all of these names have or, if there are none, the names."""
    first, *others = [name.split(", ") for name in names]
    return ", ".join([part for part in first if all(part in other for other in others)]) or named(names)


def _of(lines: Sequence[Ratios], losing: Sequence[int]) -> str:
    """Say it of lines that lose at the same sizes."""
    sizes = sorted({size for ratios in lines for size in ratios})
    if not losing:
        found = [ratio for ratios in lines for ratio in ratios.values()]
        return f"pays at every size that fits ({_range(sizes)} sequences: {_range(found, 'x')})"
    lost = f"({_range([ratios[size] for ratios in lines for size in losing if size in ratios], 'x')})"
    if len(losing) == len(sizes):
        return f"costs more than it gives at every size {lost}"
    if list(losing) == sizes[-len(losing) :]:
        most = sizes[-len(losing) - 1]
        up_to = f"up to {most} sequence{'s' * (most > 1)}"
        return f"pays with {up_to}, and costs more than it gives from {losing[0]} on {lost}"
    return f"costs more than it gives with {listed([str(size) for size in losing])} sequences {lost}, and else pays"


def _range(values: Iterable[float], unit: str = "") -> str:
    """Name the lowest and the highest value, or the only one."""
    low, high = min(found := list(values)), max(found)
    low_text, high_text = (f"{value:.2f}{unit}" if unit else f"{value:g}" for value in (low, high))
    return low_text if low == high else f"{low_text} to {high_text}"
