"""How close simulated figures come to real ones, as a table and in words."""

from functools import partial

from reports.fidelity import ArmFidelity, Deviation
from reports.figures.cells import milliseconds, number, share
from reports.tables.grid import Grid


def lead(arm: str, found: ArmFidelity) -> str:
    """Say how far the means are off."""
    errors = {row.name: row.error for row in found.deviations}
    parts = [
        f"{name.upper()} {error:+.1%}"
        for name in ("ttft", "tpot", "e2e")
        if (error := errors.get(f"{name}.mean")) is not None
    ]
    return f"{arm}: simulated means are off by {', '.join(parts)}." if parts else f"{arm}: nothing to compare."


def fidelity_grid(arm: str, found: ArmFidelity) -> Grid:
    """Lay out real and simulated figures of an arm; one column appears only if the speed of the real engine is known."""
    rows = found.deviations
    columns = {"real": True, "simulated": True, "error": True}
    columns["real runs differ by"] = has_spread = any(row.spread is not None for row in rows)
    columns["error at the runs' speed"] = any(row.error_at_speed is not None for row in rows)
    lines = [
        (label, [cell for cell, is_known in zip(cells, columns.values(), strict=True) if is_known])
        for label, *cells in map(_fidelity_cells, rows)
    ]
    alone = "" if has_spread else "With one real run, it is not known how far such runs differ; use --repeats. "
    known = [name for name, is_known in columns.items() if is_known]
    return Grid(f"Simulated against real: {arm}", known, lines, f"{alone}{distances(found)}")


def distances(found: ArmFidelity) -> str:
    """Say how far apart the distributions are, and how fast the real engine was."""
    parts = [
        f"{name.upper()} {row.wasserstein:.1%} of the mean (Kolmogorov-Smirnov {row.ks:.3f})"
        for name, row in found.distances.items()
    ]
    text = f"Distance between the distributions: {', '.join(parts)}." if parts else ""
    if found.speed:
        text += (
            f" On the real engine, the same batches took {_more(found.speed.prefill)} time than in the calibration with prefill "
            f"and {_more(found.speed.decode)} without."
        )
    return text


def _more(speed: float) -> str:
    change = 1 / speed - 1
    return f"{abs(change):.1%} {'more' if change >= 0 else 'less'}"


def _fidelity_cells(row: Deviation) -> list[str]:
    is_time, is_share = row.statistic is not None, row.metric == "hit_share"
    shown = milliseconds if is_time else share if is_share else partial(number, digits=2)
    unit = " points" if is_share else "%"
    errors = [
        "n/a" if value is None else f"{value * 100:{sign}.1f}{unit}"
        for value, sign in ((row.error, "+"), (row.spread, ""), (row.error_at_speed, "+"))
    ]
    return [f"{row.name} (ms)" if is_time else row.name, shown(row.real), shown(row.simulated), *errors]
