"""Requests that no number of workers answers, because they are longer than the model's context."""

import math
from collections.abc import Sequence

from dynabench.deployment.engines import refusal_of
from reports.conditions import Condition
from reports.outcomes import SHARES
from workloads import Workload


def missed_by_refusals(
    workload: Workload, context: int | None, limits: Sequence[Condition], attainment: float
) -> str | None:
    """Say which limit is missed because engines with this context (None: any length) refuse too many requests."""
    count = len(workload)
    refused = 0 if context is None else sum(refusal_of(request, context) is not None for request in workload)
    missed = next((limit for limit in limits if _misses(limit, count, refused, attainment)), None)
    if missed is None:
        return None
    return (
        f"{refused:,} of {count:,} requests do not fit the context of {context:,} tokens and fail with any number of "
        f"GPUs, too many for {missed}: use a model with a longer context (or a larger --max-model-len, if you set it), "
        "or cut prompts with --cap-isl"
    )


def _misses(limit: Condition, count: int, refused: int, attainment: float) -> bool:
    """Return whether this many failed requests miss a limit; means and maxima are of those that were answered."""
    if limit.metric == "itl" or limit.statistic in ("mean", "max"):
        return False
    if limit.statistic is None:
        return 1 - refused / count < attainment
    return math.ceil((count - 1) * SHARES[limit.statistic]) >= count - refused
