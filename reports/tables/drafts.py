"""The table of speculative decoding: what was drafted, and how much of it was accepted."""

from reports.figures.cells import number
from reports.record.pools import DraftUse
from reports.summary import ArmSummary, Summary
from reports.tables.grid import Grid


def gain_grid(summary: Summary) -> Grid | None:
    """Lay out at which sizes of a step speculation pays; None if no arm speculates."""
    arms = {arm: figures.drafts for arm, figures in summary.arms.items() if figures.drafts}
    sizes = sorted({gain.sequences for uses in arms.values() for use in uses for gain in use.gains})
    if not sizes:
        return None
    lines = []
    for arm, uses in arms.items():
        for use in uses:
            ratios = {gain.sequences: gain.ratio for gain in use.gains}
            cells = [f"{ratios[size]:.2f}x" if size in ratios else "-" for size in sizes]
            lines.append((_label(arm, use, summary.arms[arm]), [number(use.sequences, 1), *cells]))
    return Grid(
        "Where does speculation pay? (tokens in the same time, over those without it)",
        ["sequences a step, here", *map(str, sizes)],
        lines,
        "By the number of sequences in a step that only decodes, at the mean context of the requests and the acceptance of the "
        "run; below 1x, speculation costs more than it gives. Sizes that the KV cache has no room for are left out: a drafter "
        "takes some of it.",
    )


def draft_grid(summary: Summary) -> Grid | None:
    """Lay out what came of drafts; None if no arm speculates."""
    arms = {arm: figures.drafts for arm, figures in summary.arms.items() if figures.drafts}
    if not arms:
        return None
    most = max(len(use.accepted) for uses in arms.values() for use in uses)
    return Grid(
        "What came of drafts?",
        ["drafted tokens", "accepted", "tokens a step", *[f"draft {place}" for place in range(1, most + 1)]],
        [(_label(arm, use, summary.arms[arm]), _cells(use, most)) for arm, uses in arms.items() for use in uses],
        "Tokens a step: the mean of steps that verify drafts, the model's own token included. Draft 1, 2, ...: the share of "
        "those steps that accepted it, and with it all before it.",
    )


def _label(arm: str, use: DraftUse, figures: ArmSummary) -> str:
    return f"{arm}: {use.name}" if len(figures.drafts or ()) > 1 else arm


def _cells(use: DraftUse, most: int) -> list[str]:
    shares = [f"{count / use.steps:.0%}" if use.steps else "-" for count in use.accepted]
    accepted = f"{sum(use.accepted) / use.drafts:.0%}" if use.drafts else "-"
    return [number(use.drafts), accepted, number(use.length, 2), *shares, *["-"] * (most - len(shares))]
