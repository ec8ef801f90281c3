"""An audit: a workload is simulated twice, with two schedulers, and their steps are compared."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dynabench.arm import Run, Settings
from dynabench.deployment.core import CoreConfig
from dynabench.deployment.description import Deployment
from dynabench.fidelity.audit.compare import Difference, first_difference
from dynabench.fidelity.audit.suspects import Explanation, explain, with_engines
from dynabench.installed.compared import Release
from dynabench.installed.process import TITLES, SchedulerProcess
from dynabench.virtual.run import simulate
from foundation.errors import UserError
from mocker.config import NEWEST, EngineVersion, version_of
from mocker.installed.scheduler import NewScheduler
from mocker.step_log import StepLog
from reports.figures.metrics import of_each
from reports.record.records import Record
from workloads import Workload

MOST_SLOWER = 5
"""Requests that are named because they get slower."""


class Side(NamedTuple):
    """A run with one scheduler."""

    name: str
    record: Record
    logs: list[StepLog]

    @property
    def num_steps(self) -> int:
        """Count the steps of all its engines."""
        return sum([log.num_steps for log in self.logs])

    @property
    def num_preemptions(self) -> int:
        """Count how often a request had to wait again."""
        return sum([len(row.preempted) for log in self.logs for row in log.rows])

    @property
    def least_free(self) -> int:
        """Return the fewest KV blocks that were free in an engine when a batch was closed."""
        return min([row.num_free for log in self.logs for row in log.rows], default=0)


class Cost(NamedTuple):
    """A figure with both schedulers (s)."""

    name: str
    left: float
    right: float


class Slower(NamedTuple):
    """A request that takes longer with the second scheduler (s)."""

    request: int
    left: float
    right: float


@dataclass(frozen=True, slots=True)
class Audit:
    """What an audit found."""

    left: Side
    right: Side
    difference: Difference | None
    """The first step in which they differ; None if they are identical."""
    explanations: list[Explanation]
    """Rules of ours that explain it, or move it to a later step, the best first."""

    @property
    def costs(self) -> list[Cost]:
        """TTFT and TPOT with each scheduler, mean and 99th percentile."""
        found = []
        for metric in ("ttft", "tpot"):
            pair = [of_each(side.record.requests, metric) for side in (self.left, self.right)]
            found.append(Cost(f"{metric.upper()} mean", *(float(np.nanmean(values)) for values in pair)))
            found.append(Cost(f"{metric.upper()} p99", *(float(np.nanpercentile(values, 99)) for values in pair)))
        return found

    @property
    def slower(self) -> list[Slower]:
        """The requests that take longer with the second scheduler, by how much, the worst first."""
        left, right = (of_each(side.record.requests, "e2e") for side in (self.left, self.right))
        gains = right - left
        order = np.argsort(-np.nan_to_num(gains))
        numbers = self.left.record.requests.request
        return [
            Slower(int(numbers[place]), float(left[place]), float(right[place]))
            for place in order
            if gains[place] > 1e-9
        ]


def audit(settings: Settings, workload: Workload, process: SchedulerProcess, *, seed: int = 0) -> Audit:
    """Hold our scheduler against that of the vLLM or SGLang that is installed.

    Args:
        settings: what is simulated. Without an engine version, ours follows the rules of the installed one.
        workload: its requests.
        process: runs the schedulers of that engine, which is that of the deployment.
        seed: of every random choice.

    Raises:
        UserError: that engine fails, or the deployment has a planner.
        WorkloadError: a request can never fit.
        ValueError: an installed scheduler cannot be used with these settings.
    """
    ours = replace(settings.deployment, core=CoreConfig())  # ours decides, whatever the deployment says
    name = f"our rules of {process.release.version}"
    if process.engine == "vllm":
        rules = rules_for(process.release)
        ours = with_engines(ours, lambda config: replace(config, engine_version=config.engine_version or rules))
        name = f"our rules of {ours.pools[0].mocker.engine_version}"
    run = _Runs(settings, workload, seed)
    right = run.installed(ours, process)
    left = run.simulated(name, ours)
    difference = first_difference(left.logs, right.logs)
    explanations: list[Explanation] = []
    if difference is not None:
        explanations = explain(difference, ours, run.steps, right.logs)
    return Audit(left, right, difference, explanations)


def audit_versions(
    settings: Settings, workload: Workload, first: SchedulerProcess, second: SchedulerProcess, *, seed: int = 0
) -> Audit:
    """Hold two installed versions of vLLM against each other; see `audit` for arguments and errors.

    Our scheduler takes no part, so nothing says which rule it is.
    """
    run = _Runs(settings, workload, seed)
    left, right = (run.installed(settings.deployment, process) for process in (first, second))
    return Audit(left, right, first_difference(left.logs, right.logs), [])


def rules_for(release: Release) -> EngineVersion:
    """Return the version whose rules are held against a release: its own, or the newest if they are not known."""
    try:
        return version_of(release.version)
    except ValueError:
        return NEWEST


class _Runs:
    """Runs of one workload."""

    def __init__(self, settings: Settings, workload: Workload, seed: int) -> None:
        if settings.deployment.planner.planner != "static":
            raise UserError(
                "an audit compares the same engines, but a planner may start others with another scheduler; leave out planner"
            )
        self._settings = settings
        self._workload = workload
        self._seed = seed

    def simulated(self, name: str, deployment: Deployment, installed: NewScheduler | None = None) -> Side:
        """Simulate a deployment, with schedulers that are installed if they are given."""
        logs: list[StepLog] = []
        run = Run.alone(replace(self._settings, deployment=deployment), seed=self._seed)
        return Side(name, simulate(run, self._workload, logs=logs, installed=installed), logs)

    def installed(self, deployment: Deployment, process: SchedulerProcess) -> Side:
        """Simulate a deployment with the schedulers of an installed engine."""
        name = f"{TITLES[process.engine]} {process.release.version}"
        side = self.simulated(name, deployment, process.new_scheduler)
        process.forget()
        return side

    def steps(self, deployment: Deployment) -> list[StepLog] | None:
        """Simulate a deployment and return the steps of its engines, None if it cannot serve the workload."""
        try:
            return self.simulated("", deployment).logs
        except (UserError, ValueError):
            return None
