"""From samples of metrics to what a server says of itself: states, counts, times, GPUs; whatever its software calls them."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

from dynabench.live.scrape import Labels, ScrapeError, Series
from dynabench.live.server_names import GPU_EXPORTERS, SERVERS, START, Count, GpuExporter, Software, State
from reports.record.pools import GpuUse
from reports.record.server import ServerSample, ServerTimes, added

Rows = Mapping[Series, float]
_PARTS = ("_bucket", "_sum", "_count")
_GROWING = ("_total", *_PARTS)
"""How the names of what only grows end, but for TGI's."""


def gauges(software: Iterable[Software], gpus: Iterable[GpuExporter]) -> set[str]:
    """Return the names of what changes during a run and of when a process started."""
    found = {START}
    for one in software:
        found |= {name for names in one.states.values() for name in names}
        if one.kv is not None:
            found |= {one.kv.part, *one.kv.whole}
    return found | {name for exporter in gpus for name in exporter.names}


def growing(software: Iterable[Software]) -> set[str]:
    """Return the names of what only grows."""
    found: set[str] = set()
    for one in software:
        found |= {name for names in one.counts.values() for name in names}
        found |= {name for ratio in one.hits for name in (ratio.part, *ratio.whole)}
        found |= {name for pair in one.means.values() for name in pair}
        found |= {f"{name}{part}" for names in one.times.values() for name in names for part in _PARTS}
    return found


def known_names() -> set[str]:
    """Return the names by which software and exporters are recognised: of histograms, that of the whole."""
    whole = {name.removesuffix("_bucket") for name in growing(SERVERS) if name.endswith("_bucket")}
    return gauges(SERVERS, GPU_EXPORTERS) - {START} | growing(SERVERS) | whole


def software_of(published: set[str]) -> tuple[Software, ...]:
    """Return whose metrics these are."""
    return tuple(one for one in SERVERS if any(name.startswith(one.prefix) for name in published))


def exporters_of(published: set[str]) -> tuple[GpuExporter, ...]:
    """Return which exporters of GPUs publish these."""
    return tuple(one for one in GPU_EXPORTERS if published & one.names.keys())


def growth(first: Rows, last: Rows) -> dict[Series, float] | None:
    """Return what was added between two looks, None if something became less: then they are not of the same process."""
    found = {series: value - first.get(series, 0.0) for series, value in last.items()}
    return None if any(value < 0 for value in found.values()) else found


MOST_KV = 1.05
"""A share of the KV cache above this is none: some servers say percentages."""


def sample_of(time_s: float, rows: Rows, software: Sequence[Software]) -> ServerSample:
    """Return the state that samples tell."""
    running, waiting = (_first(rows, software, name) for name in ("running", "waiting"))
    kv = next((shares for one in software if (shares := _of_state(rows, one, "kv"))), [])
    mean = sum(kv) / len(kv) if kv else next(filter(None, (_ratio(rows, one) for one in software)), None)
    return ServerSample(
        time_s,
        None if running is None else sum(running),
        None if waiting is None else sum(waiting),
        mean if mean is not None and 0 <= mean <= MOST_KV else None,
    )


def counts_of(rows: Rows, software: Sequence[Software], published: set[str]) -> dict[str, float]:
    """Return what was counted, by the names of `ServerUse`'s fields; what nobody counts is left out."""
    found: dict[str, float] = {}
    for one in software:
        for name in get_args(Count):
            known = next((each for each in one.counts.get(name, ()) if _is_published(each, published)), None)
            if known is not None:
                found.setdefault(name, _total(rows, known, one))
        for ratio in one.hits:
            parts = (ratio.part, *ratio.whole)
            if "hit_tokens" not in found and all(_is_published(part, published) for part in parts):
                found["hit_tokens"] = _total(rows, ratio.part, one)
                found["looked_up_tokens"] = sum(_total(rows, whole, one) for whole in ratio.whole)
    return found


def times_of(rows: Rows, software: Sequence[Software]) -> dict[str, ServerTimes]:
    """Return what was added to histograms, all engines together.

    Raises:
        ScrapeError: a bucket has no bound.
    """
    found: dict[str, ServerTimes] = {}
    for one in software:
        for name, bases in one.times.items():
            known = next((parts for base in bases if (parts := _histograms(rows, base, one))), None)
            if known:
                found.setdefault(name, added(known))
        for name, (seconds, number) in one.means.items():
            if any(series[0] == number for series in rows):
                found.setdefault(name, ServerTimes(_total(rows, number, one), _total(rows, seconds, one)))
    return found


def _first(rows: Rows, software: Sequence[Software], name: State) -> list[float] | None:
    return next((values for one in software if (values := _of_state(rows, one, name))), None)


