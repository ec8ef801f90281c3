"""Whether a request goes on at another instance when its call has ended. A core: it decides, and `Attempts` acts.

    how the call ended                          what follows
    without an error, or with all its tokens    Finished
    draining, unknown, overloaded               PlaceAgain, 8 times at most: it was never begun there
    lost                                        PlaceAgain, as often as the migration limit says
    unavailable, within 30 s of one of these    PlaceAgain after a pause: a router that has nobody to pass it on to
    anything else                               Refused

After each `PlaceAgain` but the last kind, the request may look for an instance for 30 s.
"""

from dataclasses import dataclass, field

ELSEWHERE = frozenset({"draining", "unknown", "overloaded"})
"""Ends of calls that were never begun: they go elsewhere without counting as a migration."""

MAX_REFUSALS = 8
PATIENCE_S = 30.0
"""How long a request that lost its instance waits for another to appear, or for that one to be started again."""

RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is whole."""

    reason: str


@dataclass(frozen=True, slots=True)
class PlaceAgain:
    """What remains is to be placed again, after a pause."""

    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Refused:
    """The request has failed; `kind` is that of a `CallError`."""

    message: str
    kind: str


@dataclass(slots=True)
class Migration:
    """What one choice of an answer may still do, and where it has failed."""

    limit: int
    is_pinned: bool = False
    """Whether its client named an instance: it goes nowhere else."""

    num_migrations: int = 0
    failed_at: set[int] = field(default_factory=set)
    """Instances that come last when it is placed again."""

    waits_until: float = 0.0
    _num_refusals: int = 0

    def on_end(
        self, message: str, kind: str, instance_id: int, *, is_full: bool, now: float
    ) -> Finished | PlaceAgain | Refused:
        """Decide what follows the end of a call; `is_full`: it has given as many tokens as the request may have."""
        if not kind:
            return Finished("stop")  # an engine that ends without saying why is done
        if is_full:
            return Finished("length")  # lost between its last token and its end
        if kind == "unavailable" and now < self.waits_until:
            return PlaceAgain(RETRY_S)
        if kind in ELSEWHERE and not self.is_pinned and self._num_refusals < MAX_REFUSALS:
            self._num_refusals += 1
        elif kind == "lost" and self.num_migrations < self.limit:
            self.num_migrations += 1
        else:
            return Refused(self._reason(message, kind), kind)
        self.failed_at.add(instance_id)
        self.waits_until = now + PATIENCE_S
        return PlaceAgain()

    def may_wait(self, now: float) -> bool:
        """Return whether a request that nobody takes may go on looking for an instance."""
        return now <= self.waits_until

    def _reason(self, message: str, kind: str) -> str:
        if kind == "lost" and self.limit:
            return f"{message} and the migration limit of {self.limit} is exhausted"
        return message
