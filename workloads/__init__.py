"""Where requests come from: traces, synthesizers, arrival processes. Independent of engines and routers."""

from workloads.request import Request, Workload, WorkloadError

__all__ = ["Request", "Workload", "WorkloadError"]
