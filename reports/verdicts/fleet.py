"""What it costs to meet the limits with a changing number of workers, in a sentence or two."""

from collections.abc import Mapping
from typing import NamedTuple

from reports.figures.fleet import ENOUGH, FleetFigures, hours
from reports.summary import NOISE_FLOOR, Summary


class Kept(NamedTuple):
    """What an arm used, and how well it met the limits."""

    fleet: FleetFigures
    share: float
    """The share of the requests within the limits."""
    is_enough: bool


def fleet_verdict(summary: Summary) -> str:
    """Say which arm meets the limits with the fewest GPU-hours, and what the others would cost; nothing without limits."""
    is_each = any(limit.statistic is None for limit in summary.conditions)
    arms = {}
    for arm, its in summary.arms.items():
        share = its.goodput.attainment if its.goodput else None
        if its.fleet and share is not None and not arm.endswith(NOISE_FLOOR):
            is_enough = all(one.state == "met" for one in its.outcomes or ()) and (share >= ENOUGH or not is_each)
            arms[arm] = Kept(its.fleet, share, is_enough)
    return told(arms, f"meets the limits for at least {ENOUGH:.0%} of the requests" if is_each else "meets every limit")


def told(arms: Mapping[str, Kept], what: str) -> str:
    """Say which arm meets the limits with the fewest GPU-hours, or comes closest, and what the others would cost."""
    if not arms:
        return ""
    enough = {arm: one for arm, one in arms.items() if one.is_enough}
    if enough:
        best = min(enough, key=lambda arm: enough[arm].fleet.gpu_h)
        took = hours(arms[best].fleet.gpu_h)
        text = f"{best} {what}{f' with the fewest GPU-hours: {took}' if len(arms) > 1 else f', in {took} GPU-hours'}"
    else:
        best = max(arms, key=lambda arm: (arms[arm].share, -arms[arm].fleet.gpu_h))
        lead = f"No arm {what}; {best} comes closest, with " if len(arms) > 1 else f"{best} has "
        text = f"{lead}{arms[best].share:.1%} of the requests within the limits, in "
        text += f"{hours(arms[best].fleet.gpu_h)} GPU-hours"
    return f"{text}{_still(best, arms)}.{_needed(arms[best].fleet)}"


def _still(best: str, arms: Mapping[str, Kept]) -> str:
    """Say what a constant fleet takes: that of another arm or, if there is none, the most that the best arm had."""
    its = arms[best].fleet
    others = {arm: one for arm, one in arms.items() if one.fleet.is_still and arm != best}
    if others:
        arm = min(others, key=lambda arm: others[arm].fleet.gpu_h)
        other = others[arm]
        more = f" ({other.fleet.gpu_h / its.gpu_h - 1:+.0%})" if its.gpu_h else ""
        return (
            f"; {arm} takes {hours(other.fleet.gpu_h)}{more}, with {other.share:.1%} of the requests within the limits"
        )
    if its.is_still or its.peak_gpu_h < 1.01 * its.gpu_h:
        return ""
    return f"; running its peak number of GPUs all the time would take {hours(its.peak_gpu_h)}"


def _needed(its: FleetFigures) -> str:
    oracle = its.against_oracle
    if oracle is None:
        return ""
    least = f" (which is possible for {oracle.possible:.1%} of the requests)" if oracle.possible < 0.9995 else ""
    steady = f"running as many as the busiest part needs all the time would take {hours(oracle.steady_gpu_h)}"
    less = ", less than this planner" if its.planner != "static" and oracle.steady_gpu_h < 0.99 * its.gpu_h else ""
    return f" The fewest workers that meet the limits in each part{least} would take {hours(oracle.needed_gpu_h)}; {steady}{less}."
