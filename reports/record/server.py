"""What a measured server says of itself: its queue over time, and its own counts and times of a run's requests."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated

import msgspec
from msgspec import Meta

from reports.record.fleet import Seconds, Text
from reports.record.pools import Amount, GpuUse, Number

MOST_SAMPLES = 2048
"""The most samples of one run; a longer run is sampled less often."""


class Bracket(msgspec.Struct, frozen=True):
    """A quantile of a histogram (s), and the bounds of the bucket that it is in."""

    value: Amount | None
    """As if the samples of a bucket were evenly spread, as `histogram_quantile` of Prometheus does; None above all bounds."""
    low: Amount
    high: Amount | None
    """None: there is no bound."""


class ServerTimes(msgspec.Struct, frozen=True):
    """A histogram of the server's: what it added up during the run."""

    count: Amount
    total_s: Amount
    bounds_s: tuple[Amount, ...] = ()
    """The upper bound of each bucket but the last, which has none; nothing if the server publishes a sum and a count only."""
    counts: tuple[Amount, ...] = ()
    """Samples in each bucket, one more than there are bounds."""

    @property
    def mean_s(self) -> float | None:
        """The mean, which is exact (s)."""
        return self.total_s / self.count if self.count else None

    def quantile(self, share: float) -> Bracket | None:
        """Return a quantile, None without samples or buckets."""
        sums = list(accumulate(self.counts))
        if not sums or not sums[-1]:
            return None
        rank = share * sums[-1]
        place = next(place for place, total in enumerate(sums) if total >= rank and self.counts[place])
        low = self.bounds_s[place - 1] if place else 0.0
        if place == len(self.bounds_s):
            return Bracket(None, low, None)
        high = self.bounds_s[place]
        within = (rank - (sums[place] - self.counts[place])) / self.counts[place]
        return Bracket(low + (high - low) * within, low, high)


class ServerSample(msgspec.Struct, frozen=True, array_like=True):
    """The state of the server at one time; None where it does not say."""

    time_s: Annotated[float, Meta(ge=-1e12, le=1e12)]
    """From the start of the run."""
    running: Amount | None = None
    """Requests in the batch, all engines together."""
    waiting: Amount | None = None
    """Requests that wait for a place in it, all engines together."""
    kv: Amount | None = None
    """The share of the KV cache that is in use, the mean of the engines."""


class ClientSide(msgspec.Struct, frozen=True):
    """What our client saw of the same stretch of time; means (s) of the requests that were answered."""

    answered: Number
    failed: Number
    ttft_s: Amount | None = None
    """From sent, like `e2e_s`."""
    tpot_s: Amount | None = None
    e2e_s: Amount | None = None


class ServerUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a server, and exporters beside it, said during a run."""

    software: Annotated[tuple[Text, ...], Meta(max_length=64)] = ()
    """Whose names of metrics it uses; nothing if it publishes none that are known."""
    problems: Annotated[tuple[Text, ...], Meta(max_length=64)] = ()
    """Why something is not known, a sentence each."""
    length_s: Seconds = 0.0
    """The time between the first and the last look at its counts."""
    samples: Annotated[tuple[ServerSample, ...], Meta(max_length=MOST_SAMPLES)] = ()
    client: ClientSide | None = None
    requests: Amount | None = None
    """That ended during the run, anyone's; like all that follows."""
    preemptions: Amount | None = None
    prompt_tokens: Amount | None = None
    output_tokens: Amount | None = None
    looked_up_tokens: Amount | None = None
    """Prompt tokens (or blocks, if it counts those) that were looked up in the prefix cache."""
    hit_tokens: Amount | None = None
    times: dict[Text, ServerTimes] = {}
    """By name: `ttft`, `tpot`, `itl`, `queue`, `prefill`, `e2e`."""
    gpus: Annotated[tuple[GpuUse, ...], Meta(max_length=4096)] = ()

    def at(self, name: str) -> list[tuple[float, float]]:
        """Return when (s) a state was seen, and its value; samples that do not say it are left out."""
        seen = [(sample.time_s, getattr(sample, name)) for sample in self.samples]
        return [(time_s, value) for time_s, value in seen if value is not None]


def added(times: Sequence[ServerTimes]) -> ServerTimes:
    """Add up histograms of several engines or runs; of buckets, only bounds that all have are kept."""
    bounds = sorted(set.intersection(*({*one.bounds_s} for one in times)))
    counts = [0.0] * (len(bounds) + 1) if all(one.counts for one in times) else []
    for one in times if counts else ():
        for place, count in enumerate(one.counts):
            above = place == len(one.bounds_s)
            counts[len(bounds) if above else bisect_left(bounds, one.bounds_s[place])] += count
    return ServerTimes(
        sum(one.count for one in times),
        sum(one.total_s for one in times),
        tuple(bounds) if counts else (),
        tuple(counts),
    )
