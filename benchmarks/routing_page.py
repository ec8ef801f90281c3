"""Write the tables of docs/routing-study.md, and its picks, from what routing_study.py measured.

    python benchmarks/routing_page.py routing-study/study.json docs/routing-study.md

Each table replaces what is between its markers, `<!-- table: NAME -->` and `<!-- end -->`, and each figure in the prose
what is between `<!-- figure: NAME -->` and `<!-- end -->`. The rest of the prose stays.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from serving.router import ROUTER_MODES
from serving.router.policies.predicting import Predicting

Row = dict[str, Any]
LATENCIES = ("e2e_ms", "ttft_ms", "ttft_p99_ms")
Distances = dict[str, dict[str, list[float]]]
TIE, MARGIN = 0.02, 0.03
"""Modes this close tie where one is picked. A pick holds if no other eligible mode is further ahead on unseen cells."""


def distances(rows: list[Row], of: Callable[[Row], Row | None] = lambda row: row) -> Distances:
    """Return for each mode how far it is from the best of each cell: ratios of latencies, and the good share lost."""
    cells: dict[str, dict[str, Row]] = {}
    for row in rows:
        if (figures := of(row)) is not None:
            cells.setdefault(f"{row['case']} {row['load']}", {})[row["mode"]] = figures
    found: Distances = {}
    for by_mode in cells.values():
        best = {name: min(figures[name] for figures in by_mode.values()) for name in LATENCIES}
        most = max(figures["good"] for figures in by_mode.values())
        for mode, figures in by_mode.items():
            mine = found.setdefault(mode, {name: [] for name in (*LATENCIES, "good")})
            for name in LATENCIES:
                mine[name].append(figures[name] / best[name])
            mine["good"].append(most - figures["good"])
    return found


def mean(ratios: Iterable[float]) -> float:
    """Return the geometric mean of ratios."""
    return float(np.exp(np.log(list(ratios)).mean()))


def behind(ratio: float) -> str:
    """Print a ratio as the share by which it is behind."""
    return f"{ratio - 1:.1%}" if ratio < 2 else f"{ratio:,.1f} x"


def needs_costs(mode: str) -> bool:
    """Return whether a mode needs the times of the engines' steps."""
    return issubclass(ROUTER_MODES[mode], Predicting)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


WANTS = (
    ("the times of steps", ("e2e_ms", "ttft_ms"), True),
    ("nothing", ("e2e_ms", "ttft_ms"), False),
    ("nothing, and only TTFT matters", ("ttft_ms",), False),
    ("nothing, and only E2E matters", ("e2e_ms",), False),
)
"""What is known, what matters, and whether modes that predict times are eligible."""


def picks(study: Row) -> str:
    """Pick on part 0, and try on the other parts."""
    seen, *others = (distances([row for row in study["cells"] if row["part"] == part]) for part in (0, 1, 2))
    lines = []
    for known, metrics, has_costs in WANTS:
        eligible = [mode for mode in seen if has_costs or not needs_costs(mode)]
        pick = choose(seen, eligible, metrics)
        verdicts = [verdict(found, pick, eligible, metrics) for found in others]
        cells = [f"{text(found[pick])}: {said}" for found, (_, said) in zip(others, verdicts, strict=True)]
        holds = all(holds for holds, _ in verdicts)
        lines.append([known, f"`{pick}`" if holds else f"none (`{pick}`)", text(seen[pick]), *cells])
    return table(("you know of the engines", "mode", "where it was picked", "on unseen cells", "on fresh cells"), lines)


def verdict(found: Distances, pick: str, eligible: list[str], metrics: Iterable[str]) -> tuple[bool, str]:
    """Return whether a pick holds on some cells, and the eligible mode that is ahead of it there."""
    scores = {mode: score(found[mode], metrics) for mode in eligible}
    ahead = min(scores, key=scores.__getitem__)
    lead = scores[pick] / scores[ahead] - 1
    said = "holds" if lead <= MARGIN else "does not hold"
    return lead <= MARGIN, f"{said}, `{ahead}` is {lead:.1%} ahead" if lead else f"{said}, best of its row"


