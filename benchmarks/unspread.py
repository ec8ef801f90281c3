"""`marginal-all` without what spreads bursts, to show what spreading costs where there is none (routing_study.py)."""

from collections.abc import Sequence
from typing import ClassVar

from serving.router.candidates import Candidates
from serving.router.policies.predicting import Predicting


class Unspread(Predicting):
    """Count only what is cached, and only the context of requests that decode or whose prompt is still computed."""

    usual_interference: ClassVar[float] = 0.2
    usual_osl: ClassVar[int] = 50
    description: ClassVar[str] = (
        "predicted TTFT + alpha Tp miss d + E[out] (Tk (C + Q) + Td n) + half E[out] n (Tk L + Td)"
    )

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """Score by the formula above."""
        delay, out = self._interference * self._token, self._out
        each = out / 2 * (self._context * candidates.prompt.num_tokens + self._sequence)
        rows = zip(self.ttfts(candidates), candidates.missing_tokens, candidates.books, strict=True)
        return [
            ttft
            + delay * miss * book.num_decoding
            + out * (self._context * (book.context_tokens + book.prefill_tokens) + self._sequence * book.num_requests)
            + each * book.num_requests
            for ttft, miss, book in rows
        ]
