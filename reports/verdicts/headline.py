"""The text above the tables: what was run, what is wrong with it, and which limits are met."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from foundation.text import listed
from reports.figures.cells import milliseconds, number, share
from reports.figures.outcomes import Outcome, binding, outcomes_in_words, percent
from reports.summary import Summary
from reports.verdicts.naming import named

NUMBER = re.compile(r"\d[\d.,]*")
SAID = 2
"""The most versions of a remark, with other numbers, that are made."""


def heading(manifest: dict[str, Any]) -> list[str]:
    """Say what was run: the workload, the deployment and the step times."""
    said = head(manifest)
    layout = "; ".join(
        f"{name}: {said[name]}" for name in ("Scheduler", "Room for KV", "Layout", "Chunk") if name in said
    )
    return [
        f"{manifest['title']}: {manifest['subtitle']}.",
        *understood(said),
        f"{layout}." * bool(layout),
        step_times(manifest).strip(),
    ]


def whole_heading(manifest: dict[str, Any]) -> list[str]:
    """Say what was run, and what a reader should know before the figures."""
    return [*heading(manifest), *qualified(head(manifest))]


def understood(said: Mapping[str, str]) -> list[str]:
    """Say how long prompts and answers are, and what was understood of a model: its layers' KV, and what is approximated."""
    names = ["Lengths"] + ["Model"] * (": " in said.get("Model", "")) + ["KV groups", "LoRA", "Approximated"]
    return [f"{name}: {said[name]}." for name in names if name in said]


def qualified(said: Mapping[str, str]) -> list[str]:
    """Say what a reader should know before the figures: what is unusual, and how far off they may be."""
    names = (
        "Speculation",
        "Encoder",
        "Context",
        "Not vLLM's defaults",
        "KV tiers",
        "Cut trace",
        "Model error",
        "No effect",
    )
    return [f"{name}: {said[name]}." for name in names if name in said]


