"""Do the intervals of docs/fidelity.md hold? Each measured point is judged by the others; print a table.

    python benchmarks/model_error.py

What is left out for a point is what one would not have: its own layout and lengths, its whole case (model, weights,
engine, GPU), or its model. The table has the share of points within their 90% intervals, the median width (high / low),
and the Brier score of the chance that a limit holds, for limits of 0.75 to 1.33 times the simulated value, beside that
of trusting the simulated value. The exit code is 1 if less than 85% or more than 97% are covered.
"""

import sys
from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np

from dynabench.experiment.model_error import Case, published_points
from mocker.models.catalog import find_model

LIMITS = (0.75, 0.9, 1.0, 1.1, 1.33)
"""Limits, as multiples of the simulated value."""
BETWEEN = (0.85, 0.97)
"""What share of points is to be within their 90% intervals."""
LEFT_OUT: dict[str, Callable[[Case], Hashable]] = {
    "its layout and lengths": lambda case: (*case[:5], case.load and case.load[1:]),
    "its model on this engine and GPU": lambda case: case.key,
    "its model": lambda case: case.model,
}
"""What others may not have in common with a point."""


class Judged(NamedTuple):
    """What came of judging each point by others."""

    covered: float
    """Share of points within their intervals."""
    width: float
    """Median of high / low."""
    brier: float
    """Of the chance that a limit holds."""
    brier_of_simulated: float
    """Of taking the simulated value for the real one."""


def judge(key: Callable[[Case], Hashable]) -> dict[str, Judged]:
    """Judge each point by those with another key; return what came of TTFT and TPOT."""
    points = published_points()
    keys = [key(case) for case in points.cases]
    found: dict[str, list[tuple[float, ...]]] = {"ttft": [], "tpot": []}
    for place, case in enumerate(points.cases):
        others = np.array([one != keys[place] for one in keys])
        error = points.error_of(case, find_model(case.model), others)
        for metric, rows in found.items():
            ratios, real = error.of(metric)[0], float(np.exp(points.logs[metric][place]))
            low, high = ratios.interval
            chances = [(ratios.below(limit), limit >= 1, real <= limit) for limit in LIMITS]
            brier = np.mean([(chance - holds) ** 2 for chance, _, holds in chances])
            simulated = np.mean([said != holds for _, said, holds in chances])
            rows.append((float(low <= real <= high), high / low, float(brier), float(simulated)))
    return {
        metric: Judged(
            *(
                float(np.median(column) if name == "width" else np.mean(column))
                for name, column in zip(Judged._fields, zip(*rows, strict=True), strict=True)
            )
        )
        for metric, rows in found.items()
    }


def main() -> int:
    """Print the table."""
    print("| left out | mean | within the interval | width | Brier score | of the simulated value |")
    print("|---|---|---|---|---|---|")
    is_good = True
    for name, key in LEFT_OUT.items():
        for metric, judged in judge(key).items():
            is_good &= BETWEEN[0] <= judged.covered <= BETWEEN[1]
            print(
                f"| {name} | {metric.upper()} | {judged.covered:.1%} | {judged.width:.2f}x | {judged.brier:.3f} "
                f"| {judged.brier_of_simulated:.3f} |"
            )
    return not is_good


if __name__ == "__main__":
    sys.exit(main())
