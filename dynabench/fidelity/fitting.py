"""Fit a step-time model to measured steps: non-negative least squares on relative errors."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dynabench.fidelity.least_squares import non_negative
from dynabench.fidelity.step_log import Array, EngineStepLog
from mocker.timing.calibrated import Calibrated, StepCosts
from mocker.timing.model import Prefill

KNOTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
OUTLIER = 3.0
"""A step that took more than this multiple of the model's time is left out: something else was running."""
ROUNDS = 8


class Fit(NamedTuple):
    """A model and its errors on steps that it was not fitted to."""

    costs: StepCosts
    held_out: dict[str, float]


def fit_steps(logs: Sequence[EngineStepLog], seed: int = 0) -> Fit:
    """Fit to four fifths of the steps of all engines, test on the rest, then fit to all."""
    duration = np.concatenate([log.duration_s for log in logs])
    steps = {name: np.concatenate([log.steps[name] for log in logs]) for name in logs[0].steps}
    keep = (duration > 0) & (steps["preempted"] == 0)
    knots = [knot for knot in KNOTS if knot < float(_tokens(steps).max(initial=1))]
    features = _features(steps, knots)[keep]
    duration = duration[keep]
    is_held = np.random.default_rng(seed).random(len(duration)) < 0.2
    trial, _ = _solve(features[~is_held], duration[~is_held])
    held_out = _errors(features[is_held] @ trial, duration[is_held])
    coefficients, is_outlier = _solve(features, duration)
    held_out |= {"steps": float(len(duration)), "outliers": float(is_outlier.mean())}
    return Fit(_costs(coefficients, knots), held_out)


def predicted(costs: StepCosts, steps: dict[str, Array]) -> Array:
    """Return the model's times of measured steps (s)."""
    model, found = Calibrated(costs), []
    names = ("prefill_tokens", "prefill_context", "prefill_pairs", "num_prefills", "num_decodes", "kv_tokens")
    for tokens, context, pairs, prefills, decodes, kv in zip(*(steps[name] for name in names), strict=True):
        if tokens:
            found.append(model.mixed(Prefill(int(tokens), int(context), pairs, int(prefills)), int(decodes), int(kv)))
        else:
            found.append(model.decode(int(decodes), int(kv)).first)
    return np.array(found)


def _tokens(steps: dict[str, Array]) -> Array:
    return steps["prefill_tokens"] + steps["num_decodes"]


def _features(steps: dict[str, Array], knots: list[int]) -> Array:
    """Return a column for each coefficient; tokens are split at the knots, and no slope is negative."""
    tokens, has_prefill = _tokens(steps), steps["prefill_tokens"] > 0
    ends = [*knots[1:], np.inf]
    segments = [np.clip(tokens - knot, 0, end - knot) for knot, end in zip(knots, ends, strict=True)]
    columns = [
        (~has_prefill).astype(float),
        has_prefill.astype(float),
        *segments,
        steps["num_prefills"] + steps["num_decodes"],
        steps["num_prefills"],
        steps["prefill_pairs"],
        steps["prefill_context"],
        np.where(has_prefill, 0.0, steps["kv_tokens"]),
        np.where(has_prefill, steps["kv_tokens"], 0.0),
    ]
    return np.stack(columns, axis=1)


def _solve(features: Array, duration: Array) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Solve by least squares without outliers, weighted by the model's own times, so that the fit meets the mean."""
    scale = np.maximum(np.abs(features).max(axis=0), 1e-30)
    weight, is_outlier = 1 / duration, np.zeros(len(duration), bool)
    coefficients = np.zeros(features.shape[1])
    for _ in range(ROUNDS):
        use = ~is_outlier
        found = non_negative(features[use] / scale * weight[use, None], duration[use] * weight[use])
        coefficients = found / scale
        expected = np.maximum(features @ coefficients, 1e-9)
        is_outlier = duration > OUTLIER * expected
        weight = 1 / expected
    return coefficients, is_outlier


def _costs(coefficients: Array, knots: list[int]) -> StepCosts:
    fixed, mixed, *rest = (float(f"{value:.6g}") for value in coefficients)
    slopes, (sequence, prompt, pair, context, kv, mixed_kv) = rest[: len(knots)], rest[len(knots) :]
    steps = zip(knots, np.diff(slopes, prepend=0.0), strict=True)
    return StepCosts(
        fixed=fixed,
        mixed=mixed,
        tokens=tuple((float(knot), float(slope)) for knot, slope in steps if slope),
        sequence=sequence,
        prompt=prompt,
        pair=pair,
        context=context,
        kv=kv,
        mixed_kv=mixed_kv,
    )


def _errors(expected: Array, actual: Array) -> dict[str, Any]:
    """Return the median and mean relative error of a step, and the error of the total time (%)."""
    error = np.abs(expected / actual - 1) * 100
    total = (expected.sum() / actual.sum() - 1) * 100
    return {
        name: round(float(value), 2)
        for name, value in (("median", np.median(error)), ("mean", error.mean()), ("total", total))
    }
