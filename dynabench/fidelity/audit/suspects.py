"""Rules of ours that may be the reason why two schedulers differ: each is turned round, and the run is made again."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from dynabench.deployment.description import Deployment, Pool
from dynabench.fidelity.audit.compare import Difference, first_difference
from mocker import EngineConfig
from mocker.step_log import StepLog
from mocker.vllm.flipped import FlippedConfig, with_rule_flipped
from mocker.vllm.versions import Rules

OF_SGLANG = ("disable_overlap_schedule", "disable_radix_cache", "enable_mixed_chunk", "enable_priority_scheduling")
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
    """Yield each rule of vLLM's scheduler that can be turned round, and a deployment in which it is.

    Of SGLang's there is one version, and so only settings are turned round.
    """
    if deployment.engine_type == "sglang":
        for name in OF_SGLANG:
            with suppress(ValueError):
                yield name, _with_sglang_switched(deployment, name)
        return
    changes = {rule: partial(_flipped, rule=rule) for rule in Rules._fields}
    changes |= {name: partial(_switched, name=name) for name in SWITCHES}
    for name, change in (changes | {"scheduling_policy": _with_other_policy}).items():
        with suppress(ValueError):  # else the settings make no sense with it
            yield name, with_engines(deployment, change)


def _with_sglang_switched(deployment: Deployment, name: str) -> Deployment:
    def switched(pool: Pool) -> Pool:
        settings: dict[str, Any] = {name: not getattr(pool.sglang, name)}
        return replace(pool, sglang=replace(pool.sglang, **settings))

    return replace(deployment, pools=tuple(map(switched, deployment.pools)))


def _flipped(config: EngineConfig, *, rule: str) -> EngineConfig:
    """Turn a rule round, once more if it was."""
    if isinstance(config, FlippedConfig) and config.flipped == rule:
        return replace(config, flipped="")
    return with_rule_flipped(config, rule)


def _switched(config: EngineConfig, *, name: str) -> EngineConfig:
    switched: dict[str, Any] = {name: getattr(config, name) is False}  # None: as if it were on
    return replace(config, **switched)


def _with_other_policy(config: EngineConfig) -> EngineConfig:
    return replace(config, scheduling_policy="fcfs" if config.scheduling_policy == "priority" else "priority")


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
    """Return the rules that, turned round, remove a difference or move it to a later step, the best first.

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
