"""The requests of a rehearsal: generated from its seed, or taken from a workload."""

import random

from msgspec import structs

from dynabench.rehearsal.clients.client import Question
from dynabench.rehearsal.clients.limits import NO_LIMITS, Limits
from foundation.errors import UserError
from workloads import Workload
from workloads.tokens import prompt_tokens

LEAVES = 0.05
"""The share of clients that hang up in the middle of their answer, and of those that read slowly."""
LONGEST = 600
"""The most tokens of a prompt that others continue, as a turn of a conversation continues the last."""
LEAST = 8
"""The fewest tokens of which a prompt can be made."""
READS_NOTHING_S = 2.0
"""How long a slow reader reads nothing, at most (s)."""


def generated(seed: int, count: int, rate: float, model: str = "mock", limits: Limits = NO_LIMITS) -> list[Question]:
    """Draw requests that a model takes: many begin as others do, lengths differ, a few clients leave or read slowly.

    Raises:
        UserError: it takes hardly any.
    """
    if (most := limits.most) is not None and most < LEAST:
        raise UserError(f"prompts may have {most} tokens: too few to ask anything; expected {LEAST} or more")
    rng = random.Random(f"requests {seed}")
    at_s, found = 0.0, list[Question]()
    for number in range(count):
        at_s += rng.expovariate(rate)
        prefix = _prefix(rng, found)
        own = [rng.randrange(97, 123) for _ in range(rng.choice((8, 40, 150)))]
        max_tokens = rng.choice((1, 5, 20, 60))
        prompt, max_tokens = _fitted(prefix + own, max_tokens, limits)
        found.append(_manners(rng, Question(number, at_s, prompt, max_tokens, model=model)))
    return found


def _fitted(prompt: list[int], max_tokens: int, limits: Limits) -> tuple[list[int], int]:
    """Cut a prompt, then its answer, to what a model takes."""
    prompt = prompt[: limits.most]
    if limits.room is None:
        return prompt, max_tokens
    prompt = prompt[: max(limits.room - max_tokens, LEAST)]
    return prompt, min(max_tokens, limits.room - len(prompt))


def _prefix(rng: random.Random, before: list[Question]) -> list[int]:
    """Draw how a prompt begins: like a few others (2 of 6), with all of an earlier one (3), or on its own."""
    kind = rng.randrange(6)
    if kind < 2:
        return [97 + rng.randrange(4)] * 64
    prompt = rng.choice(before).prompt if before and kind < 5 else []
    return prompt if len(prompt) <= LONGEST else []


def taken(workload: Workload, seed: int, count: int, model: str = "mock", limits: Limits = NO_LIMITS) -> list[Question]:
    """Take requests of a workload, from a place that the seed decides, at the workload's times.

    One that does not fit is sent, and must be refused; an answer for which there is too little room is asked for as
    short as a server would cut it. One whose prompt leaves no room, and that is not refused either, is left out.

    Raises:
        UserError: none is left.
    """
    rng = random.Random(f"requests {seed}")
    first = rng.randrange(max(len(workload) - count, 0) + 1)
    requests = list(workload.requests[first : first + count])
    start_s = requests[0].arrival_s
    found = []
    for number, request in enumerate(requests):
        prompt = prompt_tokens(request, workload.block_size, salt="").tolist()
        max_tokens = request.output_length
        is_too_long = limits.longest.refusal(len(prompt), max_tokens) is not None
        if limits.room is not None and not is_too_long:
            max_tokens = min(max_tokens, limits.room - len(prompt))
        if max_tokens < 1:
            continue
        asked = Question(number, request.arrival_s - start_s, prompt, max_tokens, model=model, is_too_long=is_too_long)
        found.append(_manners(rng, asked))
    if not found:
        raise UserError(f"{workload.name}: no prompt leaves room for an answer in {limits.room} tokens")
    return found


def _manners(rng: random.Random, asked: Question) -> Question:
    leaves = rng.randrange(1, asked.max_tokens + 1) if rng.random() < LEAVES else None
    slowly_s = rng.uniform(0.1, READS_NOTHING_S) if rng.random() < LEAVES else 0.0
    return structs.replace(asked, leaves_after=leaves, reads_slowly_s=slowly_s)
