"""The tables of speculative decoding: what was drafted, how much of it was accepted, and where it pays."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from reports.figures.cells import number
from reports.record.pools import DraftUse
from reports.summary import Summary
from reports.sweep.points import Point
from reports.tables.by_pool import labelled
from reports.tables.grid import Grid
from reports.verdicts.drafts import alike

Uses = Mapping[str, Sequence[DraftUse]]
"""What each pool drafted, by the names of lines."""
OF_SPECULATION = ("num_speculative", "speculative", "acceptance", "draft")
"""How the names of its settings begin."""
OVER_NONE = "tokens/s, over no drafts"
SEQUENCES = "sequences a step"


def gain_grid(summary: Summary) -> Grid | None:
    """Lay out at which sizes of a step speculation pays; None if no arm speculates, or the engines do not say."""
    uses = _of_arms(summary)
    found = _gains(uses)
    if found is None:
        return None
    lines = zip(labelled(uses), found.rows, strict=True)
    rows = [(label, [number(use.sequences, 1), *cells]) for (_, use), (label, cells) in lines]
    return replace(found, columns=[f"{SEQUENCES}, here", *found.columns], rows=rows)


def draft_grid(summary: Summary) -> Grid | None:
    """Lay out what came of drafts; None if no arm speculates."""
    return _drafts(_of_arms(summary))


def swept_gains(points: Mapping[str, Point]) -> Grid | None:
    """Lay out the same for the points of a sweep; those for which it is the same, as at other loads, share a line."""
    found = _gains(_of_points(points))
    if found is None:
        return None
    names: dict[tuple[str, ...], list[str]] = {}
    for label, cells in found.rows:
        names.setdefault(tuple(cells), []).append(label)
    return replace(found, rows=[(alike(labels), list(cells)) for cells, labels in names.items()])


def swept_drafts(points: Mapping[str, Point]) -> Grid | None:
    """Lay out the same for the points of a sweep, with the measured gain where a point without drafts is otherwise equal."""
    without = {_others(point): point.throughput.output_tokens_per_s for point in points.values() if not point.drafts}
    over: dict[str, str] = {}
    for name, point in points.items():
        tokens, base = point.throughput.output_tokens_per_s, without.get(_others(point))
        over[name] = f"{tokens / base:.2f}x" if tokens and base else "-"
    return _drafts(_of_points(points), over)


def _others(point: Point) -> str:
    """Return the settings of a point other than those of speculation."""
    changes = point.changes.items()
    return str({name: value for name, value in changes if not name.rpartition(".")[2].startswith(OF_SPECULATION)})


def _of_arms(summary: Summary) -> Uses:
    return {arm: figures.drafts for arm, figures in summary.arms.items() if figures.drafts}


def _of_points(points: Mapping[str, Point]) -> Uses:
    return {name: point.drafts for name, point in points.items() if point.drafts}


def _gains(uses: Uses) -> Grid | None:
    sizes = sorted({gain.sequences for pools in uses.values() for use in pools for gain in use.gains})
    if not sizes:
        return None
    lines = []
    for label, use in labelled(uses):
        ratios = {gain.sequences: gain.ratio for gain in use.gains}
        lines.append((label, [f"{ratios[size]:.2f}x" if size in ratios else "-" for size in sizes]))
    return Grid(
        "Where does speculation pay? (tokens in the same time, over those without it, by sequences in a step that only decodes)",
        list(map(str, sizes)),
        lines,
        "At the mean context of the requests and the acceptance of the run; below 1x, speculation costs more than it gives. "
        "Steps that compute prompts, too, gain less, so a whole run often gains less than this. Sizes that the KV cache has no room "
        "for are left out: a drafter takes some of it.",
    )


def _drafts(uses: Uses, over: Mapping[str, str] | None = None) -> Grid | None:
    if not uses:
        return None
    note = (
        "Tokens a step: the mean of steps that verify drafts, the model's own token included. By draft: the share of those "
        "steps that accepted the first, the second and so on, each with all before it."
    )
    columns = ["drafted tokens", "accepted", "tokens a step", "accepted, by draft"]
    lines = [(label, _cells(use)) for label, use in labelled(uses)]
    if over is not None:
        found = [(over[name], use) for name, pools in uses.items() for use in pools]
        lines = [
            (label, [ratio, number(use.sequences, 1), *cells])
            for (ratio, use), (label, cells) in zip(found, lines, strict=True)
        ]
        columns = [OVER_NONE, SEQUENCES, *columns]
        note += f" {OVER_NONE.capitalize()}: of the run without speculation that is otherwise equal."
    return Grid("What came of drafts?", columns, lines, note)


def _cells(use: DraftUse) -> list[str]:
    shares = " ".join([f"{100 * count / use.steps:.0f}" for count in use.accepted]) + "%" if use.steps else "-"
    accepted = f"{sum(use.accepted) / use.drafts:.0%}" if use.drafts else "-"
    return [number(use.drafts), accepted, number(use.length, 2), shares]
