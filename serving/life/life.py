"""What happens to a request, stage by stage. A core: it decides; the frontend and the simulator act on it.

    next_stage --+-- prefill ---- ended well: its KV waits there to be read ---+-- decode ---- ended well ---- Finished
                 |                                                             |
                 +-- pinned, bypassed, no prefill workers, or prefill failed --+

What follows the end of a call:

    how the call ended                          what follows
    without an error, or with all its tokens    the next stage, or Finished
    draining, unknown, overloaded               PlaceAgain in the same stage, at most 8 times in all: it never started
    lost                                        PlaceAgain from the start, as often as the migration limit allows
                                                (a pinned request is refused in both cases)
    unavailable, within 30 s of one of these    PlaceAgain, but it waits: a router has no instance to pass it on to
    draining, unknown, where it failed before   the same: no other instance is there, and this one is about to leave
                                                (not in prefill with prefill_fallback, which makes the wait needless)
    anything else                               Refused; in prefill with prefill_fallback: decode

After each `PlaceAgain` that does not wait, the request may look for an instance for 30 s. So may a request that
`enforce_disagg` keeps from its decode workers while there is no prefill worker. Any other request that finds no instance
when it arrives fails.
"""

from dataclasses import dataclass, field

from serving.life.config import DisaggregationConfig
from serving.life.leg import Stage

ELSEWHERE = frozenset({"draining", "unknown", "overloaded"})
"""Kinds of calls that never started: the request goes elsewhere, which does not count as a migration."""

LEAVING = frozenset({"draining", "unknown"})
"""Kinds of calls to an instance that will soon not be there."""

MAX_REFUSALS = 8
PATIENCE_S = 30.0
"""How long a request that lost its instance, or needs a prefill worker, waits for one to appear or restart."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete."""

    reason: str


@dataclass(frozen=True, slots=True)
class PlaceAgain:
    """The rest of the request must be placed; ask `next_stage` for its stage."""

    waits: bool = False
    """Whether it has to wait for a worker first."""


AGAIN = PlaceAgain()
WAIT = PlaceAgain(waits=True)


@dataclass(frozen=True, slots=True)
class Refused:
    """The request has failed; `kind` is that of a `CallError`."""

    message: str
    kind: str


@dataclass(slots=True)
class Life:
    """What one choice of an answer may still try, and where it has already failed."""

    limit: int
    """How often it may lose an instance and continue on another."""

    is_pinned: bool = False
    """Whether its client named an instance: it never goes elsewhere."""

    config: DisaggregationConfig = DisaggregationConfig()  # noqa: RUF009 (frozen)

    is_whole: bool = False
    """Whether one worker computes all of it: no prefill worker is called, nor needed."""

    stage: Stage = "decode"
    """The stage that it is in, or was last in."""

    is_prefilled: bool = False
    """Whether the KV of its prompt waits at a prefill worker."""

    num_migrations: int = 0
    failed_at: set[int] = field(default_factory=set)
    """Instances that are chosen last when it is placed again."""

    waits_until: float = 0.0
    """Until when it may look for an instance that accepts it."""
    _num_refusals: int = 0

    def next_stage(self, *, now: float, has_prefill: bool = False, bypasses: bool = False) -> Stage | Refused:
        """Return the stage to place it for now; if that is refused, ask again while the request may wait.

        Args:
            now: the time.
            has_prefill: whether there are prefill workers.
            bypasses: whether a decode worker should compute the prompt anyway (see `bypass`).
        """
        needs_prefill = not (self.is_prefilled or self.is_whole or bypasses or self.is_pinned)
        if needs_prefill and not has_prefill and self.config.enforce_disagg:
            self.waits_until = self.waits_until or now + PATIENCE_S
            return Refused("there is no prefill worker, and enforce_disagg is on", "unavailable")
        self.stage = "prefill" if needs_prefill and has_prefill else "decode"
        return self.stage

    def on_end(
        self,
        message: str,
        kind: str,
        instance_id: int | None,
        *,
        stage: Stage | None = None,
        is_full: bool = False,
        now: float,
    ) -> Finished | PlaceAgain | Refused:
        """Decide what follows the end of a call.

        Args:
            message: what went wrong.
            kind: the kind of the `CallError`, empty if nothing went wrong.
            instance_id: the instance that was called, if one was.
            stage: the call's stage, if both workers of a request were called at once (default: the stage it is in).
            is_full: whether it has produced as many tokens as the request may have.
            now: the time.
        """
        is_prefill = (stage or self.stage) == "prefill"
        if not kind and is_prefill:
            self.is_prefilled, self.stage = True, "decode"
            self.waits_until = now + PATIENCE_S
            return AGAIN
        if not kind:
            return Finished("stop")  # an engine that ends without a reason is done
        if is_full and not is_prefill:
            return Finished("length")  # lost between its last token and its end
        has_fallback = is_prefill and self.config.prefill_fallback
        is_leaving = kind in LEAVING and instance_id in self.failed_at and not has_fallback
        if (kind == "unavailable" or is_leaving) and now < self.waits_until:
            return WAIT
        if kind in ELSEWHERE and not self.is_pinned and not is_leaving and self._num_refusals < MAX_REFUSALS:
            self._num_refusals += 1
        elif kind == "lost" and not self.is_pinned and self.num_migrations < self.limit:
            self.num_migrations += 1
            self.is_prefilled = False
        elif has_fallback:
            self.is_whole = True
        else:
            return Refused(self._reason(message, kind), kind)
        assert instance_id is not None, "what was never called is unavailable"
        self.failed_at.add(instance_id)
        self.waits_until = now + PATIENCE_S
        return AGAIN

    def _reason(self, message: str, kind: str) -> str:
        if kind == "lost" and self.limit and not self.is_pinned:
            return f"{message} and the migration limit of {self.limit} is exhausted"
        return message
