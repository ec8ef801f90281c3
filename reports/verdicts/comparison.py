"""What a comparison found, in a few sentences."""

from collections.abc import Mapping

from reports.figures import insight
from reports.figures.slo import parse_slo
from reports.figures.tiers import overlap_remark
from reports.summary import WAYS, Difference, Ranking, RankingStep, Summary
from reports.verdicts import headline
from reports.verdicts.drafts import where_drafts_pay
from reports.verdicts.engines import EngineError, between_engines
from reports.verdicts.fleet import fleet_verdict
from reports.verdicts.naming import LABELS, MOST, named, only_here, quoted
from reports.verdicts.ranking import OUT_OF_LIMITS


def verdict(summary: Summary, engine_errors: Mapping[str, EngineError]) -> str:
    """Say in a few sentences which arm is best, by how much, and whether that is more than noise."""
    parts = [] if summary.is_valid else ["This run is not valid (see the notes): do not trust its figures."]
    parts.append(headline.answer(summary))
    parts.append(fleet_verdict(summary))  # first if the number of workers changes: that is what they are compared for
    if not summary.differences:
        parts.append(f"Only {summary.baseline} was run; to compare it, add another --router-mode or a --vary.")
    parts += [*_failures(summary), *_best(summary), _between_engines(summary, engine_errors), *_elsewhere(summary)]
    parts.append(_grown(summary))
    parts.append(where_drafts_pay({arm: its.drafts or () for arm, its in summary.arms.items()}))
    parts.append(overlap_remark((arm.saved or None, arm.gpu_s or None) for arm in summary.arms.values()))
    if summary.is_exact:
        parts.append(
            f"Two runs of {summary.baseline} are exactly equal: nothing in them is random, so there is no noise."
        )
    if (ways := _ways(summary)) is not None:
        parts.append(ways)
    if not summary.is_complete:
        parts.append("The run was interrupted, so it does not cover the whole workload.")
    return quoted(" ".join(filter(None, parts)), summary.arms) or "No request succeeded."


def _failures(summary: Summary) -> list[str]:
    """Say which arms failed more requests than others, and what the times of the rest cover."""
    ranking = summary.ranking or None
    if ranking is None:
        return []
    said = [
        f"{why} in {arm}, so it is not compared: its times cover only what it answered."
        for arm, why in ranking.set_aside.items()
        if why.endswith("failed")
    ]
    failed = {arm: summary.arms[arm].failed for arm in ranking.compared if summary.arms[arm].failed}
    if failed and len(ranking.compared) > 1:
        each = named([f"{count:,} in {arm}" for arm, count in failed.items()])
        said.append(f"Times are compared over the requests that every compared arm answered (failed: {each}).")
    return said


def _best(summary: Summary) -> list[str]:
    """Say which arm is best in each metric, among those that tie in the metric before it."""
    ranking = summary.ranking or None
    if ranking is None or len(ranking.compared) < 2:
        return []
    if not ranking.steps:
        return ["The compared arms have too few requests in common to compare their times."]
    said, last = list[str](), ranking.steps[-1]
    for place, step in enumerate(ranking.steps):
        before = ranking.steps[place - 1] if place else None
        if step is last and step.metric == "e2e_sched" and len(step.ties) == len(step.differences) + 1:
            break  # nothing new: they tie in its parts, and in the whole
        said.append(_of_limits(summary, step) if step.metric == OUT_OF_LIMITS else _in_metric(step, before, ranking))
    return [*said, *_cost(ranking)]