def _of_state(rows: Rows, software: Software, name: State) -> list[float]:
    """Return a gauge's value for each engine, by the first of its names that is published."""
    for known in software.states.get(name, ()):
        whole = {
            series: value
            for series, value in rows.items()
            if series[0] == known and not any(label in software.empty and value for label, value in series[1])
        }
        if found := _engines(whole, known, software):
            return found
    return []


def _ratio(rows: Rows, software: Software) -> float | None:
    if software.kv is None:
        return None
    whole = sum(_total(rows, name, software) for name in software.kv.whole)
    return _total(rows, software.kv.part, software) / whole if whole else None


def _total(rows: Rows, name: str, software: Software) -> float:
    return sum(_engines(rows, name, software))


def _engines(rows: Rows, name: str, software: Software) -> list[float]:
    """Return a metric's value for each set of labels; of ranks of one engine, the highest."""
    found: dict[Labels, float] = {}
    for (sampled, labels), value in rows.items():
        if sampled == name:
            engine = _without(labels, software.ranks)
            found[engine] = max(value, found.get(engine, -math.inf))
    return list(found.values())


def _histograms(rows: Rows, base: str, software: Software) -> list[ServerTimes]:
    """Return a histogram for each engine."""
    sums: dict[Labels, float] = {}
    buckets: defaultdict[Labels, dict[float, float]] = defaultdict(dict)
    for (name, labels), value in rows.items():
        if name == f"{base}_sum":
            engine = _without(labels, software.ranks)
            sums[engine] = max(value, sums.get(engine, 0.0))
        elif name == f"{base}_bucket":
            engine, bound = _without(labels, (*software.ranks, "le")), _bound(labels)
            buckets[engine][bound] = max(value, buckets[engine].get(bound, 0.0))
    return [_histogram(sums.get(engine, 0.0), found) for engine, found in buckets.items()]


def _bound(labels: Labels) -> float:
    text = dict(labels).get("le", "")
    try:
        return float(text)
    except ValueError as error:
        raise ScrapeError(f"a bucket with le={text!r}, expected a number") from error


def _histogram(total_s: float, cumulative: Mapping[float, float]) -> ServerTimes:
    """Return a histogram whose buckets were counted as Prometheus counts them: each with all below."""
    bounds = sorted(cumulative)
    before, counts = 0.0, []
    for bound in bounds:
        counts.append(max(cumulative[bound] - before, 0.0))
        before = max(cumulative[bound], before)
    finite = tuple(bound for bound in bounds if bound < math.inf)
    counts += [0.0] * (len(finite) + 1 - len(counts))
    return ServerTimes(before, max(total_s, 0.0), finite, tuple(counts))


def _is_published(name: str, published: set[str]) -> bool:
    return name in published or any(name.endswith(part) and name.removesuffix(part) in published for part in _PARTS)


def _without(labels: Labels, names: tuple[str, ...]) -> Labels:
    return tuple(label for label in labels if label[0] not in names) if names else labels


class GpuSums:
    """What exporters have said of each GPU so far."""

    def __init__(self) -> None:
        self._seen: defaultdict[tuple[str, str], list[float]] = defaultdict(list)

    def note(self, exporter: GpuExporter, rows: Rows) -> None:
        """Take note of what an exporter says now; several lines of one GPU (of its MIG parts) count once, the highest."""
        now: dict[tuple[str, str], float] = {}
        for (name, labels), value in rows.items():
            if name in exporter.names:
                key = _gpu(dict(labels), exporter), name
                now[key] = max(value * exporter.names[name], now.get(key, 0.0))
        for key, value in now.items():
            self._seen[key].append(value)

    def uses(self) -> tuple[GpuUse, ...]:
        """Return the means, and the most memory."""
        names = dict.fromkeys(gpu for gpu, _ in self._seen)
        return tuple(
            self._use(gpu, exporter) for gpu in names for exporter in GPU_EXPORTERS if self._is_of(gpu, exporter)
        )

    def _is_of(self, gpu: str, exporter: GpuExporter) -> bool:
        return any((gpu, name) in self._seen for name in exporter.names)

    def _use(self, gpu: str, exporter: GpuExporter) -> GpuUse:
        def mean(name: str) -> float | None:
            seen = self._seen.get((gpu, name))
            return sum(seen) / len(seen) if seen else None

        whole = [mean(name) for name, _ in exporter.whole]
        return GpuUse(
            gpu,
            mean(exporter.power[0]),
            mean(exporter.busy[0]),
            max(self._seen.get((gpu, exporter.used[0]), ()), default=None),
            None if None in whole else sum(filter(None, whole)),
        )


def _gpu(labels: Mapping[str, str], exporter: GpuExporter) -> str:
    return " ".join(filter(None, (labels.get(name, "") for name in exporter.labels))) or "GPU"