def head(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the workload and deployment of all arms; older folders have the step times only."""
    found: dict[str, list[str]] = {}
    for source in (manifest.get("sources") or {"": manifest}).values():
        known = source.get("head") or {"Step times": source.get("step_times")}
        for name, text in known.items():
            found.setdefault(name, []).append(text)
    said = {name: _of_runs(list(dict.fromkeys(filter(None, texts)))) for name, texts in found.items()}
    return {name: text for name, text in said.items() if text}


def _of_runs(texts: Sequence[str]) -> str:
    """List what differs between runs that are compared; sentences are kept apart."""
    return ("; in other runs: " if any(";" in text or ", " in text for text in texts) else " or ").join(texts)


ONLY_HERE = "only in dynabench"


def elsewhere(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return where each of the compared router modes exists, by its name; nothing if arms do not differ by it."""
    changes = manifest.get("arms", {})
    named = manifest.get("elsewhere", {}).items()
    return {changes.get(arm, {}).get("router_mode", arm): where or ONLY_HERE for arm, where in named}


def step_times(manifest: dict[str, Any]) -> str:
    """Say where the step times come from."""
    text = manifest.get("step_times")
    return f" Simulated step times: {text}." if text else ""


def alerts(summary: Summary) -> list[str]:
    """Say what is wrong with the runs: what makes them invalid, and failed requests."""
    found = [f"Not valid: {note}" for note in notes(summary)]
    for arm, figures in summary.arms.items():
        if figures.failed and not any("failed" in note for note in figures.notes):
            error, count = max(figures.errors.items(), key=lambda item: item[1])
            found.append(
                f"{arm}: {figures.failed:,} of {figures.requests:,} requests failed, {count:,} of them with: {error}"
            )
    return found


def notes(summary: Summary) -> list[str]:
    """Return what makes each arm invalid."""
    return [f"{arm}: {note}" for arm, figures in summary.arms.items() for note in figures.notes]


def remarks(summary: Summary) -> list[str]:
    """Return what a reader should know about valid arms; what differs in numbers only is said of the first arm."""
    found: dict[str, dict[str, str]] = {}
    for arm, figures in summary.arms.items():
        for remark in figures.remarks:
            found.setdefault(NUMBER.sub("#", remark), {}).setdefault(arm, remark)
    return [line for remarks in found.values() for line in _of_arms(remarks, len(summary.arms))]


def _of_arms(remarks: dict[str, str], num_arms: int) -> list[str]:
    """Return the lines of remarks of one kind, by arm; arms with the same numbers share one."""
    arms: dict[str, list[str]] = {}
    for arm, remark in remarks.items():
        arms.setdefault(remark, []).append(arm)
    first, its = next(iter(arms.items()))
    if len(its) == num_arms > 1:
        return [f"each arm: {first}"]
    if len(arms) > SAID:
        return [f"{_who(its)}, and {len(remarks) - len(its)} other arms with other numbers: {first}"]
    return [f"{_who(its)}: {remark}" for remark, its in arms.items()]


def _who(arms: Sequence[str]) -> str:
    return f"{'each of ' * (len(arms) > 1)}{named(arms)}"


def answer(summary: Summary) -> str:
    """Say which arms meet the limits, or which comes closest; nothing without limits on a run."""
    nearest = {arm: one for arm, figures in summary.arms.items() if (one := binding(figures.outcomes or ()))}
    if not nearest:
        return ""
    met, unknown = ([arm for arm, one in nearest.items() if one.state == state] for state in ("met", "unknown"))
    missed = [f"{arm} ({one.limit} {margin(one)})" for arm, one in nearest.items() if one.state == "missed"]
    others = f"; {listed(missed)} do{'es' * (len(missed) == 1)} not" * bool(missed)
    if met:
        text = f"{listed(met)} meet{'s' * (len(met) == 1)} every limit{others}"
        return f"{text}{f'; for {listed(unknown)} it is not known' if unknown else ''}."
    if len(nearest) > 1 and unknown:
        who, why = listed(unknown) if missed else "any arm", nearest[unknown[0]]
        meets = "meet" if len(unknown) > 1 and missed else "meets"
        return f"It is not known whether {who} {meets} every limit ({why.limit}: {why.reason}){others}."
    best = max(nearest, key=lambda arm: -math.inf if nearest[arm].margin is None else nearest[arm].margin or 0.0)
    closest = f"No arm meets every limit; {best} comes closest" if len(nearest) > 1 else best
    return f"{closest}: {nearest[best].limit} {margin(nearest[best])}."


def alone(summary: Summary) -> str:
    """Return the main figures of the only arm; nothing if there are several."""
    if len(summary.arms) > 1:
        return ""
    ((arm, its),) = summary.arms.items()
    if its.ttft_sched.mean is None:
        return ""
    return (
        f"{arm}: TTFT {milliseconds(its.ttft_sched.mean)} ms on average, {milliseconds(its.ttft_sched.p99)} ms at p99; TPOT "
        f"{milliseconds(its.tpot.mean)} ms on average; {number(its.throughput.requests_per_s, 2)} requests/s."
    )


def limits(summary: Summary) -> list[str]:
    """Say of each arm which limits it meets, and by how much."""
    each = [str(limit) for limit in summary.conditions if limit.statistic is None]
    lines = []
    for arm, figures in summary.arms.items():
        parts = [outcomes_in_words(figures.outcomes)] if figures.outcomes else []
        if each and figures.goodput:
            parts.append(f"{share(figures.goodput.attainment)} of the requests within {' and '.join(each)}")
        if figures.failed and parts:
            parts.append("a failed request counts as infinite here, but not in the percentiles of the tables")
        lines += [f"{arm}: {'; '.join(parts)}"] * bool(parts)
    return lines


def margin(outcome: Outcome) -> str:
    """Say whether a limit is met, and by how much."""
    return (
        f"{outcome.state}: {outcome.reason}"
        if outcome.margin is None
        else f"{outcome.state} by {percent(abs(outcome.margin))}"
    )