def _in_metric(step: RankingStep, before: RankingStep | None, ranking: Ranking) -> str:
    """Say which arm is lowest in a metric, or which tie."""
    label, count = LABELS[step.metric], len(step.differences) + 1
    if count == 2:
        ((other, difference),) = step.differences.items()
        return _sentence(label, step.best, other, difference, lead="Of these, " * (len(ranking.compared) > 2))
    left = [arm for arm in step.differences if arm not in step.ties]
    if not left:
        who = f"The {count} arms" if count > MOST + 1 else named(step.ties)
        return f"{who} {'also' if before else 'all'} tie in {label}: {_alike(step)}."
    of, lead = (f" of {count} arms", "") if before is None else ("", "Of these, ")
    next_ = min(left, key=lambda arm: step.differences[arm].mean)
    pair = step.differences[next_]
    if len(step.ties) > 1:
        rest = f"the next, {next_}, is {pair.relative:.1%} above {step.best}"
        return f"{lead}{named(step.ties)} tie for the lowest {label}{of}: {_alike(step)}; {rest}."
    later = " once the arms that are clearly worse are left out" * pair.is_noise
    return (
        f"{lead}{step.best} has the lowest {label}{of}, by {_amount(pair)} against the next, {next_} (95% interval "
        f"{_interval(pair)}, paired by request, for all {count} arms together), which is more than noise{later}."
    )


def _alike(step: RankingStep) -> str:
    """Say how far apart the arms are that tie."""
    apart = [step.differences[arm] for arm in step.ties[1:]]
    if all(pair.is_exact for pair in apart):
        return "every request took the same time in each"
    why = "too little to matter" if all(pair.verdict == "equal" for pair in apart) else "no more than noise"
    return f"they differ by at most {_apart(max(apart, key=lambda pair: pair.mean), step.best)}, {why}"


def _of_limits(summary: Summary, step: RankingStep) -> str:
    """Say which arms keep the most requests within the limits on each request."""
    within = " and ".join(limit for limit in summary.limits if parse_slo(limit).statistic is None)
    share = {arm: _within(summary, arm) for arm in (step.best, *step.differences)}
    rest = {arm: part for arm, part in share.items() if arm not in step.ties}
    shown = list(dict.fromkeys(f"{share[arm]:.1%}" for arm in step.ties))
    fewer = f"; fewer: {_shares(rest)}" if rest else ""
    if len(shown) == 1 and len(step.ties) > 1:
        what = "tie for the most requests" if rest else "keep equally many requests"
        return f"{named(step.ties)} {what} within {within}: {shown[0]}{fewer}."
    alike = {arm: share[arm] for arm in step.ties[1:]}
    if alike:
        return f"{step.best} ({shown[0]}) ties with {_shares(alike)} for the most requests within {within}{fewer}."
    most = "the most" if len(share) > 2 else "more"
    return f"{step.best} keeps {most} requests within {within}: {shown[0]}{fewer}."


def _shares(share: Mapping[str, float]) -> str:
    return named([f"{arm} ({part:.1%})" for arm, part in share.items()])


def _within(summary: Summary, arm: str) -> float:
    goodput = summary.arms[arm].goodput
    return (goodput.attainment or 0.0) if goodput else 0.0


def _cost(ranking: Ranking) -> list[str]:
    """Say how the best arms compare with all others in TPOT, unless a step has said it."""
    step = ranking.tpot
    if step is None or any(
        one.metric == "tpot" and one.differences.keys() == step.differences.keys() for one in ranking.steps
    ):
        return []
    if ranking.steps[0].metric == OUT_OF_LIMITS and len(ranking.steps) == 1:
        return []
    count, label = len(step.differences) + 1, LABELS["tpot"]
    if count == 2:
        ((other, difference),) = step.differences.items()
        return [_sentence(label, step.best, other, difference)]
    kept = [arm for arm in ranking.ties if arm in step.ties]
    if not kept:
        arm = min(ranking.ties, key=lambda arm: step.differences[arm].mean)
        return [
            f"{step.best} has the lowest {label} of {count} arms: {arm} takes {_above(step.differences[arm])} more."
        ]
    if step.ties == kept:
        return [f"{named(kept)} also {'has' if len(kept) == 1 else 'have'} the lowest {label} of {count} arms."]
    return [f"{named(kept)} also {'ties' if len(kept) == 1 else 'tie'} for the lowest {label} of {count} arms."]


def _between_engines(summary: Summary, errors: Mapping[str, EngineError]) -> str:
    """Say in which means engines are too near each other for the errors of their times, among the compared arms."""
    compared = summary.ranking.compared if summary.ranking else []
    means = {arm: {"ttft": summary.arms[arm].ttft_sched.mean, "tpot": summary.arms[arm].tpot.mean} for arm in compared}
    return between_engines(errors, means)


