"""The requests of a rehearsal: generated from its seed, or taken from a workload."""

import random

from msgspec import structs

from dynabench.rehearsal.clients.client import Question
from workloads import Workload
from workloads.tokens import prompt_tokens

LEAVES = 0.05
"""The share of clients that hang up in the middle of their answer, and of those that read slowly."""
LONGEST = 600
"""The most tokens of a prompt that others continue, as a turn of a conversation continues the last."""
READS_NOTHING_S = 2.0
"""How long a slow reader reads nothing, at most (s)."""


def generated(seed: int, count: int, rate: float, model: str = "mock") -> list[Question]:
    """Draw requests: many begin as others do, lengths differ, a few clients leave or read slowly."""
    rng = random.Random(f"requests {seed}")
    at_s, found = 0.0, list[Question]()
    for number in range(count):
        at_s += rng.expovariate(rate)
        prefix = _prefix(rng, found)
        own = [rng.randrange(97, 123) for _ in range(rng.choice((8, 40, 150)))]
        asked = Question(number, at_s, prefix + own, rng.choice((1, 5, 20, 60)), model=model)
        found.append(_manners(rng, asked))
    return found


def _prefix(rng: random.Random, before: list[Question]) -> list[int]:
    """Draw how a prompt begins: like a few others (2 of 6), with all of an earlier one (3), or on its own."""
    kind = rng.randrange(6)
    if kind < 2:
        return [97 + rng.randrange(4)] * 64
    prompt = rng.choice(before).prompt if before and kind < 5 else []
    return prompt if len(prompt) <= LONGEST else []


def taken(workload: Workload, seed: int, count: int, model: str = "mock") -> list[Question]:
    """Take requests of a workload, from a place that the seed decides, at the workload's times."""
    rng = random.Random(f"requests {seed}")
    first = rng.randrange(max(len(workload) - count, 0) + 1)
    requests = list(workload.requests[first : first + count])
    start_s = requests[0].arrival_s
    found = []
    for number, request in enumerate(requests):
        prompt = prompt_tokens(request, workload.block_size, salt="").tolist()
        asked = Question(number, request.arrival_s - start_s, prompt, request.output_length, model=model)
        found.append(_manners(rng, asked))
    return found


def _manners(rng: random.Random, asked: Question) -> Question:
    leaves = rng.randrange(1, asked.max_tokens + 1) if rng.random() < LEAVES else None
    slowly_s = rng.uniform(0.1, READS_NOTHING_S) if rng.random() < LEAVES else 0.0
    return structs.replace(asked, leaves_after=leaves, reads_slowly_s=slowly_s)
