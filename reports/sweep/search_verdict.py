"""What a search found, in a few sentences."""

from collections.abc import Sequence
from typing import NamedTuple

from reports.figures.outcomes import outcomes_in_words
from reports.figures.tier_sizes import Sized, enough
from reports.sweep.points import Impossible, Point, SearchResult
from reports.sweep.verdict import capacity, too_little, which_are_impossible
from reports.verdicts.naming import parted


class _Question(NamedTuple):
    """What was searched for."""

    name: str
    sense: str
    counts_gpus: bool

    @property
    def what(self) -> str:
        """What the best combination has."""
        return "fewest GPUs" if self.counts_gpus else self.sense

    def rank(self, row: SearchResult) -> float:
        """Return the figure by which combinations are compared."""
        return row.point.gpus if self.counts_gpus and row.point is not None else row.met or 0.0

    def how_far(self, row: SearchResult, name: str = "") -> str:
        """Say how far a combination meets the limits."""
        value = f"{name} {value_shown(row)}".strip()
        return f"from {value} on" if self.sense == "lowest" else f"up to {value}"

    def gpus(self, row: SearchResult) -> str:
        """Say how many GPUs the workers that were found have, if these are counted."""
        if not self.counts_gpus or row.point is None:
            return ""
        return f" ({row.point.gpus} GPU{'s' * (row.point.gpus != 1)})"


def search_verdict(rows: list[SearchResult], name: str, sense: str) -> str:
    """Say which combination meets the limits furthest, and what stops it there."""
    question = _Question(name, sense, is_by_gpus(rows))
    known = sorted((row for row in rows if row.met is not None), key=question.rank)
    text = _met(question, rows, known) if known else _none_met(rows, name)
    reached = [row.point or row.missed for row in rows]
    return text + too_little([point for point in reached if isinstance(point, Point)])


def _none_met(rows: list[SearchResult], name: str) -> str:
    """Say that nothing meets the limits, and what is missed at the nearest value."""
    nearest = [f"{row.arm} at {name} {digits(row.missed_at)}: {_why(row)}" for row in rows if row.missed_at]
    if not all(row.is_over for row in rows):
        return "Nothing that was tried meets the limits." * bool(nearest)
    states = {row.missed.state for row in rows if row.missed}
    lead = "Nothing meets the limits" if states != {"unknown"} else "It is not known whether the limits are met"
    return f"{lead}. {parted(nearest)}." if nearest else f"{lead}."


def _met(question: _Question, rows: list[SearchResult], known: list[SearchResult]) -> str:
    """Say which combination is best, what stops it, how the last compares, and which are impossible."""
    best, last = (known[0], known[-1]) if question.sense == "lowest" else (known[-1], known[0])
    text = _best(question, rows, [row for row in known if question.rank(row) == question.rank(best)], best)
    text += _intervals(best)
    if best.missed is not None:
        text += f" At {digits(best.missed_at or 0.0)}: {_why(best)}."
    text += _last(question, best, last) + _enough(question, known)
    return text + which_are_impossible(
        [row.missed for row in rows if row.met is None and isinstance(row.missed, Impossible)]
    )


def _best(question: _Question, rows: list[SearchResult], equal: list[SearchResult], best: SearchResult) -> str:
    """Name the best combinations; equal ones need as many GPUs as the best."""
    alike = [row.arm for row in equal if row.met == best.met]
    who = f"All {len(rows)} meet" if len(alike) == len(rows) > 1 else f"{' and '.join(alike)} meet"
    text = f"{who}{'s' * (len(alike) == 1)} the limits {question.how_far(best, question.name)}{question.gpus(best)}"
    is_sure = len(alike) < len(rows) and all(row.is_over for row in rows)
    text += f", the {question.what} of {len(rows)}." if is_sure else "."
    return text + "".join(
        f" {row.arm} needs as many, from {value_shown(row)} on." for row in equal if row.met != best.met
    )


def _intervals(best: SearchResult) -> str:
    """Say what brackets mean, if there are any."""
    if not best.interval:
        return ""
    low, high = best.interval
    return (
        " All repeats give the same value." if low == high else " The brackets show the 95% interval over the repeats."
    )


def _last(question: _Question, best: SearchResult, last: SearchResult) -> str:
    """Say how far the last combination meets the limits."""
    if question.rank(last) == question.rank(best) or not best.met or not last.met:
        return ""
    between = f" ({best.met / last.met - 1:+.0%} between the two)" * (question.sense != "lowest")
    return f" {last.arm} meets them {question.how_far(last)}{question.gpus(last)}{between}."


def _enough(question: _Question, known: list[SearchResult]) -> str:
    """Name the smallest tiers that are about as good as the best."""
    sized = [
        Sized(row.changes, capacity(row.point), question.rank(row), value_shown(row))
        for row in known
        if row.point and row.met
    ]
    what = question.what if question.counts_gpus else f"{question.sense} {question.name}"
    near = enough(sized, what, is_lower_better=question.sense == "lowest")
    return f" {near}" if near else ""


def is_by_gpus(rows: Sequence[SearchResult]) -> bool:
    """Return whether the fewest workers were searched for and those of some lines have more GPUs than others'."""
    known = [(row.point.gpus, row.met) for row in rows if row.point is not None and row.met]
    is_of_workers = any(row.sense == "lowest" and row.find.endswith(("workers", "replicas")) for row in rows)
    return is_of_workers and any(gpus * known[0][1] != known[0][0] * met for gpus, met in known)


def _why(row: SearchResult) -> str:
    """Say which limits are missed at the nearest value that misses any."""
    assert row.missed is not None
    return outcomes_in_words(outcome for outcome in row.missed.outcomes if outcome.state != "met")


def value_shown(row: SearchResult) -> str:
    """Format what a search found, or how far it got."""
    if row.met is None:
        return "none" if row.is_over else "not known"
    if not row.is_at_end or (row.sense == "lowest" and row.met == 1):
        low, high = row.interval or (row.met, row.met)
        return digits(row.met) if low == high else f"{digits(row.met)} [{digits(low)}, {digits(high)}]"
    if row.sense is None:
        return "any"
    return f"at {'least' if row.sense == 'highest' else 'most'} {digits(row.met)}"


def digits(value: float) -> str:
    """Format a value that was tried; it has no more digits than the search's precision."""
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"
