"""Requests that no number of workers answers, because they are longer than the model's context."""

from collections.abc import Sequence

from dynabench.arm import Arm
from dynabench.deployment.engines import ANY_LENGTH, Longest, are_answered, engines_of, longest_of
from dynabench.experiment.source import Source
from foundation.errors import UserError
from reports.figures.conditions import Condition
from reports.figures.outcomes import num_required
from workloads import Workload
from workloads.pacing import LoadConfig

LENGTHS = ("max_model_len", "cap_isl")
"""Settings on which it depends which requests fit the context."""


def check_refusals(
    find: str, arms: Sequence[Arm], source: Source, limits: Sequence[Condition], attainment: float
) -> None:
    """Refuse a search whose every value misses a limit, because too many requests do not fit the context of any arm.

    Raises:
        UserError: it is one.
    """
    reasons = []
    for arm in arms if find not in LENGTHS else ():
        try:
            longest = longest_of(engines_of(arm.settings.deployment))
        except ValueError:  # the search says why the arm is impossible
            continue
        workload = source(arm.settings.shape)
        reasons.append(missed_by_refusals(workload, arm.settings.load, longest, limits, attainment))
    if reasons and all(reasons):
        raise UserError(str(reasons[0]))


def missed_by_refusals(
    workload: Workload, load: LoadConfig, longest: Longest, limits: Sequence[Condition], attainment: float
) -> str | None:
    """Say which limit is missed because engines with these limits refuse too many requests."""
    if longest == ANY_LENGTH or (load.has_window and load.waits_for_answers(workload)):
        return None  # which requests count depends on answers, too
    may_count = load.may_count(workload)
    count, refused = int(may_count.sum()), int((may_count & ~are_answered(workload, longest)).sum())
    missed = next((limit for limit in limits if _misses(limit, count, refused, attainment)), None)
    if missed is None:
        return None
    return (
        f"{refused:,} of {count:,} requests do not fit {longest} and fail with any number of "
        f"GPUs, too many for {missed}: use a model with a longer context (or a larger --max-model-len, if you set it), "
        "or cut prompts with --cap-isl"
    )


def _misses(limit: Condition, count: int, refused: int, attainment: float) -> bool:
    """Return whether this many failed requests miss a limit: each counts as infinite, and has no gaps between tokens."""
    if not refused or limit.metric == "itl":
        return False
    return count - refused < num_required(limit, count, attainment, are_infinite=True)
