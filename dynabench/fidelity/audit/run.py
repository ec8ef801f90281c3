"""An audit: a workload is simulated twice, with two schedulers, and their steps are compared."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dynabench.arm import Run, Settings
from dynabench.deployment.core import CoreConfig
from dynabench.deployment.description import Deployment
from dynabench.fidelity.audit.compare import Difference, first_difference
from dynabench.fidelity.audit.suspects import Explanation, explain, with_engines
from dynabench.installed.process import Release, release_of
from dynabench.virtual.run import simulate
from foundation.errors import UserError
from mocker.config import NEWEST, EngineVersion, version_of
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
    """Rules of ours that explain it, the best explanation first."""

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


def audit(settings: Settings, workload: Workload, python: str | None, *, seed: int = 0) -> Audit:
    """Hold our scheduler against the vLLM that is installed.

    Args:
        settings: what is simulated. Without an engine version, ours follows the rules of the installed one.
        workload: its requests.
        python: of the environment that has vLLM (None: this one).
        seed: of every random choice.

    Raises:
        UserError: that vLLM cannot be run, or fails.
        WorkloadError: a request can never fit.
        ValueError: an installed scheduler cannot be used with these settings.
    """
    release = release_of(python)
    ours = with_engines(
        settings.deployment, lambda config: replace(config, engine_version=config.engine_version or rules_for(release))
    )
    simulated = _simulations(settings, workload, seed)
    right = simulated(f"vLLM {release.version}", installed(ours, python))
    left = simulated(f"our rules of {ours.pools[0].mocker.engine_version}", ours)
    difference = first_difference(left.logs, right.logs)
    explanations: list[Explanation] = []
    if difference is not None:
        explanations = explain(difference, ours, lambda deployment: _steps_of(simulated, deployment), right.logs)
    return Audit(left, right, difference, explanations)


def audit_versions(settings: Settings, workload: Workload, python: str | None, against: str, *, seed: int = 0) -> Audit:
    """Hold two installed versions of vLLM against each other; see `audit` for arguments and errors.

    Our scheduler takes no part, so nothing says which rule it is.
    """
    simulated = _simulations(settings, workload, seed)
    left, right = (
        simulated(f"vLLM {release_of(each).version}", installed(settings.deployment, each))
        for each in (python, against)
    )
    return Audit(left, right, first_difference(left.logs, right.logs), [])


def rules_for(release: Release) -> EngineVersion:
    """Return the version whose rules are held against a release: its own, or the newest if they are not known."""
    try:
        return version_of(release.version)
    except ValueError:
        return NEWEST


def installed(deployment: Deployment, python: str | None) -> Deployment:
    """Return a deployment whose engines have the scheduler of an installed vLLM."""
    return replace(deployment, core=CoreConfig(engine_core="vllm", engine_python=python))


def _simulations(settings: Settings, workload: Workload, seed: int) -> Callable[[str, Deployment], Side]:
    def simulated(name: str, deployment: Deployment) -> Side:
        logs: list[StepLog] = []
        record = simulate(Run.alone(replace(settings, deployment=deployment), seed=seed), workload, logs=logs)
        return Side(name, record, logs)

    return simulated


def _steps_of(simulated: Callable[[str, Deployment], Side], deployment: Deployment) -> list[StepLog] | None:
    try:
        return simulated("", deployment).logs
    except (UserError, ValueError):
        return None  # with this rule, the workload cannot be served
