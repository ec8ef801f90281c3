"""Watch the frontend's /metrics during a live run for the contents and traffic of workers' KV tiers."""

import re
from collections.abc import Iterator, Mapping, Sequence

from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.engines import engines_of
from dynabench.live.rank_counts import Rank, RankCounts, labels_of, rank_of
from reports.record.pools import Tier, TierTraffic, TierUse, Use

_ROW = re.compile(
    rb'^\w+_component_kv_offload_(?:tiering_)?(\w+?)(?:_total)?\{([^}\n]*tier="[^}\n]*)\} (\S+)$', re.MULTILINE
)
OWN: tuple[Tier, ...] = ("host", "disk")
"""Tiers of which each worker has its own."""

_NOW = ("used_bytes", "capacity_bytes")


class TierWatch:
    """What each rank has reported since the first look, by role and tier."""

    def __init__(self) -> None:
        self._counts = RankCounts[tuple[str, str], str]()

    @property
    def has_any(self) -> bool:
        """Whether any rank has a tier."""
        return self._counts.has_any

    def note(self, text: bytes) -> None:
        """Process the frontend's metrics."""
        self._counts.note(_counts_in(text))

    def uses(self, deployment: Deployment, length_s: float) -> tuple[TierUse, ...]:
        """Return the tier use in a run of this length: by pool, or by role if several pools have the same one."""
        roles: dict[str, list[Pool]] = {}
        for pool in deployment.pools:
            roles.setdefault(pool.role, []).append(pool)
        found, stores = [], []
        for role, pools in roles.items():
            name = pools[0].name if len(pools) == 1 else role
            own = [(tier, self._ranks(role, tier)) for tier in OWN]
            found += [_use(name, tier, ranks, deployment, length_s) for tier, ranks in own if ranks]
            stores += self._ranks(role, "store")
        if stores:
            found.append(_use("all", "store", stores, deployment, length_s))
        return tuple(found)

    def _ranks(self, role: str, tier: Tier) -> list[dict[str, float]]:
        """Return each rank's activity since the first look, and its current contents."""
        return self._counts.of((role, tier), gauges=_NOW)


def _counts_in(text: bytes) -> Iterator[tuple[tuple[str, str], Rank, str, float]]:
    for name, labels, value in _ROW.findall(text):
        of = labels_of(labels)
        yield (of["worker_type"], of["tier"]), rank_of(of), name.decode(), float(value)


def _use(
    pool: str, tier: Tier, ranks: Sequence[Mapping[str, float]], deployment: Deployment, length_s: float
) -> TierUse:
    engine = engines_of(deployment)[0]
    host = engine.host
    assert host is not None, "KV tiers need host memory"
    total = max if tier == "store" else sum  # each rank reports the capacity of the one store
    capacity = total(rank.get("capacity_bytes", 0.0) for rank in ranks)
    used = total(rank.get("used_bytes", 0.0) for rank in ranks)
    tokens_per_chunk = host.blocks_per_chunk * engine.config.block_size

    def count(name: str) -> float:
        return sum(rank.get(name, 0.0) for rank in ranks)

    def busy(name: str) -> Use:
        return Use.of([min(rank.get(name, 0.0) / length_s, 1.0) for rank in ranks])

    return TierUse(
        pool,
        tier,
        1 if tier == "store" else len(ranks),
        capacity_bytes=capacity,
        capacity_tokens=capacity / host.chunk_bytes * tokens_per_chunk,
        full=used / capacity if capacity else 0.0,
        read=TierTraffic(count("read_bytes"), count("reads"), busy("read_time")),
        written=TierTraffic(count("write_bytes"), count("writes"), busy("write_time")),
        evicted_chunks=count("chunk_evictions"),
        refused=count("allocation_failure"),
        flushes=count("flushes"),
        stall_s=count("stall_time"),
        stalled=busy("stall_time"),
    )
