"""The requests of a batch, and what of a batch outlives its step.

As in SGLang, a batch of prefills becomes the running batch when nothing runs, with its flag and its count of tokens.
"""

from collections.abc import Collection
from typing import Literal

from mocker.sglang.request import Request

Kind = Literal["extend", "mixed", "decode", "idle"]


class Rows:
    """Requests that are computed together."""

    __slots__ = ("chunked", "is_full", "is_prefill_only", "kind", "num_extend", "requests")

    def __init__(self, requests: list[Request], *, chunked: Request | None = None, is_full: bool = False) -> None:
        self.requests = requests  # never changed in place
        self.chunked = chunked  # the one of them whose prefill is not complete
        self.is_full = is_full  # nobody is admitted beside them until one of them leaves
        self.is_prefill_only = False  # none of those that were ever in it may produce a token after its prefill's
        self.kind: Kind = "decode"
        self.num_extend = 0  # tokens that they were created to compute; never cleared, as in SGLang

    def drop(self, excluded: Collection[Request] = ()) -> bool:
        """Remove requests that have ended, and the excluded ones; return whether there were any."""
        left = [request for request in self.requests if not request.ending and request not in excluded]
        if len(left) == len(self.requests):
            return False
        self.requests = left
        return True


class Work:
    """What one iteration computes."""

    __slots__ = ("chunked", "decodes", "kind", "prefills", "requeued")

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.prefills: list[tuple[Request, int, int]] = []  # request, tokens before, tokens computed
        self.decodes: list[Request] = []
        self.chunked: Request | None = None
        self.requeued: list[Request] = []  # retracted or preempted

    @property
    def requests(self) -> list[Request]:
        """All that are computed, in the order of their results."""
        return [*[request for request, _, _ in self.prefills], *self.decodes]