def choose(found: Distances, eligible: list[str], metrics: Iterable[str]) -> str:
    """Return the best mode; of those that tie with it, the best in what else is measured."""
    scores = {mode: score(found[mode], metrics) for mode in eligible}
    least = min(scores.values())
    ties = [mode for mode in eligible if scores[mode] <= least * (1 + TIE)]
    return min(ties, key=lambda mode: score(found[mode], ("e2e_ms", "ttft_ms")))


def score(ratios: dict[str, list[float]], metrics: Iterable[str]) -> float:
    """Return the distance from the best in several metrics together."""
    return mean([mean(ratios[name]) for name in metrics])


def text(ratios: dict[str, list[float]]) -> str:
    """Print how far a mode is behind the best of all modes."""
    e2e, ttft = (behind(mean(ratios[name])) for name in ("e2e_ms", "ttft_ms"))
    return f"E2E {e2e}, TTFT {ttft}, {np.mean(ratios['good']):.1%} of good requests lost"


def ranks(study: Row, part: int) -> str:
    """Show how far each mode is from the best of each cell."""
    found = distances([row for row in study["cells"] if row["part"] == part])
    lines = []
    for mode in sorted(found, key=lambda mode: mean(found[mode]["e2e_ms"])):
        each = found[mode]
        cells = [text for name in LATENCIES for text in (behind(mean(each[name])), behind(max(each[name])))]
        lines.append([f"`{mode}`", *cells, f"{np.mean(each['good']):.1%}", f"{max(each['good']):.0%}"])
    head = ["mode", "E2E", "worst", "TTFT", "worst", "TTFT p99", "worst", "good lost", "worst"]
    return table(head, lines)


def losers(study: Row) -> str:
    """Show who pays: how far each class of requests is from what the best mode for it gives it, in mean TTFT."""
    names = list(dict.fromkeys(name for row in study["cells"] for name in row["classes"]))
    by_class = {name: distances(study["cells"], lambda row, name=name: row["classes"].get(name)) for name in names}
    lines = []
    for mode in distances(study["cells"]):
        means = {name: mean(found[mode]["ttft_ms"]) for name, found in by_class.items() if mode in found}
        most = max(means, key=means.__getitem__)
        worst = max(by_class[most][mode]["ttft_ms"])
        lines.append([f"`{mode}`", *(behind(means[name]) for name in names), f"{most}: {behind(worst)}"])
    return table(["mode", *names, "who pays most, in the worst cell"], lines)


def bursts(study: Row) -> str:
    """Show where a burst goes."""
    lines = []
    for mode in dict.fromkeys(row["mode"] for row in study["bursts"]):
        cells = []
        for name in ("burst", "equal prompts"):
            row = next(row for row in study["bursts"] if (row["workload"], row["mode"]) == (name, mode))
            cells += [
                f"{row['most_requests']:.2f}",
                f"{row['ttft_ms']:,.0f} / {row['ttft_p99_ms']:,.0f}",
                f"{row['e2e_ms']:,.0f}",
            ]
        lines.append([f"`{mode}`", *cells])
    each = ("most / mean", "TTFT mean / p99 (ms)", "E2E (ms)")
    return table(["mode", *(f"burst: {each[0]}", *each[1:]), *(f"equal prompts: {each[0]}", *each[1:])], lines)


def wrong_costs(study: Row) -> str:
    """Show what wrong costs of steps cost, against right ones."""
    lines = []
    rows = study["costs"]
    for costs in dict.fromkeys(row["costs"] for row in rows if row["costs"]):
        cells = []
        for case in dict.fromkeys(row["case"] for row in rows):
            for mode in ("marginal-all", "marginal"):
                mine = {row["costs"]: row for row in rows if (row["case"], row["mode"]) == (case, mode)}
                changes = [mine[costs][name] / mine[""][name] - 1 for name in ("ttft_ms", "e2e_ms")]
                cells.append(" / ".join(f"{change:+.1%}" for change in changes))
        lines.append([costs, *cells])
    head = [
        f"`{mode}`, {case}"
        for case in dict.fromkeys(row["case"] for row in rows)
        for mode in ("marginal-all", "marginal")
    ]
    return table(["costs", *head], lines)


def unspread(study: Row) -> str:
    """Show what spreading bursts costs `marginal-all` where there are none, against itself without it."""
    lines = []
    for case, load, changes in spread_costs(study):
        lines.append([f"{case}, {load:.0%}", *(f"{change:+.1%}" for change in changes)])
    return table(["workload, load", "TTFT", "E2E"], lines)


