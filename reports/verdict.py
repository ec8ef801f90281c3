"""What a comparison found, in a few sentences."""

from reports import insight
from reports.fleet_verdict import fleet_verdict
from reports.summary import NOISE_FLOOR, WAYS, Difference, Summary
from reports.tiers import overlap


def verdict(summary: Summary) -> str:
    """Say in a few sentences which arm won, by how much, and whether that is more than noise."""
    parts = [] if summary.is_valid else ["This run is not valid (see the notes): do not trust its figures."]
    parts.append(fleet_verdict(summary))  # first if the number of workers changes: that is what they are compared for
    if not summary.differences:
        parts.append(f"Only {summary.baseline} was run; to compare it, add another --router-mode or a --vary.")
    parts += filter(
        None, [_winner(summary, "ttft_sched", "mean TTFT"), _winner(summary, "tpot", "mean time per output token")]
    )
    parts += [
        f"{arm} could not keep up: {max(figures.stability.start, 0):.0f} requests waited at the start and "
        f"{figures.stability.end:.0f} at the end. Its averages measure the length of the run, so they are not compared."
        for arm, figures in summary.arms.items()
        if not figures.stability.is_stable
    ]
    parts.append(overlap((arm.saved or None, arm.gpu_s or None) for arm in summary.arms.values()))
    if summary.is_exact:
        parts.append(
            f"Two runs of {summary.baseline} are exactly equal: nothing in them is random, so there is no noise."
        )
    if (ways := _ways(summary)) is not None:
        parts.append(ways)
    if not summary.is_complete:
        parts.append("The run was interrupted, so it does not cover the whole workload.")
    return " ".join(filter(None, parts)) or "No request succeeded."


def _winner(summary: Summary, name: str, label: str) -> str | None:
    """Compare the best arm with the baseline, or the baseline with the second best; None if there is only one."""
    baseline = summary.baseline
    means = {
        arm: mean
        for arm, figures in summary.arms.items()
        if (mean := figures.metric(name).mean) is not None and figures.stability.is_stable and not is_repeated(arm)
    }
    if baseline not in means or len(means) < 2:
        return None
    best = min(means, key=means.__getitem__)
    if best != baseline:
        return _sentence(label, best, baseline, summary.difference(best, name, "mean"), sign=1)
    rival = min((arm for arm in means if arm != baseline), key=means.__getitem__)
    return _sentence(label, baseline, rival, summary.difference(rival, name, "mean"), sign=-1)


def _ways(summary: Summary) -> str | None:
    """Say how answers ended if that differs between arms, ignoring up to one in a hundred."""
    ways = {}
    for arm, figures in summary.arms.items():
        if figures.ends:
            least = insight.FEW * sum(figures.ends.values())
            common = sorted(reason for reason, count in figures.ends.items() if count > least)
            ways[arm] = " and ".join(f"by {WAYS.get(reason, reason)}" for reason in common)
    if len(set(ways.values())) < 2:
        return None
    return f"Answers ended differently: {'; '.join(f'{way} in {arm}' for arm, way in ways.items())}."


def is_repeated(arm: str) -> bool:
    """Return whether an arm is only there for the noise floor."""
    return arm.endswith(NOISE_FLOOR)


def _sentence(label: str, winner: str, loser: str, difference: Difference | None, *, sign: int) -> str:
    if difference is None:
        return f"{winner} and {loser} have too few requests in common to compare {label}."
    mean = difference.mean
    low, high = sorted((abs(difference.low), abs(difference.high)))
    base = mean / difference.relative if difference.relative else 0.0
    share = abs(mean) / (base if sign > 0 else base + mean) if base else 0.0
    amount = f"{_milliseconds(abs(mean))} ms ({share:.1%})"
    if difference.is_exact:
        return f"{winner} and {loser} have exactly the same {label}: every request took the same time in both."
    if difference.verdict == "equal":
        return f"{winner} and {loser} have practically the same {label}: they differ by {amount}."
    if difference.verdict == "inconclusive":
        why = "the 95% interval includes zero" if difference.is_noise else "two runs of the same arm differ by as much"
        return (
            f"{winner} and {loser} do not differ in {label} by more than noise ({amount}; {why}; "
            f"a difference of {difference.detectable:.1%} would have been found)."
        )
    return (
        f"{winner} has the lower {label}, by {amount} against {loser} "
        f"(95% interval {_milliseconds(low)} to {_milliseconds(high)} ms, paired by request), which is more than noise."
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.0f}" if seconds >= 1 else f"{seconds * 1000:.3g}"
