"""The table of speculative decoding: what was drafted, and how much of it was accepted."""

from reports.figures.cells import number
from reports.record.pools import DraftUse
from reports.summary import ArmSummary, Summary
from reports.tables.grid import Grid


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
