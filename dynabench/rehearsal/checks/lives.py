"""What becomes of requests and workers from one look to the next: where requests go, and what workers do that leave or are gone."""

from collections.abc import Iterator

from dynabench.rehearsal.checks.invariants import Violation
from dynabench.rehearsal.checks.programs import known_instances
from dynabench.rehearsal.faults.weather import Weather
from dynabench.rehearsal.stage.stage import Actor, Stage
from serving.engines.mock.live import Live, live_of
from serving.runtime.memory.node import Node
from serving.runtime.memory.tcp import MemoryConnection

LEFT_S = 0.2
"""How long a worker that has left discovery may take to notice that (s)."""
ARRIVES_S = 0.002
"""How long the answer of a worker that has died may still be on its way (s)."""
LATE_S = 1.0
"""How long after a pause, a partition and delays messages to a worker may still be late (s): then neither is checked."""


class Lives:
    """Follows the requests in the engines of a stage."""

    def __init__(self, stage: Stage, weather: Weather, num_migrations: int) -> None:
        """Begin; a request may migrate so often."""
        self._stage = stage
        self._weather = weather
        self._num_migrations = num_migrations
        self._seen: dict[tuple[str, str], set[Node]] = {}  # role and request -> the workers that worked at it
        self._left: dict[Node, tuple[float, set[str]]] = {}  # since when they have left, and what they had by then
        self._owners: dict[str, Node] = {}  # by the name under which they offer KV
        self._late: dict[Node, float] = {}  # when messages to workers were last late
        self._has_flipped = False  # whether chunks in a store may be wrong

    def look(self, now: float) -> Iterator[Violation]:
        """Check what is in engines now."""
        listed = {*known_instances(self._stage).values()}
        self._has_flipped |= self._stage.network.bit_flips > 0
        for worker in self._stage.running(self._stage.workers):
            lives = [] if worker.engine is None else [*_lives(worker)]
            ids = {live.request_id for live in lives}
            yield from self._moved(worker, ids)
            if self._is_late(worker, now):
                self._left.pop(worker.node, None)
            else:
                yield from self._leaving(worker, ids, now, is_listed=worker.program.name in listed)
                yield from self._read(worker, lives)
            for handover in () if worker.engine is None else worker.engine._handovers:
                self._owners[handover._exchange.id] = worker.node
            yield from _unread(worker)
            if not self._has_flipped:
                yield from _intact(worker)

    def _moved(self, worker: Actor, ids: set[str]) -> Iterator[Violation]:
        """Check how many workers of a pool a request has had. A server for requests may lose calls that began unseen."""
        role = worker.program.settings[0].role
        for id in ids if self._stage.network.broker is None else ():
            seen = self._seen.setdefault((role, id), set())
            seen.add(worker.node)
            if len(seen) > 1 + self._num_migrations:
                yield Violation(
                    "limited",
                    f"{len(seen)} {role} workers have worked at {id}, which may migrate {self._num_migrations} times",
                )

    def _leaving(self, worker: Actor, ids: set[str], now: float, *, is_listed: bool) -> Iterator[Violation]:
        """Check that a worker which was asked to end, and has left discovery, takes nothing new."""
        name = worker.program.name
        if not worker.stopping.is_set() or is_listed:
            return
        since_s, before = self._left.setdefault(worker.node, (now, set()))
        if now - since_s > LEFT_S and (new := ids - before):
            yield Violation(
                "left", f"{name} took {', '.join(sorted(new))}, {now - since_s:.2f} s after it had left discovery"
            )
        before |= ids

    def _is_late(self, worker: Actor, now: float) -> bool:
        """Return whether messages to a worker may be late."""
        is_cut = any(worker.program.name in way for way in self._stage.network._cuts)
        if worker.node.is_paused or is_cut or self._weather.delays:
            self._late[worker.node] = now
        return now - self._late.get(worker.node, -LATE_S) < LATE_S

    def _read(self, worker: Actor, lives: list[Live]) -> Iterator[Violation]:
        """Check that KV came from workers that were there until it had come."""
        for live in lives:
            load = live.load
            if load is None or load.kv is None or load.error is not None or not load.num_bytes:
                continue
            owner = self._owners.get(load.kv.remote_engine_id.rpartition("-")[0])
            died_s = None if owner is None else self._stage.killed_s.get(owner)
            if died_s is not None and load.times["transfer_end"] > died_s + ARRIVES_S:
                yield Violation(
                    "whole", f"{worker.program.name} took KV for {live.request_id} from {owner!r} after its end"
                )


def _unread(worker: Actor) -> Iterator[Violation]:
    """Check that the connections to a store which wait for their next call have nothing left of the last.

    Where a bit has flipped, a length may have been wrong: then what it cut off is left.
    """
    for tiers in () if worker.engine is None else worker.engine._tiers:
        for link in () if tiers._store is None else tiers._store.tier._idle:
            if isinstance(link.connection, MemoryConnection) and link.connection.has_rest:
                yield Violation(
                    "unread", f"{worker.program.name} keeps a connection for its next call on which an answer is left"
                )


def _intact(worker: Actor) -> Iterator[Violation]:
    """Check that no chunk of a store was wrong: no bit has flipped."""
    for tiers in () if worker.engine is None else worker.engine._tiers:
        if tiers._store is not None and tiers._store.tier._spoilt.is_on:
            yield Violation("sound", f"{worker.program.name} read a wrong chunk from its store, and no bit had flipped")


def _lives(worker: Actor) -> Iterator[Live]:
    assert worker.engine is not None
    for rank in worker.engine.ranks:
        yield from map(live_of, rank.engine.sequences())
