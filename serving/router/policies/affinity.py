"""Router modes that send similar requests to one rank by a hash, whatever the ranks have cached."""

import math
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from typing import ClassVar

from mypy_extensions import mypyc_attr

from serving.router.candidates import Candidates
from serving.router.policies.load import power_of_two
from serving.router.policies.policy import Policy, within_bound


@mypyc_attr(allow_interpreted_subclasses=True)
class Session(Policy):
    """Session affinity by rendezvous hashing."""

    description: ClassVar[str] = (
        "One worker per session (rendezvous hash of its id); requests without a session by p2c."
    )
    needs_load: ClassVar[bool] = False
    needs_overlap: bool = False

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """Cost is the score of each rank for the session."""
        session = candidates.prompt.session
        if session is None:
            return power_of_two(candidates, self._rng)
        return rendezvous(session, candidates.slots)


@mypyc_attr(allow_interpreted_subclasses=True)
class Chwbl(Policy):
    """Consistent hashing with bounded loads, after KubeAI and SGLang's prefix_hash."""

    description: ClassVar[str] = (
        "First worker in the rendezvous order of the prompt's first blocks with n < ceil(1.25 (sum n + 1) / W)."
    )
    needs_overlap: bool = False

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """Cost is the score of each rank for the prefix, infinity where it is full."""
        scores = rendezvous(candidates.key(self._config.prefix_key_tokens), candidates.slots)
        is_within = within_bound(candidates.num_requests, 1.25)
        return [score if fits else math.inf for score, fits in zip(scores, is_within, strict=True)]


def rendezvous(key: Hashable, slots: list[int]) -> list[float]:
    """Score each rank for a key, so that few keys move when a rank joins or leaves (highest random weight)."""
    return [
        int.from_bytes(blake2b(f"{slot}:{key}".encode(), digest_size=8).digest(), "big") / 2.0**64 for slot in slots
    ]
