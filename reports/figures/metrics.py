"""What a run measured: TTFT, ITL, TPOT, E2E, throughput, goodput, cache hits, each with its formula."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, UnsetType

from reports.record.records import Floats, Ints, MaybeInts, Record, Requests

FORMULAS = {
    "ttft_sched": "first token - intended arrival (the headline of an open-loop run)",
    "ttft": "first token - sent",
    "tpot": "(last token - first token) / (output tokens - tokens of the first chunk), per request",
    "itl": "time between tokens, pooled over all requests; a gap before a chunk of k tokens counts as k gaps of gap / k",
    "e2e_sched": "last token - intended arrival",
    "e2e": "last token - sent",
    "lag": "sent - intended arrival: how late the client itself was, including its wait for a free slot",
    "throughput": "successful requests (their output tokens) / time from the first intended arrival to the last token",
    "goodput": "requests within every limit / the same time as of throughput; failed requests do not count",
    "attainment": "requests within every limit / requests attempted",
    "hit_share": "prompt tokens found in the serving worker's cache / all prompt tokens",
    "imbalance": "work (uncached prompt and output tokens) of the busiest worker / mean over workers",
}
"""Every metric's definition; percentiles are linear, failures count as infinite in the error-adjusted ones."""
TTST_FORMULA = "second token - sent; shown if some workers only prefill, because the handover may come before it"
LABELS = {
    "ttft_sched": "TTFT",
    "ttft": "TTFT from sent",
    "ttst": "TTST",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2e_sched": "E2E",
    "e2e": "E2E from sent",
    "lag": "schedule lag",
    "throughput": "throughput",
    "goodput": "goodput",
    "attainment": "attainment",
    "hit_share": "cache hit share",
    "imbalance": "imbalance",
}
SPANS = {
    "ttft_sched": ("intended_s", "first_token_s"),
    "ttft": ("sent_s", "first_token_s"),
    "ttst": ("sent_s", "second_token_s"),
    "tpot": ("first_token_s", "last_token_s"),
    "e2e_sched": ("intended_s", "last_token_s"),
    "e2e": ("sent_s", "last_token_s"),
}
"""From when to when each metric of a request is."""
PERCENTILES = (50, 90, 95, 99)
LEAST_SAMPLES = {50: 1, 90: 36, 95: 72, 99: 368}
"""The number of samples below which a percentile has no two-sided 95% confidence interval."""


@dataclass(frozen=True)
class TokenGaps:
    """The distribution of times between tokens, kept as rows (first, slope, curve, steps, tokens): see `Record`.

    Each row's gaps are monotone in the step, so counts below a value have a closed form and nothing is expanded.
    """

    rows: Floats

    @property
    def count(self) -> int:
        """Number of gaps."""
        return round(float((self.rows[:, 3] * self.rows[:, 4]).sum()))

    def mean(self) -> float:
        """Return the mean gap (s)."""
        first, slope, curve, steps, tokens = self.rows.T
        last = steps - 1
        total = steps * (first + last * (slope / 2 + curve * (2 * steps - 1) / 6))
        return float((total * tokens).sum() / self.count)

    def max(self) -> float:
        """Return the longest gap (s)."""
        return float(np.maximum(self.rows[:, 0], self._last()).max())

    def quantiles(self, shares: npt.ArrayLike) -> Floats:
        """Return the gap at each share (0..1) of the gaps, by bisection to a ten-millionth of the range."""
        shares = np.asarray(shares, float)
        order = np.argsort(self.rows[:, 0])
        flat = self.rows[:, 1:3].any(axis=1)
        if not flat.any():
            values, weights = self.rows[order, 0], (self.rows[:, 3] * self.rows[:, 4])[order]
            place = np.searchsorted(np.cumsum(weights), shares * (weights.sum() - 1), side="right")
            picked: Floats = values[np.minimum(place, len(values) - 1)]
            return picked
        edges = np.minimum(self.rows[:, 0], self._last())
        low, high = np.full(shares.shape, edges.min()), np.full(shares.shape, self.max())
        wanted = shares * (self.count - 1)
        for _ in range(24):
            middle = (low + high) / 2
            enough = self.counts_below(middle) > wanted
            high, low = np.where(enough, middle, high), np.where(enough, low, middle)
        return high

    def counts_below(self, values: Floats) -> Floats:
        """Count the gaps up to each value."""
        lowest, highest, tops, totals = self._edges
        counts = totals[np.searchsorted(tops, values, side="right")]
        for place, value in enumerate(values):
            across = self.rows[(lowest <= value) & (highest > value)]  # the others are entirely on one side
            if len(across):
                counts[place] += float((steps_up_to(across, value) * across[:, 4]).sum())
        return counts

    @functools.cached_property
    def _edges(self) -> tuple[Floats, Floats, Floats, Floats]:
        """The lowest and highest gap of each row; the highest gaps in order, and the number of gaps in the rows up to each."""
        last = self._last()
        lowest, highest = np.minimum(self.rows[:, 0], last), np.maximum(self.rows[:, 0], last)
        order = np.argsort(highest)
        totals = np.concatenate([[0.0], np.cumsum((self.rows[:, 3] * self.rows[:, 4])[order])])
        return lowest, highest, highest[order], totals

    def _last(self) -> Floats:
        last = self.rows[:, 3] - 1
        result: Floats = self.rows[:, 0] + last * (self.rows[:, 1] + last * self.rows[:, 2])
        return result