def _above(pair: Difference) -> str:
    return f"{_milliseconds(pair.mean)} ms ({pair.relative:.1%})"


def _elsewhere(summary: Summary) -> list[str]:
    """If the best mode exists only in dynabench, name the best mode of each other router, with its distance."""
    ranking = summary.ranking or None
    if ranking is None or not ranking.elsewhere or ranking.elsewhere.keys() & set(ranking.ties):
        return []
    others = {arm: where + _cost_of(ranking, arm) for arm, where in ranking.elsewhere.items()}
    return [only_here(ranking.ties, others)]


def _cost_of(ranking: Ranking, arm: str) -> str:
    """Say by how much an arm is behind in the metric that left it out."""
    step = next((step for step in ranking.steps if arm in step.differences and arm not in step.ties), None)
    if step is None:
        return ""
    pair = step.differences[arm]
    if step.metric == OUT_OF_LIMITS:
        return f", with {pair.mean:.1%} more of the requests outside the limits than {step.best}"
    return f", with a {LABELS[step.metric]} {_above(pair)} above that of {step.best}"


def _grown(summary: Summary) -> str:
    """Say where queues grew; an arm that is set aside for it may still have been ahead of the best over these requests."""
    grown = {arm: its.stability for arm, its in summary.arms.items() if not its.stability.is_stable}
    if not grown:
        return ""
    rows = [f"{arm} ({queue.start:.0f} to {queue.end:.0f})" for arm, queue in grown.items()]
    if len(grown) == 1:
        ((arm, queue),) = grown.items()
        text = f"{arm} could not keep up: {queue.start:.0f} requests waited at the start and {queue.end:.0f} at the end. Its"
    else:
        text = f"{len(grown)} arms could not keep up, as more and more requests waited: {named(rows)}. Their"
    text += " averages measure the length of the run, so they are not compared."
    means = {arm: its.ttft_sched.mean for arm, its in summary.arms.items() if its.ttft_sched.mean is not None}
    best = min((mean for arm, mean in means.items() if arm not in grown), default=0.0)
    if ahead := [f"{arm} ({_milliseconds(means[arm])} ms)" for arm in grown if means.get(arm, best) < best]:
        what = f"lower mean TTFT than every arm that is compared: {named(ahead)}"
        text += f" Over these requests, {what}. Use a longer workload or less load before you rule {'it' if len(ahead) == 1 else 'them'} out."
    return text


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


def _sentence(label: str, best: str, other: str, difference: Difference, *, lead: str = "") -> str:
    """Compare two arms."""
    amount = _apart(difference, best)
    if difference.is_exact:
        return f"{best} and {other} have exactly the same {label}: every request took the same time in both."
    if difference.verdict == "equal":
        return f"{best} and {other} have practically the same {label}: they differ by {amount}."
    if difference.verdict == "inconclusive":
        why = "the 95% interval includes zero" if difference.is_noise else "two runs of the same arm differ by as much"
        return (
            f"{best} and {other} do not differ in {label} by more than noise ({amount}; {why}; "
            f"a difference of {difference.detectable:.1%} would have been found)."
        )
    return (
        f"{lead}{best} has the lower {label}, by {_amount(difference)} against {other} "
        f"(95% interval {_interval(difference)}, paired by request), which is more than noise."
    )


def _amount(pair: Difference) -> str:
    """Format how far below the other arm the best one is, in ms and relative to the other."""
    base = pair.base + pair.mean
    return f"{_milliseconds(pair.mean)} ms ({pair.mean / base if base else 0.0:.1%})"


def _apart(pair: Difference, best: str) -> str:
    """Format how far another arm is from the best one, in ms and relative to the best."""
    return f"{_milliseconds(pair.mean)} ms ({pair.relative:.1%} of {best})"


def _interval(pair: Difference) -> str:
    return f"{_milliseconds(pair.low)} to {_milliseconds(pair.high)} ms"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.0f}" if seconds >= 1 else f"{seconds * 1000:.3g}"
