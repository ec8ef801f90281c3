"""Watch the frontend's /metrics during a live run for what came of workers' drafts."""

import re
from collections import defaultdict

from msgspec import structs

from dynabench.deployment.description import Deployment
from dynabench.deployment.engines import SimulatedPool, pools_of
from dynabench.draft_gains import gains_of
from reports.record.pools import DraftUse
from workloads import Workload

Rank = tuple[str, str]
"""Instance and rank."""
Count = tuple[str, int]
"""What is counted, and of which draft if it is by position (0)."""

_ROW = re.compile(rb"^\w+_component_spec_decode_(\w+?)_total\{([^}\n]*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(rb'(\w+)="([^"\n]*)"')


class DraftWatch:
    """What each rank has counted, by role, since the first look; a rank that had not reported then is new."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, Rank, Count], float] = {}
        self._has_looked = False
        self._last: dict[str, dict[Rank, dict[Count, float]]] = {}

    @property
    def has_any(self) -> bool:
        """Whether any rank drafts."""
        return bool(self._last)

    def note(self, text: bytes) -> None:
        """Process the frontend's metrics."""
        for name, labels, value in _ROW.findall(text):
            of = {label.decode(): said.decode() for label, said in _LABEL.findall(labels)}
            role, rank, count = (
                of["worker_type"],
                (of["instance"], of["rank"]),
                (name.decode(), int(of.get("position", 0))),
            )
            if not self._has_looked:
                self._first[role, rank, count] = float(value)
            self._last.setdefault(role, {}).setdefault(rank, {})[count] = float(value)
        self._has_looked = True

    def uses(self, deployment: Deployment, workload: Workload) -> tuple[DraftUse, ...]:
        """Return what came of drafts in the run: by pool, or by role if several pools have the same one."""
        if not self.has_any:
            return ()
        roles: dict[str, list[SimulatedPool]] = {}
        for pool in pools_of(deployment):
            roles.setdefault(pool.role, []).append(pool)
        found = []
        for role, pools in roles.items():
            if role != "prefill" and role in self._last:
                use = self._use(role, pools[0].name if len(pools) == 1 else role)
                engine = pools[0].engine
                is_one = all(pool.engine == engine for pool in pools)
                found.append(structs.replace(use, gains=gains_of(engine, use.length, workload) if is_one else ()))
        return tuple(found)

    def _use(self, role: str, name: str) -> DraftUse:
        counts: dict[Count, float] = defaultdict(float)
        for rank, facts in self._last[role].items():
            for count, value in facts.items():
                counts[count] += max(value - self._first.get((role, rank, count), 0.0), 0.0)
        places = sorted(place for what, place in counts if what == "num_accepted_tokens_per_pos")
        accepted = tuple([counts["num_accepted_tokens_per_pos", place] for place in places])
        steps = counts["num_drafts", 0]
        return DraftUse(name, steps, counts["num_draft_tokens", 0], accepted, steps / max(counts["num_batches", 0], 1))
