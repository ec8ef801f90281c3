"""Router modes that know what no live router can: bounds for the others, in virtual time."""

import random
from collections.abc import Sequence
from typing import ClassVar

from mypy_extensions import mypyc_attr

from serving.router.candidates import Candidates
from serving.router.config import RouterConfig
from serving.router.policies.policy import TrueWork
from serving.router.policies.predicting import Marginal, Predicting


@mypyc_attr(allow_interpreted_subclasses=True)
class OracleCache(Marginal):
    """Marginal with an index that is never late and never guessed."""

    description: ClassVar[str] = (
        "marginal that knows every cache exactly, whatever --use-kv-events and --kv-event-delay-s say (virtual time)."
    )


@mypyc_attr(allow_interpreted_subclasses=True)
class OracleLoad(Predicting):
    """Marginal with the true work at each rank, clairvoyant about the lengths of answers."""

    needs_truth: ClassVar[bool] = True

    description: ClassVar[str] = (
        "marginal that knows each request's remaining prompt and the length of its answer (virtual time)."
    )

    def __init__(self, config: RouterConfig, rng: random.Random) -> None:
        super().__init__(config, rng)
        self._work: list[list[TrueWork]] = []
        self._output_length = 0

    def on_truth(self, work: list[list[TrueWork]], output_length: int) -> None:
        """Keep it for `costs`."""
        self._work, self._output_length = work, output_length

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """The request's TTFT, and for every request there, the delays that the two cause each other."""
        length, out, result = candidates.prompt.num_tokens, self._output_length, []
        for miss, fetch, requests in zip(
            candidates.missing_tokens, candidates.fetch_s(self._fetch), self._work, strict=True
        ):
            queued = sum(request[0] for request in requests)
            decoding = sum(1 for request in requests if not request[0])
            context = sum(request[2] for request in requests if not request[0])
            steps = max(-(-(queued + miss) // max(self._budget - decoding, 1)), 1)
            each = self._base + self._sequence * decoding + self._context * context
            cost = fetch + self._token * (queued + miss) + steps * each
            cost += self._interference * self._token * miss * decoding
            for _, left, tokens in requests:
                cost += min(out, left) * (self._context * (tokens + length) + 2 * self._sequence)
            result.append(cost)
        return result


@mypyc_attr(allow_interpreted_subclasses=True)
class OracleRollout(Marginal):
    """Marginal for later requests; the driver tries each rank for this one and compares the outcomes."""

    needs_rollout: ClassVar[bool] = True

    description: ClassVar[str] = (
        "each worker is tried in a copy of the simulation, with the requests to come routed by marginal (small workloads)."
    )
