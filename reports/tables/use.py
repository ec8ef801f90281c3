"""Small tables after the figures: where TTFT goes, how busy workers and links were. Tiers and adapters have their own modules."""

from reports.figures.cells import milliseconds, number, share
from reports.figures.split import LABELS as PARTS
from reports.figures.split import Split
from reports.record.pools import Use
from reports.summary import ArmSummary, Summary
from reports.tables.adapters import adapter_grid
from reports.tables.drafts import draft_grid, gain_grid
from reports.tables.fleet import fleet_grid
from reports.tables.grid import Grid
from reports.tables.media import media_grid
from reports.tables.server import server_grid
from reports.tables.tiers import tier_grid


def grids(summary: Summary, *, is_whole: bool = True) -> list[Grid]:
    """Return the small tables that are not empty: the fleet, where TTFT goes, how busy pools and links were, and others.

    With `is_whole` unset, tables that have less important lines are without them.
    """
    found = (
        fleet_grid(summary),
        split_grid(summary),
        server_grid({name: arm.server or None for name, arm in summary.arms.items()}, is_whole=is_whole),
        draft_grid(summary),
        gain_grid(summary),
        pool_grid(summary),
        adapter_grid(summary),
        media_grid(summary),
        tier_grid(summary),
    )
    return [grid for grid in found if grid is not None]


def split_grid(summary: Summary) -> Grid | None:
    """Lay out the parts of the mean TTFT; None if it is unknown when workers started on requests."""
    splits = [arm.split or None for arm in summary.arms.values()]
    if not any(splits):
        return None
    named = {
        label: [split.parts.get(name) if split else None for split in splits]
        for name, label in PARTS.items()
        if any(split and name in split.parts for split in splits)
    }
    totals = [split.ttft if split else None for split in splits]
    lines = [
        (f"{label} (ms)", ["-" if part is None else milliseconds(part) for part in parts])
        for label, parts in named.items()
    ]
    lines.append(("TTFT from sent (ms)", [milliseconds(total) for total in totals]))
    lines += [
        (
            f"{label} (share)",
            [
                "-" if part is None or not total else f"{part / total:.0%}"
                for part, total in zip(parts, totals, strict=True)
            ],
        )
        for label, parts in named.items()
    ]
    if any(split and split.apart for split in splits):
        lines.append(("prefilled by another worker", [share(split.apart if split else None) for split in splits]))
    return Grid(
        "Where does TTFT go? (means)",
        list(summary.arms),
        lines,
        split_note(dict(zip(summary.arms, splits, strict=True))),
    )


def split_note(splits: dict[str, Split | None]) -> str:
    """Explain the parts of TTFT."""
    text = "The parts add up to the mean TTFT from sent. If one worker does everything, its prefill includes the first step."
    early = [name for name, split in splits.items() if split and split.blocks_first]
    if early:
        text += f" The decode queue comes before the prefill in {', '.join(early)}."
    return text


def pool_grid(summary: Summary) -> Grid | None:
    """Lay out how busy pools and links were; None if no arm has a pool that only prefills, or if it is not known."""
    arms = {arm: figures for arm, figures in summary.arms.items() if figures.pools}
    if not any(figures.is_apart and any(pool.busy for pool in figures.pools or ()) for figures in arms.values()):
        return None
    lines = [(f"{arm}: {label}", cells) for arm, figures in arms.items() for label, cells in _pool_lines(figures)]
    return Grid(
        "How busy were workers and links? (mean / highest share)",
        ["workers", "GPUs", "computing", "sending", "receiving"],
        lines,
        "Computing: the share of the run in which a worker took steps. Sending and receiving: the share of its link's "
        "capacity that was used. The highest is that of a single worker or link.",
    )


def _pool_lines(arm: ArmSummary) -> list[tuple[str, list[str]]]:
    """Return a line per pool with the links of its workers, then those of nodes and racks."""
    links = {link.name: [_use(link.egress), _use(link.ingress)] for link in arm.links or ()}
    found = []
    for pool in arm.pools or ():
        label = pool.name if pool.name == pool.role else f"{pool.name} ({pool.role})"
        cells = [number(pool.workers), number(pool.gpus), _use(pool.busy) if pool.busy else "-"]
        found.append((label, cells + links.pop(pool.name, ["-", "-"])))
    return found + [(name, ["-", "-", "-", *cells]) for name, cells in links.items()]


def _use(use: Use) -> str:
    """Format mean and highest share; a link that carries nothing in a direction has none."""
    return f"{use.mean:.0%} / {use.highest:.0%}" if use.highest else "-"
