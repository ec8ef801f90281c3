"""Counts of requests since a start: the difference of two counts is the traffic between them."""

from typing import NamedTuple

from serving.planner.observation import RequestTraffic


class Counts(NamedTuple):
    """Sums, and the numbers of values in them."""

    num_arrived: float = 0.0
    prompt_tokens: float = 0.0
    """The prompt tokens of arrived requests."""
    num_ended: float = 0.0
    output_tokens: float = 0.0
    """Of requests that ended, as are the next two fields."""
    ended_prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    num_first_tokens: float = 0.0
    ttft_s: float = 0.0
    num_gaps: float = 0.0
    """Gaps between tokens."""
    gaps_s: float = 0.0
    num_durations: float = 0.0
    """Requests whose time from arrival to end is in the next field."""
    e2e_s: float = 0.0


def traffic_between(before: Counts, after: Counts, duration_s: float) -> RequestTraffic | None:
    """Return the requests between two counts; None if counting started again between them."""
    grown = Counts(*(later - earlier for earlier, later in zip(before, after, strict=True)))
    if min(grown) < 0:
        return None
    return RequestTraffic(
        duration_s=duration_s,
        num_requests=int(grown.num_arrived),
        isl=_mean(grown.prompt_tokens, grown.num_arrived),
        osl=_mean(grown.output_tokens, grown.num_ended),
        hit_share=_mean(grown.cached_tokens, grown.ended_prompt_tokens),
        ttft_s=_mean(grown.ttft_s, grown.num_first_tokens),
        itl_s=_mean(grown.gaps_s, grown.num_gaps),
        e2e_s=_mean(grown.e2e_s, grown.num_durations),
    )


def _mean(total: float, count: float) -> float | None:
    return total / count if count else None
