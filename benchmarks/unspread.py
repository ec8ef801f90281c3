"""`marginal-all` without what spreads bursts, to show what spreading costs where there is none (routing_study.py)."""

from typing import ClassVar

from serving.router.candidates import Books, Cached, Candidates, Cost
from serving.router.policies.predicting import Predicting


class Unspread(Predicting):
    """Count only what is cached, and only the context of requests that decode or whose prompt is still computed."""

    usual_interference: ClassVar[float] = 0.2
    usual_osl: ClassVar[int] = 50
    description: ClassVar[str] = (
        "predicted TTFT + alpha Tp miss d + E[out] (Tk (C + Q) + Td n) + half E[out] n (Tk L + Td)"
    )

    def cost(self, asked: Candidates, books: Books, cached: Cached) -> Cost:
        """Score by the formula above."""
        delay, out, length = self._interference * self._token, self._out, asked.prompt.num_tokens
        each = out / 2 * (self._context * length + self._sequence)
        return (
            self.ttft(asked, books, cached)
            + delay * (length - cached.matched * asked.block_size) * books.num_decoding
            + out
            * (self._context * (books.context_tokens + books.prefill_tokens) + self._sequence * books.num_requests)
            + each * books.num_requests
        )
