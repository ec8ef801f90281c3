"""Where requests come from: traces, synthesizers, arrival processes. Knows nothing of engines or routers."""

from workloads.request import Request, Workload, WorkloadError

__all__ = ["Request", "Workload", "WorkloadError"]
