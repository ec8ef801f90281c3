"""The requests of a rehearsal: generated from its seed, or taken from a workload."""

import random

from msgspec import structs

from dynabench.rehearsal.clients.client import Question
from workloads import Workload
from workloads.tokens import prompt_tokens

LEAVES = 0.05
"""The share of clients that hang up in the middle of their answer, and of those that read slowly."""
SLOW_S = 2.0
"""How long a slow reader reads nothing, at most (s)."""


def generated(seed: int, count: int, rate: float, model: str = "mock") -> list[Question]:
    """Draw requests: a third shares prefixes with others, lengths differ, a few clients leave or read slowly."""
    rng = random.Random(f"requests {seed}")
    at_s, found = 0.0, []
    for number in range(count):
        at_s += rng.expovariate(rate)
        prefix = [97 + rng.randrange(4)] * (64 if rng.random() < 1 / 3 else 0)
        own = [rng.randrange(97, 123) for _ in range(rng.choice((8, 40, 150)))]
        asked = Question(number, at_s, prefix + own, rng.choice((1, 5, 20, 60)), model=model)
        found.append(_manners(rng, asked))
    return found


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
    slowly_s = rng.uniform(0.1, SLOW_S) if rng.random() < LEAVES else 0.0
    return structs.replace(asked, leaves_after=leaves, reads_slowly_s=slowly_s)
