"""Least squares with coefficients that are not negative."""

from collections.abc import Callable

import numpy as np

from reports.record.records import Flags, Floats

MOST_DAMPING = 1e4
LEAST_GAIN = 1e-3
"""A step that improves the sum of squares by less than this is the last."""


def non_negative(matrix: Floats, target: Floats) -> Floats:
    """Return the x >= 0 that minimises |matrix x - target|, by Lawson and Hanson's active sets.

    Each coefficient is either fixed at zero or free. The coefficient that helps most is freed, and those that would
    become negative are fixed again, until freeing none helps. (scipy has the same function, but is 140 MB.)
    """
    q, matrix = np.linalg.qr(matrix)  # now there are only as many rows as columns, however many were measured
    target = q.T @ target
    num = matrix.shape[1]
    limit = 10 * num * np.finfo(float).eps * np.abs(matrix).sum(axis=0).max(initial=0.0) * np.linalg.norm(target)
    found, is_free, is_tried = np.zeros(num), np.zeros(num, bool), np.zeros(num, bool)
    for _ in range(30 * num):
        gain = np.where(is_free | is_tried, -np.inf, matrix.T @ (target - matrix @ found))
        best = int(gain.argmax())
        if gain[best] <= limit:
            break
        is_free[best] = True
        found = _descend(matrix, target, found, is_free)
        # If rounding fixed a coefficient again at once, it is not retried until another has moved.
        is_tried = np.zeros(num, bool) if is_free[best] else is_tried | (np.arange(num) == best)
    return found


def _descend(matrix: Floats, target: Floats, found: Floats, is_free: Flags) -> Floats:
    """Move towards the best free coefficients, fixing each that reaches zero on the way (modifies `is_free`)."""
    while is_free.any():
        best = np.zeros(len(found))
        best[is_free] = np.linalg.lstsq(matrix[:, is_free], target)[0]
        falling = np.flatnonzero(is_free & (best <= 0))
        if not len(falling):
            return best
        steps = found[falling] / np.maximum(found[falling] - best[falling], np.finfo(float).tiny)
        found = found + steps.min() * (best - found)
        found[falling[steps.argmin()]] = 0.0
        is_free[falling[found[falling] <= 0]] = False
        found[~is_free] = 0.0
    return np.zeros(len(found))


def fit(residuals: Callable[[Floats], Floats], start: Floats, *, rounds: int = 12) -> Floats:
    """Return the x >= 0 near `start` that minimises the sum of squares of residuals that are not linear in it.

    Levenberg and Marquardt's steps, each to the best of a linear model that is damped more until it helps. Coefficients are
    scaled by their start, which is positive, and differ by a fiftieth for the derivatives: a simulation's figures jump a
    little with its step times, so smaller differences would measure the jumps.
    """
    scale, found = start.copy(), start.copy()
    now = residuals(found)
    damping = 0.01
    for _ in range(rounds):
        slopes = np.stack(
            [_slope(residuals, found, now, place, 0.02 * scale[place]) for place in range(len(found))], axis=1
        )
        while damping < MOST_DAMPING:
            reach = np.sqrt(damping)
            matrix = np.concatenate([slopes * scale, reach * np.eye(len(found))])
            target = np.concatenate([slopes @ found - now, reach * found / scale])
            tried = non_negative(matrix, target) * scale
            then = residuals(tried)
            if then @ then < now @ now:
                break
            damping *= 8
        else:
            break
        gain = 1 - (then @ then) / (now @ now)
        found, now, damping = tried, then, damping / 4
        if gain < LEAST_GAIN:
            break
    return found


def _slope(residuals: Callable[[Floats], Floats], at: Floats, now: Floats, place: int, step: float) -> Floats:
    moved = at.copy()
    moved[place] += step
    return (residuals(moved) - now) / step
