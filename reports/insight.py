"""What the router did: where hits were lost, how even the load was, how often a prefix was left; and whether the plan was kept."""

from typing import Any

import numpy as np

from reports.records import ArmResult, Floats

WATERFALL = {
    "endless": "one endless cache for all",
    "best": "best worker at that time",
    "predicted": "router's prediction for the worker it chose",
    "actual": "cached tokens the engine found",
}


def waterfall(run: ArmResult) -> dict[str, float | None]:
    """Return the share of prompt tokens cached at each stage, None where it is not known.

    Where the engine found more than was predicted, other requests cached it in the meantime. Modes that do not follow who
    has what predict nothing.
    """
    c = run.columns
    good = c["error"] == ""
    total = float(c["isl"][good].sum())
    names = {
        "endless": "endless_tokens",
        "best": "best_tokens",
        "predicted": "predicted_tokens",
        "actual": "cached_tokens",
    }
    result: dict[str, float | None] = {}
    follows = "best_tokens" in c and bool((c["best_tokens"][good] >= 0).all())
    for stage, name in names.items():
        known = name in c and (follows or stage not in ("best", "predicted"))
        result[stage] = float(c[name][good].sum() / total) if known and total else None
    return result


def affinity_breaks(run: ArmResult) -> float | None:
    """Return the share of requests that went to a worker with less of their prefix than another had, or None."""
    c = run.columns
    if "best_tokens" not in c or not len(c["best_tokens"]) or (c["best_tokens"] < 0).any():
        return None
    return float((c["predicted_tokens"] < c["best_tokens"]).mean())


def imbalance(run: ArmResult) -> dict[str, float]:
    """Return how uneven the workers' shares are: of work (uncached prompt and output tokens) and of requests.

    Busiest over mean, coefficient of variation, and Jain's index ((sum x)^2 / (W sum x^2): 1 is even, 1/W one for all).
    """
    c = run.columns
    known = c["worker"] >= 0
    workers = c["worker"][known]
    if not len(workers):
        return {"work_max_over_mean": 1.0, "work_cv": 0.0, "work_jain": 1.0, "requests_max_over_mean": 1.0}
    work = np.bincount(workers, weights=_work(run)[known], minlength=run.num_workers)
    requests = np.bincount(workers, minlength=run.num_workers)
    mean = work.mean() or 1.0
    return {
        "work_max_over_mean": float(work.max() / mean),
        "work_cv": float(work.std() / mean),
        "work_jain": float(work.sum() ** 2 / (len(work) * (work**2).sum())) if work.any() else 1.0,
        "requests_max_over_mean": float(requests.max() / requests.mean()),
    }


def work_over_time(run: ArmResult, edges: Floats) -> Floats:
    """Return the work sent to each worker within each window (tokens per second), shape (workers, windows)."""
    c = run.columns
    work = _work(run)
    rows = [
        np.histogram(c["intended_s"][c["worker"] == worker], edges, weights=work[c["worker"] == worker])[0]
        for worker in range(run.num_workers)
    ]
    result: Floats = np.array(rows) / np.diff(edges)
    return result


def covered(means: dict[str, float], bound: float | None) -> dict[str, float]:
    """Return how much of the way from `random` to a lower bound each arm's mean covers (1: all of it)."""
    worst = means.get("random")
    if worst is None or bound is None or worst <= bound:
        return {}
    return {arm: (worst - mean) / (worst - bound) for arm, mean in means.items()}


MISSED = 0.05
"""A length that is off by more than this share was not the planned one."""
FEW = 0.01
"""The share of the requests that may miss a length without a remark."""


def remarks(repeats: list[ArmResult]) -> list[str]:
    """Say what a reader should know of an arm's runs, though it spoils nothing."""
    found = []
    for name, what in (("isl", "prompts"), ("osl", "answers")):
        pairs = [_lengths(run, name) for run in repeats if f"planned_{name}" in run.columns]
        actual, planned = np.concatenate(pairs, axis=1) if pairs else np.empty((2, 0))
        missed = int((np.abs(actual - planned) > MISSED * planned).sum())
        if missed > FEW * len(planned):
            found.append(
                f"{missed:,} of {len(planned):,} {what} missed the workload's length by more than {MISSED:.0%}: they had "
                f"{actual.mean():.4g} tokens on average instead of {planned.mean():.4g}"
            )
    unstated = sum(int(run.facts.get("without_usage", 0)) for run in repeats)
    if unstated:
        found.append(
            f"{unstated:,} answers came without usage: each of their events with text counts as a token, and their prompts "
            "have the workload's lengths"
        )
    return found


def _lengths(run: ArmResult, name: str) -> Floats:
    """Return the lengths and their plan, shape (2, requests), of the requests that succeeded and had one."""
    c = run.columns
    both = np.array([c[name], c[f"planned_{name}"]], float)
    return both[:, (c["error"] == "") & ~np.isnan(both[1])]


def _work(run: ArmResult) -> Any:
    c = run.columns
    return c["isl"] - c["cached_tokens"] + c["osl"]
