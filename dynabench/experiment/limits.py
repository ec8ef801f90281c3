"""How many values of a workload each limit is judged by, which is known before anything is simulated."""

from collections.abc import Sequence

from foundation.errors import UserError
from reports.conditions import Condition
from workloads import Workload
from workloads.pacing import LoadConfig


def num_values(metric: str, workload: Workload, load: LoadConfig) -> int:
    """Return how many values of a metric a run has at most: those of the requests that count."""
    is_open = not load.is_closed and not workload.has_dependencies  # otherwise arrivals depend on answers
    counted = [request for request in workload if not is_open or load.is_measured(request.arrival_s)]
    gaps = [max(request.output_length - 1, 0) for request in counted]
    if metric == "itl":
        return sum(gaps)
    return sum(map(bool, gaps)) if metric in ("tpot", "ttst") else len(counted)


def check_values(limits: Sequence[Condition], workload: Workload, load: LoadConfig) -> None:
    """Refuse limits on a statistic without any value: nothing could meet them.

    Raises:
        UserError: there is such a limit.
    """
    for limit in limits:
        if limit.statistic is not None and not num_values(limit.metric, workload, load):
            is_one = num_values("ttft", workload, load)
            why = "every answer has one token" if is_one else "no request is measured"
            raise UserError(f"slo '{limit}' has no values in {workload.name}: {why}; expected a limit on ttft or e2e")
