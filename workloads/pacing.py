"""How a workload is sent: its own times, or a limit on requests or sessions in flight, and which of it counts."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from foundation.settings import Count, NotNegative, Positive, check_settings
from workloads.workload import Workload

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from workloads.columns import Floats

    Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """How the workload is sent."""

    concurrency: Count | None = None
    """Closed loop: keep this many requests in flight and ignore arrival times (think times stay)."""

    max_concurrency: Count | None = None
    """Open loop with a limit: a request that is due waits while this many are in flight, and its times include the
    wait."""

    session_concurrency: Count | None = None
    """Closed loop over sessions: keep this many in progress; a session's turns run one after another."""

    ramp_s: NotNegative = 0.0
    """Closed loop: let the requests or sessions in flight become as many as set evenly within this time (s; 0: they start at
    once)."""

    fail_on_too_long: bool = False
    """Refuse a workload with a request that is longer than the engine's max_model_len. Otherwise such a request fails or is
    cut, as a server would do it, and is counted."""

    warmup_s: NotNegative = 0.0
    """Exclude requests that arrive before this time from all figures (s)."""

    measure_s: Positive | None = None
    """Exclude requests that arrive later than this after the warm-up from all figures (s)."""

    def __post_init__(self) -> None:
        """Refuse settings that make no sense."""
        check_settings(self)
        given = [name for name in ("concurrency", "max_concurrency", "session_concurrency") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} cannot be combined")
        if self.ramp_s and not self.is_closed:
            raise ValueError(
                f"ramp_s is {self.ramp_s:g}, but nothing grows without concurrency or session_concurrency; expected both or "
                "neither"
            )

    @property
    def is_closed(self) -> bool:
        """Whether arrivals depend on answers, so that no request can be late."""
        return self.concurrency is not None or self.session_concurrency is not None

    @property
    def facts(self) -> dict[str, float]:
        """What readers of a run should know: how many requests or sessions a closed loop kept in flight (`streams`)."""
        return {"streams": self.concurrency or self.session_concurrency or 0} if self.is_closed else {}

    @property
    def kept(self) -> str:
        """What a closed loop keeps in flight; nothing for an open loop."""
        for count, noun in ((self.concurrency, "request"), (self.session_concurrency, "session")):
            if count is not None:
                return f"{count:,} {noun}{'s' * (count != 1)}"
        return ""

    @property
    def burst(self) -> str:
        """How a closed loop begins, if that is in its figures."""
        if self.warmup_s or self.ramp_s or max(self.concurrency or 0, self.session_concurrency or 0) < 2:
            return ""
        return f"The first {self.kept} start at once, and the figures include this burst; --warmup-s leaves it out."

    def of(self, workload: Workload) -> str:
        """Say how many requests are sent, and in what time or how many at a time."""
        pace = f"requests, {self.kept} at a time" if self.is_closed else f"requests in {workload.duration_s:,.0f} s"
        return f"{len(workload):,} {pace}"

    @property
    def has_window(self) -> bool:
        """Whether only requests of some time count."""
        return self.warmup_s > 0 or self.measure_s is not None

    def waits_for_answers(self, workload: Workload) -> bool:
        """Return whether arrivals depend on answers, so that their times are not known in advance."""
        return self.is_closed or workload.has_dependencies

    def may_count(self, workload: Workload) -> "Flags":
        """Return of each request whether it may count, as far as is known in advance."""
        is_unknown = self.waits_for_answers(workload)
        return self.are_measured(workload.columns.arrival_s) | is_unknown

    def is_measured(self, intended_s: float) -> bool:
        """Return whether a request counts."""
        return self.warmup_s <= intended_s <= self._end_s

    def are_measured(self, intended_s: "Floats") -> "Flags":
        """Return which requests count."""
        return (self.warmup_s <= intended_s) & (intended_s <= self._end_s)

    @property
    def _end_s(self) -> float:
        return float("inf") if self.measure_s is None else self.warmup_s + self.measure_s
