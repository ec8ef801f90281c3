"""What a planner sees: the pools, their waiting work, and the requests that arrived since it last looked.

It is the same in virtual time and for real workers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from serving.planner.capacity import StepTimes
from serving.role import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """The properties of a pool that do not change while it is planned."""

    name: str
    role: Role = "aggregated"
    gpus_per_worker: int = 1
    num_ranks: int = 1
    """Data-parallel ranks of a worker; each of them reports its load."""
    max_num_seqs: int
    """Requests that a rank runs at once."""
    max_num_batched_tokens: int
    """The most tokens that a step of a rank computes."""
    max_kv_tokens: int
    """Tokens that the KV cache of a rank holds."""
    max_model_len: int | None = None
    """Tokens of the longest request that it accepts (none: as many as the KV cache of a rank holds)."""
    startup_s: float = 0.0
    """How long a worker is expected to take to become ready (s)."""
    times: StepTimes | None = None
    """How long the steps of a rank take, if that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """The present work of a rank."""

    num_running: int = 0
    num_waiting: int = 0
    kv_tokens: int = 0
    """Tokens whose KV blocks are in use."""
    queued_prefill_tokens: int = 0
    """Prompt tokens that are still to be computed."""
    decode_kv_tokens: int = 0
    """Context of the requests that are decoding."""
    queued_decode_kv_tokens: int = 0
    """Context of the requests that wait to decode: their prompt is computed elsewhere, or they were preempted."""

    @property
    def num_requests(self) -> int:
        """All its requests."""
        return self.num_running + self.num_waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """The workers of a pool now."""

    num_ready: int
    num_starting: int = 0
    num_draining: int = 0
    loads: tuple[RankLoad, ...] = ()
    """The loads of the ready workers, rank by rank; fewer if some have not reported."""

    @property
    def size(self) -> int:
        """Workers that are ready or starting; draining ones no longer count."""
        return self.num_ready + self.num_starting


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTraffic:
    """The requests of an interval: those that arrived, and figures of those that ended.

    A mean of no requests is None, such as the output length while none has ended.
    """

    duration_s: float
    num_requests: int
    """Requests that arrived."""
    isl: float | None = None
    """Mean prompt length of those that arrived (tokens)."""
    osl: float | None = None
    """Mean output length of those that ended (tokens)."""
    hit_share: float | None = None
    """Share of the prompt tokens of those that ended which were in a cache."""
    ttft_s: float | None = None
    """Mean time to first token of those that got one (s)."""
    itl_s: float | None = None
    """Mean time between tokens of those that ended (s)."""
    e2e_s: float | None = None
    """Mean time from arrival to end of those that ended (s)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """All that a planner sees at one time."""

    now: float
    pools: Mapping[str, PoolState]
    """By name."""
    traffic: RequestTraffic | None
    """The traffic since the last observation; None if it is unknown."""
