"""How many values of a workload each limit is judged by, which is known before anything is simulated."""

from collections.abc import Sequence

import numpy as np

from dynabench.arm import ClientConfig
from foundation.errors import UserError
from reports.figures.conditions import Condition
from workloads import Workload
from workloads.pacing import LoadConfig


def num_values(metric: str, workload: Workload, load: LoadConfig) -> int:
    """Return how many values of a metric a run has at most: those of the requests that count."""
    lengths = workload.columns.output_length
    if metric == "itl":  # counts every gap after the warm-up, also those of requests that do not count
        return int(np.maximum(lengths - 1, 0).sum())
    may_count = load.may_count(workload)
    return int((may_count if metric in ("ttft", "e2e") else may_count & (lengths > 1)).sum())


def check_has_tokens(limits: Sequence[Condition], client: ClientConfig | None) -> None:
    """Refuse limits on the times of tokens where answers have none: they would count as met.

    Raises:
        UserError: there is such a limit.
    """
    if client is None or client.has_tokens:
        return
    what = f"answers of {client.way.api}" if client.stream else "answers that are not streamed"
    for limit in limits:
        if not limit.metric.startswith("e2e"):
            raise UserError(f"slo '{limit}' is on the times of tokens, but {what} have none; expected a limit on e2e")


def check_values(limits: Sequence[Condition], workload: Workload, load: LoadConfig) -> None:
    """Refuse limits on a statistic that has no value: nothing could meet them.

    Raises:
        UserError: there is such a limit.
    """
    if not num_values("ttft", workload, load):
        raise UserError(f"no request of {workload.name} arrives in the time that is measured (--warmup-s, --measure-s)")
    for limit in limits:
        if limit.statistic is not None and not num_values(limit.metric, workload, load):
            raise UserError(
                f"slo '{limit}' has no values: every answer of {workload.name} has one token; expected a limit on ttft "
                "or e2e"
            )
