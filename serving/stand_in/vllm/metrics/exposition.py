"""Metrics as text for Prometheus."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import CollectorRegistry
from prometheus_client.utils import floatToGoString

from serving.frontend.series import Collected, Histogram, Labels
from serving.stand_in.vllm.metrics.families import ENGINE, MODEL, Family

Values = Mapping[str, Mapping[Labels, float]]
"""Values of gauges and counters: by the family's name, and by the labels that the family has of its own."""

Histograms = Mapping[str, Mapping[Labels, Histogram]]


def exposition(families: Iterable[Metric]) -> bytes:
    """Return the metrics of this process and these as text."""
    registry = CollectorRegistry()
    GCCollector(registry)
    PlatformCollector(registry)
    ProcessCollector(registry=registry)
    registry.register(Collected(list(families)))
    return generate_latest(registry)


def metric_of(family: Family, model: str, engines: Mapping[int, tuple[Values, Histograms]], created_s: float) -> Metric:
    """Return a family with the samples of each engine."""
    metric = Metric(family.name, family.text, family.kind)
    names = (MODEL, *([ENGINE] if family.is_per_engine else []), *family.own)
    for own, engine in _places(family, engines):
        values = (model, *([str(engine)] if family.is_per_engine else []), *own)
        labels = dict(zip(names, values, strict=True))
        counted, histograms = engines[engine]
        if family.kind == "histogram":
            histogram = histograms.get(family.name, {}).get(own)
            add_histogram(metric, labels, histogram or Histogram(family.bounds), created_s)
            continue
        value = counted.get(family.name, {}).get(own, 0)
        if family.kind == "gauge":
            metric.add_sample(family.name, labels, value)
        else:
            metric.add_sample(f"{family.name}_total", labels, value)
            metric.add_sample(f"{family.name}_created", labels, created_s)
    return metric


def add_histogram(metric: Metric, labels: dict[str, str], histogram: Histogram, created_s: float) -> None:
    """Add the samples of a histogram."""
    total = 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        total += count
        metric.add_sample(f"{metric.name}_bucket", labels | {"le": _written(bound)}, total)
    metric.add_sample(f"{metric.name}_count", labels, total)
    metric.add_sample(f"{metric.name}_sum", labels, histogram.total)
    metric.add_sample(f"{metric.name}_created", labels, created_s)


def _places(family: Family, engines: Mapping[int, tuple[Values, Histograms]]) -> Iterator[tuple[Labels, int]]:
    """Yield the labels of a family's own and the engine of each of its series."""
    some: Sequence[int] = list(engines) if family.is_per_engine else list(engines)[:1]
    for own in family.start():
        for engine in some:
            yield own, engine
    if family.is_there_at_once:
        return
    for engine in some:
        values, histograms = engines[engine]
        for own in (*values.get(family.name, {}), *histograms.get(family.name, {})):
            yield own, engine


def _written(bound: float) -> str:
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]
