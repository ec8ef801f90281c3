"""Metrics of the servers that a frontend needs: etcd, NATS, or the API server of Kubernetes."""

from collections.abc import Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from serving.frontend.metrics import PREFIX
from serving.runtime.outages import Outages

ServerCounts = dict[str, list[int]]
"""By the servers' names: whether a process sees it up (1 or 0), the outages that it saw, and the calls that it gave up."""


def server_counts(outages: Sequence[Outages]) -> ServerCounts:
    """Return how this process sees its servers."""
    return {each.name: [int(not each.is_away), each.num_outages, each.num_given_up] for each in outages}


def server_metrics(processes: Sequence[ServerCounts]) -> list[Metric]:
    """Return how the processes on our port see the servers that they need; the first of them is this one."""
    up = GaugeMetricFamily(f"{PREFIX}server_up", "Whether the server answers every process here", labels=["server"])
    outages = CounterMetricFamily(f"{PREFIX}server_outages", "Times that the server went away", labels=["server"])
    given_up = CounterMetricFamily(
        f"{PREFIX}server_calls_given_up", "Calls of workers given up because the server was away", labels=["server"]
    )
    for name in processes[0]:
        is_up, num_outages, num_given_up = zip(
            *(process[name] for process in processes if name in process), strict=True
        )
        up.add_metric([name], min(is_up))
        outages.add_metric([name], sum(num_outages))
        given_up.add_metric([name], sum(num_given_up))
    return [up, outages, given_up]