def spread(rows: Floats, noise: Sequence[float]) -> Floats:
    """Return the gaps that result if each is scaled by one of several equally likely factors."""
    if not noise:
        return rows
    factors, count = np.asarray(noise, float), len(noise)
    wide = np.repeat(rows, count, axis=0)
    wide[:, :3] *= np.tile(factors, len(rows))[:, None]
    wide[:, 4] /= count
    return wide


def steps_up_to(rows: Floats, values: Floats | float) -> Floats:
    """Count the steps of each row whose gaps are at most a value: those before the first step that exceeds it."""
    first, slope, curve, steps, _ = rows.T
    excess = values - first
    # First step j at which first + slope*j + curve*j*j exceeds the value; slope >= 0, |curve| small.
    root = np.sqrt(np.maximum(slope * slope + 4 * curve * excess, 0.0))
    with np.errstate(divide="ignore", invalid="ignore"):
        crossing = np.where(slope > 0, 2 * excess / (slope + root), np.inf)
        vertex = np.where(slope * slope + 4 * curve * excess < 0, np.inf, crossing)
    below: Floats = np.where(excess >= 0, np.clip(np.floor(vertex) + 1, 0, steps), 0)
    return below


def per_request(requests: Requests) -> dict[str, Floats]:
    """Return TTFT, TTST, TPOT and E2E of every request (s), NaN where a request failed or has no such time."""
    return {name: of_each(requests, name) for name in SPANS}


def of_each(requests: Requests, name: str) -> Floats:
    """Return one of these metrics."""
    start, end = (np.ma.filled(getattr(requests, column), np.nan) for column in SPANS[name])
    values = end - start
    if name == "tpot":
        decoded = requests.osl - requests.first_chunk_tokens
        values /= np.where(decoded > 0, decoded, np.nan)
    values[~requests.succeeded] = np.nan
    return values


def schedule_lag(requests: Requests) -> Floats:
    """Return how late the client sent each request (s), NaN where it was not sent."""
    lag: Floats = requests.sent_s.filled(np.nan) - requests.intended_s
    return lag


class Intervals(msgspec.Struct, frozen=True):
    """95% intervals of one arm's figures (s), None if the sample is too small."""

    mean: tuple[float, float] | None
    p50: tuple[float, float] | None
    p90: tuple[float, float] | None
    p99: tuple[float, float] | None


class Statistics(msgspec.Struct, frozen=True):
    """Mean and percentiles of a metric (s); None if the sample is too small for one."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None
    adjusted_p50: float | UnsetType | None = UNSET
    """Percentiles that count each failure as infinite, None if they become infinite; only with failures."""
    adjusted_p90: float | UnsetType | None = UNSET
    adjusted_p95: float | UnsetType | None = UNSET
    adjusted_p99: float | UnsetType | None = UNSET
    intervals: Intervals | UnsetType = UNSET
    """None if the arm's queue grew."""

    def at(self, statistic: str) -> float | None:
        """Return the mean, a percentile or the maximum, by its name."""
        value: float | None = getattr(self, statistic)
        return value

    def with_failures(self, statistic: str) -> float | None:
        """Return the same with each failure counted as infinite, None if that makes it infinite."""
        if statistic in ("mean", "max"):
            return self.at(statistic) if self.adjusted_p50 is UNSET else None
        value: float | UnsetType | None = getattr(self, f"adjusted_{statistic}", UNSET)
        return self.at(statistic) if isinstance(value, UnsetType) else value


class Throughput(msgspec.Struct, frozen=True):
    """Requests and output tokens per second: over the whole run, and over the window of intended arrivals."""

    requests_per_s: float | None = None
    output_tokens_per_s: float | None = None
    window_requests_per_s: float | None = None
    window_output_tokens_per_s: float | None = None


class Cache(msgspec.Struct, frozen=True):
    """Shares of prompt tokens, None if the engine, or the router, reported nothing."""

    hit_share: float | None
    mean_request_hit_share: float | None
    """Mean of the requests' own shares."""
    predicted_share: float | None


class Goodput(msgspec.Struct, frozen=True):
    """The requests within every limit."""

    good: float
    attempted: float
    attainment: float | None
    goodput_per_s: float | None
    """Good requests per second of the whole run, as throughput."""


