"""Who must stop running, because the KV cache is full or for a more urgent request, and how."""

from collections.abc import Callable

from mocker.sglang.config import SglangConfig
from mocker.sglang.pool import Pool
from mocker.sglang.ratio import NUM_STEPS_AHEAD
from mocker.sglang.request import Request


def retract(pool: Pool, request: Request, num_remaining: int) -> None:
    """Take back the KV of a running request; those that remain should have room for some steps."""
    pool.release(request, is_kept=False)
    pool.make_room(NUM_STEPS_AHEAD * num_remaining)
    request.forget_kv()


def default_priority(config: SglangConfig) -> int:
    """Return the priority of requests that have none: the least urgent."""
    largest = (1 << 63) - 1
    return largest if config.schedule_low_priority_values_first else -largest - 1


def urgency(request: Request, config: SglangConfig) -> int:
    """Return what the smallest value of goes first."""
    priority = default_priority(config) if request.priority is None else request.priority
    return priority * config.urgency_sign


def staying_first(requests: list[Request], config: SglangConfig) -> list[Request]:
    """Return running requests in the order in which they may stay: the longest output first, then the shortest prompt."""
    if config.retraction_policy == "priority":
        return sorted(
            requests,
            key=lambda request: (-urgency(request, config), request.generated, -request.num_prompt),
            reverse=True,
        )
    return sorted(requests, key=lambda request: (request.generated, -request.num_prompt), reverse=True)


def victims_for(
    request: Request,
    running: list[Request],
    config: SglangConfig,
    needed: float,
    expected: Callable[[Request], float],
) -> list[Request]:
    """Return the running requests, least urgent and newest first, that must stop so that `needed` tokens are saved.

    None, if they are not less urgent by enough, or would not save enough with what is expected of each.
    """
    candidates = sorted(
        [each for each in running if not each.ending],
        key=lambda each: (-urgency(each, config), -each.entry),
    )
    victims: list[Request] = []
    for each in candidates:
        if urgency(each, config) - urgency(request, config) <= config.priority_scheduling_preemption_threshold:
            break
        victims.append(each)
        needed -= expected(each)
        if needed <= 0:
            return victims
    return []
