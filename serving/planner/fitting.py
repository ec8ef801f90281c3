"""Fit the wishes of pools to a GPU budget.

GPUs of draining workers are not free yet. So each pool has two numbers: the workers that it will have in the end, and
those that it may have now. The pool is owed the difference until GPUs are free.

    wanted (both or neither)        now                     once the prefill worker has left
    prefill 4 -> 3, decode 4 -> 5   prefill 3, decode 4     prefill 3, decode 5
"""

from collections.abc import Sequence
from dataclasses import dataclass

from serving.planner.budget import clamp, gpus_of, grow, keep, raised
from serving.planner.config import PlannerConfig


@dataclass(frozen=True, slots=True)
class Wish:
    """The workers that a pool has, and those that it wants."""

    gpus: int
    """GPUs of a worker."""
    size: int
    """Workers, ready and starting."""
    num_draining: int
    present: int
    """Workers, without the starts that are being given up."""
    goal: int
    """Workers that it wants, within its own limits."""
    owed: int = 0
    """Workers that it was promised."""


def fit_to_budget(wishes: Sequence[Wish], config: PlannerConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return how many workers each pool will have in the end, and how many it may have now."""
    gpus = [wish.gpus for wish in wishes]
    goals = [wish.goal for wish in wishes]
    present = [wish.present for wish in wishes]
    owed = [min(wish.owed, wish.goal) for wish in wishes]
    most = config.max_gpu_budget
    lowered = _lowered(wishes, config)
    room = gpus_of(goals, gpus) if most is None else most - gpus_of(lowered, gpus)
    planned = grow(lowered, gpus, owed, room=room)
    planned = grow(planned, gpus, goals, room=room - gpus_of(planned, gpus) + gpus_of(lowered, gpus))
    if _is_in_vain(present, lowered, planned, goals):
        lowered = planned = tuple(present) if most is None else _fitted(present, wishes, config)
    if config.min_gpu_budget is not None:
        planned = _at_least(planned, wishes, config)
        lowered = tuple(min(each, wish.present) for each, wish in zip(planned, wishes, strict=True))
    if most is None:
        return planned, planned
    free = most - gpus_of([wish.size + wish.num_draining for wish in wishes], gpus)
    now = grow(lowered, gpus, [min(each, end) for each, end in zip(owed, planned, strict=True)], room=free)
    now = grow(now, gpus, planned, room=free - gpus_of(now, gpus) + gpus_of(lowered, gpus))
    return planned, now


def _lowered(wishes: Sequence[Wish], config: PlannerConfig) -> tuple[int, ...]:
    """Return the workers that stay, before any pool grows."""
    return _fitted([min(wish.goal, wish.present) for wish in wishes], wishes, config)


def _fitted(replicas: Sequence[int], wishes: Sequence[Wish], config: PlannerConfig) -> tuple[int, ...]:
    if config.max_gpu_budget is None:
        return tuple(replicas)
    minima = [min(number, config.min_endpoint) for number in replicas]
    return clamp(replicas, [wish.gpus for wish in wishes], minima, most=config.max_gpu_budget)


def _is_in_vain(present: Sequence[int], lowered: Sequence[int], planned: Sequence[int], goals: Sequence[int]) -> bool:
    """Return whether pools would shrink for others that still could not grow."""
    receivers = [place for place, goal in enumerate(goals) if goal > present[place]]
    gives = any(stays < number for stays, number in zip(lowered, present, strict=True))
    return gives and bool(receivers) and all(planned[place] <= present[place] for place in receivers)


def _at_least(planned: tuple[int, ...], wishes: Sequence[Wish], config: PlannerConfig) -> tuple[int, ...]:
    """Undo reductions, then add workers in proportion, until the pools have the minimum of GPUs."""
    gpus = [wish.gpus for wish in wishes]
    least = config.min_gpu_budget
    assert least is not None
    kept = keep(planned, gpus, [wish.present for wish in wishes], least=least)
    if config.max_gpu_budget is not None and gpus_of(kept, gpus) > config.max_gpu_budget:
        return planned  # no number of workers is between the two
    wanted = raised(kept, gpus, least=least)
    if config.max_replicas is not None:
        wanted = tuple(min(number, config.max_replicas) for number in wanted)
    room = gpus_of(wanted, gpus) if config.max_gpu_budget is None else config.max_gpu_budget - gpus_of(kept, gpus)
    return grow(kept, gpus, wanted, room=room)