def spread_costs(study: Row) -> list[tuple[str, float, list[float]]]:
    """Return the changes of TTFT and E2E by cell."""
    by_cell: dict[tuple[str, float], dict[bool, Row]] = {}
    for row in study["unspread"]:
        by_cell.setdefault((row["case"], row["load"]), {})[row["mode"] == "marginal-all"] = row
    return [
        (*cell, [rows[True][name] / rows[False][name] - 1 for name in ("ttft_ms", "e2e_ms")])
        for cell, rows in by_cell.items()
    ]


def worst_of_others(study: Row, name: str) -> str:
    """Return the most that costs of another engine cost `marginal-all`."""
    rows = [row for row in study["costs"] if row["mode"] == "marginal-all"]
    right = {row["case"]: row[name] for row in rows if not row["costs"]}
    return f"{max(row[name] / right[row['case']] - 1 for row in rows if row['costs'].startswith('of ')):.1%}"


def cells(study: Row) -> str:
    """Show every figure."""
    parts = []
    for case in dict.fromkeys(row["case"] for row in study["cells"]):
        rows = [row for row in study["cells"] if row["case"] == case]
        loads = sorted({row["load"] for row in rows})
        lines = []
        for mode in dict.fromkeys(row["mode"] for row in rows):
            mine = sorted((row for row in rows if row["mode"] == mode), key=lambda row: row["load"])
            figures = [
                f"{row['ttft_ms']:,.0f} / {row['ttft_p99_ms']:,.0f} / {row['e2e_ms']:,.0f}, {row['good']:.0%}"
                f"{'' if row['is_stable'] else ' (grew)'}"
                for row in mine
            ]
            lines.append([f"`{mode}`", *figures, f"{mine[-1]['hit_share']:.1%}", f"{mine[-1]['imbalance']:.2f}"])
        head = [f"{load:.0%}: TTFT mean / p99 / E2E ms, good" for load in loads]
        parts.append(f"### {case[0].upper()}{case[1:]}\n\n" + table(["mode", *head, "hits", "max/mean"], lines))
    return "\n\n".join(parts)


TABLES: dict[str, Callable[[Row], str]] = {
    "picks": picks,
    "picked on": lambda study: ranks(study, 0),
    "unseen": lambda study: ranks(study, 1),
    "who pays": losers,
    "fresh": lambda study: ranks(study, 2),
    "bursts": bursts,
    "unspread": unspread,
    "wrong costs": wrong_costs,
    "cells": cells,
}

FIGURES: dict[str, Callable[[Row], str]] = {
    "E2E with costs of others": lambda study: worst_of_others(study, "e2e_ms"),
    "TTFT with costs of others": lambda study: worst_of_others(study, "ttft_ms"),
    "worst E2E of spreading": lambda study: f"{max(changes[1] for *_, changes in spread_costs(study)):+.1%}",
    "behind in E2E on fresh cells": lambda study: _behind_on_fresh(study, "lmetric"),
}


def _behind_on_fresh(study: Row, mode: str) -> str:
    found = distances([row for row in study["cells"] if row["part"] == 2])
    return behind(mean(found[mode]["e2e_ms"]))


def fill(page: str, study: Row) -> str:
    """Return the page with the tables and figures of this study."""
    for name, figure in FIGURES.items():
        pattern = rf"(<!-- figure: {name} -->).*?(<!-- end -->)"
        page, count = re.subn(pattern, lambda match, figure=figure: f"{match[1]}{figure(study)}{match[2]}", page)
        if count != 1:
            sys.exit(f"the page has {count} places for the figure {name!r}; expected one")
    for name, write in TABLES.items():
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        page, count = re.subn(
            pattern, lambda match, write=write: f"{match[1]}\n{write(study)}\n\n{match[2]}", page, flags=re.DOTALL
        )
        if count != 1:
            sys.exit(f"the page has {count} places for the table {name!r}; expected one")
    return page


if __name__ == "__main__":
    measured, target = Path(sys.argv[1]), Path(sys.argv[2])
    target.write_text(fill(target.read_text(), json.loads(measured.read_text())))