def describe(values: Floats, *, num_failed: int = 0) -> Statistics:
    """Return the statistics of the values other than NaN; percentiles are linear, and failures count as infinite."""
    values = values[~np.isnan(values)]
    if not len(values):
        return Statistics(0)
    wanted = [p for p in PERCENTILES if len(values) >= LEAST_SAMPLES[p]]
    found: dict[str, Any] = {
        f"p{p}": float(value) for p, value in zip(wanted, np.percentile(values, wanted), strict=True)
    }
    adjusted: dict[str, Any] = {}
    if num_failed:
        with_failures = np.sort(np.append(values, np.full(num_failed, np.inf)))
        for p in PERCENTILES:
            value = float(with_failures[int(np.ceil((len(with_failures) - 1) * p / 100))])
            adjusted[f"adjusted_p{p}"] = value if np.isfinite(value) else None
    return Statistics(len(values), mean=float(values.mean()), max=float(values.max()), **found, **adjusted)


def describe_gaps(gaps: TokenGaps) -> Statistics:
    """Return the statistics of the times between tokens."""
    if not len(gaps.rows) or not gaps.count:
        return Statistics(0)
    quantiles = zip(PERCENTILES, gaps.quantiles([p / 100 for p in PERCENTILES]), strict=True)
    found: dict[str, Any] = {f"p{p}": float(value) for p, value in quantiles if gaps.count >= LEAST_SAMPLES[p]}
    return Statistics(gaps.count, mean=gaps.mean(), max=gaps.max(), **found)


def throughput(run: Record) -> Throughput:
    """Return requests and output tokens per second, of the requests that count over all of their time, and over their window.

    The window is the time in which requests that count arrive. An answer counts in it by the share of its tokens that came
    within it, evenly from its first to its last, whenever it began: where streams run in step, a window ends before or
    after a whole wave of answers, and their number is off by a wave.
    """
    requests = run.measured.requests
    good = requests.succeeded
    if not good.any():
        return Throughput()
    whole, has_tokens = _whole_s(requests), bool(requests.osl[good].any())  # embeddings have none
    start, stop = requests.intended_s.min(), requests.intended_s.max()
    window, shares = float(stop - start), _shares_within(run.requests, start, stop)
    return Throughput(
        requests_per_s=float(good.sum() / whole) if whole > 0 else None,
        output_tokens_per_s=float(requests.osl[good].sum() / whole) if whole > 0 and has_tokens else None,
        window_requests_per_s=float(shares.sum() / window) if window > 0 else None,
        window_output_tokens_per_s=float((run.requests.osl * shares).sum() / window)
        if window > 0 and has_tokens
        else None,
    )


def _shares_within(requests: Requests, start: float, stop: float) -> Floats:
    """Return the share of each answer that came within a time; 0 for requests that failed."""
    last = requests.last_token_s.filled(np.nan)
    first = np.fmin(requests.first_token_s.filled(np.nan), last)
    within = np.minimum(last, stop) - np.maximum(first, start)
    at_once = (last >= start) & (last <= stop)
    shares = np.where(last > first, np.clip(within / np.where(last > first, last - first, 1.0), 0.0, 1.0), at_once)
    found: Floats = np.where(requests.succeeded, np.nan_to_num(shares), 0.0)
    return found


def _whole_s(requests: Requests) -> float:
    """Return the time from the first intended arrival to the last token, or to the last arrival if none succeeded."""
    good = requests.succeeded
    end = requests.last_token_s[good].max() if good.any() else requests.intended_s.max()
    return float(end - requests.intended_s.min())


def cache(run: Record) -> Cache:
    """Return the share of prompt tokens found in the cache: of all tokens, and as the mean of the requests' shares."""
    requests = run.requests[run.requests.succeeded]
    cached, isl = requests.cached_tokens, requests.isl
    shares = np.ma.MaskedArray(
        cached / np.maximum(isl, 1), cached.mask | (isl == 0)
    )  # a server may report zero prompt tokens
    return Cache(
        hit_share=share(cached, isl),
        mean_request_hit_share=(float(shares.mean()) if shares.count() else None) if len(isl) else 0.0,
        predicted_share=share(requests.predicted_tokens, isl),
    )


def share(tokens: MaybeInts, isl: Ints) -> float | None:
    """Return the share of prompt tokens that some tokens are, 0 without prompts; None if no request's are known."""
    if not len(isl):
        return 0.0
    total = isl[~tokens.mask].sum()
    return float(tokens.sum() / total) if total else None


def preemptions(run: Record) -> int | None:
    """Return how often the engines preempted a request; None if they did not report it."""
    if "preemptions" in run.facts:
        return int(run.facts["preemptions"])
    counts = run.requests.preemptions
    return None if counts.mask.any() else int(counts.data.sum())


def goodput(run: Record, is_good: npt.NDArray[np.bool_]) -> Goodput:
    """Return the good requests per second of the whole run, and their share of all requests attempted."""
    whole = _whole_s(run.requests) if len(is_good) else 0.0
    number = int(is_good.sum())
    return Goodput(
        good=number,
        attempted=len(is_good),
        attainment=number / len(is_good) if len(is_good) else None,
        goodput_per_s=number / whole if whole > 0 else None,
    )
