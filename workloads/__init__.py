"""Where requests come from: traces, synthesizers, arrival processes. Independent of engines and routers."""

from workloads.request import Request, WorkloadError
from workloads.workload import Workload

__all__ = ["Request", "Workload", "WorkloadError"]
