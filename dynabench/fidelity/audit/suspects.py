"""Rules of ours that may be the reason why two schedulers differ: each is turned round, and the run is made again."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from dynabench.deployment.description import Deployment
from dynabench.fidelity.audit.compare import Difference, first_difference
from mocker import EngineConfig
from mocker.step_log import StepLog
from mocker.vllm.flipped import FlippedConfig, with_rule_flipped
from mocker.vllm.versions import Rules

SWITCHES = (
    "async_scheduling",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "long_prefill_token_threshold_adaptive",
    "scheduler_reserve_full_isl",
)
"""Settings that are on or off. A version with another default for one differs as if a rule had changed."""


class Explanation(NamedTuple):
    """A rule that, turned round, brings our scheduler nearer to the other."""

    rule: str
    difference: Difference | None
    """Where they then part first; None if they do not."""


def suspects(deployment: Deployment) -> Iterator[tuple[str, Deployment]]:
    """Yield each rule of vLLM's scheduler that can be turned round, and a deployment in which it is."""
    for rule in Rules._fields:
        yield from _changed(deployment, rule, lambda config, rule=rule: _flipped(config, rule))
    for name in SWITCHES:
        yield from _changed(
            deployment, name, lambda config, name=name: replace(config, **{name: getattr(config, name) is False})
        )
    others = {"fcfs": "priority", "priority": "fcfs"}
    yield from _changed(
        deployment,
        "scheduling_policy",
        lambda config: replace(config, scheduling_policy=others[config.scheduling_policy]),
    )


def _flipped(config: EngineConfig, rule: str) -> EngineConfig:
    """Turn a rule round, once more if it was."""
    if isinstance(config, FlippedConfig) and config.flipped == rule:
        return replace(config, flipped="")
    return with_rule_flipped(config, rule)


def _changed(
    deployment: Deployment, name: str, change: Callable[[EngineConfig], EngineConfig]
) -> Iterator[tuple[str, Deployment]]:
    try:
        yield name, with_engines(deployment, change)
    except ValueError:
        return  # the settings make no sense with it


def with_engines(deployment: Deployment, change: Callable[[EngineConfig], EngineConfig]) -> Deployment:
    """Return a deployment with the settings of all its engines changed."""
    pools = tuple(replace(pool, mocker=change(pool.mocker)) for pool in deployment.pools)
    return replace(deployment, pools=pools)


def explain(
    difference: Difference,
    deployment: Deployment,
    steps_of: Callable[[Deployment], Sequence[StepLog] | None],
    judge: Sequence[StepLog],
) -> list[Explanation]:
    """Return the rules that explain a difference, the best explanation first.

    Args:
        difference: between ours and the judge.
        deployment: ours.
        steps_of: simulates a deployment and returns its steps, None if it cannot be simulated.
        judge: what the other scheduler did.
    """
    found = []
    for rule, changed in suspects(deployment):
        logs = steps_of(changed)
        if logs is None:
            continue
        rest = first_difference(logs, judge)
        if rest is None or (rest.start_s, rest.step) > (difference.start_s, difference.step):
            found.append(Explanation(rule, rest))
    return sorted(found, key=lambda one: -one.difference.start_s if one.difference else float("-inf"))
