"""Watch the frontend's /metrics during a live run for what came of workers' drafts."""

import re
from collections import defaultdict
from collections.abc import Iterator

from msgspec import structs

from dynabench.deployment.description import Deployment
from dynabench.deployment.engines import SimulatedPool, pools_of
from dynabench.draft_gains import gains_of
from dynabench.live.rank_counts import Rank, RankCounts, labels_of, rank_of
from reports.record.pools import DraftUse
from workloads import Workload

Count = tuple[str, int]
"""What is counted, and of which draft if it is by position (0)."""

_ROW = re.compile(rb"^\w+_component_spec_decode_(\w+?)_total\{([^}\n]*)\} (\S+)$", re.MULTILINE)


class DraftWatch:
    """What each rank has counted since the first look, by role."""

    def __init__(self) -> None:
        self._counts = RankCounts[str, Count]()

    @property
    def has_any(self) -> bool:
        """Whether any rank drafts."""
        return self._counts.has_any

    def note(self, text: bytes) -> None:
        """Process the frontend's metrics."""
        self._counts.note(_counts_in(text))

    def uses(self, deployment: Deployment, workload: Workload) -> tuple[DraftUse, ...]:
        """Return what came of drafts in the run: by pool, or by role if several pools have the same one."""
        if not self.has_any:
            return ()
        roles: dict[str, list[SimulatedPool]] = {}
        for pool in pools_of(deployment):
            roles.setdefault(pool.role, []).append(pool)
        found = []
        for role, pools in roles.items():
            ranks = self._counts.of(role)
            if role != "prefill" and ranks:
                use = _use(ranks, pools[0].name if len(pools) == 1 else role)
                engine = pools[0].engine
                is_one = all(pool.engine == engine for pool in pools)
                found.append(structs.replace(use, gains=gains_of(engine, use.length, workload) if is_one else ()))
        return tuple(found)


def _counts_in(text: bytes) -> Iterator[tuple[str, Rank, Count, float]]:
    for name, labels, value in _ROW.findall(text):
        of = labels_of(labels)
        yield of["worker_type"], rank_of(of), (name.decode(), int(of.get("position", 0))), float(value)


def _use(ranks: list[dict[Count, float]], name: str) -> DraftUse:
    counts: dict[Count, float] = defaultdict(float)
    for rank in ranks:
        for count, value in rank.items():
            counts[count] += value
    places = sorted(place for what, place in counts if what == "num_accepted_tokens_per_pos")
    accepted = tuple([counts["num_accepted_tokens_per_pos", place] for place in places])
    steps = counts["num_drafts", 0]
    return DraftUse(name, steps, counts["num_draft_tokens", 0], accepted, steps / max(counts["num_batches", 0], 1))
