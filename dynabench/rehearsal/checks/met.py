"""The faults that met a request, and what they excuse: how long it may take, and whether it may fail."""

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from dynabench.rehearsal.clients.client import Answer
from dynabench.rehearsal.faults.fault import Fault, Kind
from dynabench.rehearsal.stage.stage import PLANNER, SUPERVISOR

OWN_S = 4.0
"""How long a request may take besides the work of engines (s)."""
PATIENCE_S = 12.0
"""How long a fault may delay a request: then a process that is silent is given up (s)."""
TAIL_S = 13.0
"""How long after its end a fault may still affect requests: connections are made again, and leases run out (s)."""
RESTART_S = 7.0
"""How long a program that ended is away: its supervisor waits, and it takes a while to start (s)."""
NOBODY_S = 30.0
"""How long a request waits for a worker while there is none (s)."""
ASIDE = frozenset({PLANNER, SUPERVISOR})
"""Programs through which no request passes."""


LOSSES: frozenset[Kind] = frozenset({"kill", "lose-machine", "restart", "pause", "partition", "half-open", "reset"})
"""Faults by which a request may lose its worker."""
SILENT: frozenset[Kind] = frozenset({"lose-machine", "partition", "half-open", "pause", "bit-flip"})
"""Faults after which nobody hangs up, or a length is wrong and the rest never comes."""
ENDS: frozenset[Kind] = frozenset({"kill", "lose-machine", "restart"})
"""Faults after which a program is started again."""
NO_STARTS: frozenset[Kind] = frozenset({"start-fails", "start-hangs", "discovery-away"})
"""Faults by which a worker does not start again."""
STALLS: frozenset[Kind] = LOSSES | {
    *("discovery-away", "discovery-wiped", "broker-away", "broker-wiped", "delay", "bit-flip", "slow-disk"),
    "slow-store",
}
"""Faults that may delay a request."""


class Met(NamedTuple):
    """The faults of a rehearsal, and whom they met."""

    faults: Sequence[Fault]
    """Those that happened so far."""
    began_s: float
    """When the first request could be sent, by the loop's clock."""
    pools: Sequence[set[str]]
    """The workers of each."""
    frontends: Sequence[str]
    num_migrations: int
    """How often a request may lose its worker."""
    read_s: float = 0.0
    """How long a read of KV waits for a machine that is silent (s); 0: none is read."""
    there: Sequence[tuple[float, Sequence[set[str]]]] = ()
    """The pools that took the place of `pools`, and when (s, by the loop's clock)."""
    routers: Sequence[str] = ()
    """The routers that are programs of their own."""
    needs_kv: bool = False
    """Whether a request fails whose KV cannot be read from another worker (`kv_load_failure_policy`)."""
    worked_s: Mapping[str, float] = MappingProxyType({})
    """For how long engines that had a request worked (s), by request."""

    def during(self, answer: Answer, kinds: frozenset[Kind]) -> list[Fault]:
        """Return the faults that may have affected a request."""
        first_s, last_s = answer.asked_s - self.began_s, answer.ended_s - self.began_s
        return [
            fault
            for fault in self.faults
            if fault.kind in kinds and fault.at_s <= last_s and first_s <= self._over_s(fault) + TAIL_S
        ]

    def _over_s(self, fault: Fault) -> float:
        """Return when a fault is over, or its program can start again (s after the first request)."""
        over_s = fault.at_s + fault.lasts_s
        for other in self.faults if fault.kind in ENDS else ():  # in order of time
            if other.kind in NO_STARTS and other.at_s <= over_s + RESTART_S:
                over_s = max(over_s, other.at_s + other.lasts_s)
        return over_s

    def _pools_during(self, answer: Answer) -> Iterator[set[str]]:
        """Yield the workers of each pool while a request was in progress."""
        if not self.there:
            yield from self.pools
        for place, (since_s, pools) in enumerate(self.there):
            until_s = self.there[place + 1][0] if place + 1 < len(self.there) else math.inf
            if since_s <= answer.ended_s and answer.asked_s <= until_s:
                yield from pools

    def bound_s(self, answer: Answer) -> float:
        """Return how long a request may take (s)."""
        stalls = self.during(answer, STALLS)
        reads_s = self.read_s * sum(fault.kind in SILENT for fault in stalls)
        nobody_s = NOBODY_S if any(self._over_s(fault) > fault.at_s + fault.lasts_s for fault in stalls) else 0.0
        worked_s = self.worked_s.get(answer.question.id, 0.0)
        return OWN_S + worked_s + reads_s + nobody_s + sum(_patience_s(fault) + 1.0 for fault in stalls)

    def excuses(self, answer: Answer) -> bool:
        """Return whether a request could not be saved."""
        losses = [fault for fault in self.during(answer, LOSSES) if ASIDE.isdisjoint((fault.target, fault.other))]
        targets = {name for fault in losses for name in (fault.target, fault.other)}
        pools = list(self._pools_during(answer))
        workers = set[str]().union(*self.pools, *(pool for _, pools in self.there for pool in pools))
        hurt = {fault.target for fault in losses if not fault.other} - workers
        return (
            len(losses) > self.num_migrations
            or any(pool <= targets for pool in pools)
            or answer.frontend in hurt
            or bool(hurt & set(self.routers))
            or (self.needs_kv and bool(self.during(answer, frozenset({"bit-flip"}))))
            or bool(self.during(answer, frozenset({"broker-away", "broker-wiped"})))
        )


def _patience_s(fault: Fault) -> float:
    """Return how long a fault may delay a request (s)."""
    match fault.kind:
        case "broker-away":
            return fault.lasts_s  # an answer that has begun waits for the server, however long
        case "bit-flip":
            return PATIENCE_S  # where a length is wrong, the rest is awaited longer than the fault lasts
    return min(fault.lasts_s + RESTART_S * (fault.kind in ENDS), PATIENCE_S)
