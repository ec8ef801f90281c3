"""What becomes of requests and workers from one look to the next: where requests go, and what workers do that leave or are gone."""

from collections.abc import Iterator, Mapping

from dynabench.rehearsal.faults import Weather
from dynabench.rehearsal.stage import Actor, Stage
from serving.engines.mock.live import Live, live_of
from serving.runtime.address import INSTANCES, Instance
from serving.runtime.memory.node import Node

LEFT_S = 1.5
"""How long a worker that has left discovery may take to notice that (s): its last messages may be late."""
ANSWER_S = 0.002
"""How long the answer of a worker that has died may still be on its way, while messages are not late (s)."""
SMOOTH_S = 1.0
"""After what time with at most one fault messages are not late (s)."""

Found = Iterator[tuple[str, str]]
"""Invariants that do not hold, and what was found."""


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
        self._rough_s = 0.0

    def look(self, now: float) -> Found:
        """Check what is in engines now."""
        if self._weather.num_faults > 1 or self._weather.delays:
            self._rough_s = now
        listed = {*_listed(self._stage)}
        for worker in self._stage.running(self._stage.workers):
            lives = [] if worker.engine is None else [*_lives(worker)]
            ids = {live.request_id for live in lives}
            yield from self._moved(worker, ids)
            yield from self._leaving(worker, ids, now, is_listed=worker.program.name in listed)
            for handover in () if worker.engine is None else worker.engine._handovers:
                self._owners[handover._exchange.id] = worker.node
            if now - self._rough_s > SMOOTH_S:
                yield from self._read(worker, lives)

    def _moved(self, worker: Actor, ids: set[str]) -> Found:
        """Check how many workers of a pool a request has had. A server for requests may lose calls that began unseen."""
        role = worker.program.settings[0].role
        for id in ids if self._stage.network.broker is None else ():
            seen = self._seen.setdefault((role, id), set())
            seen.add(worker.node)
            if len(seen) > 1 + self._num_migrations:
                yield (
                    "limited",
                    f"{len(seen)} {role} workers have worked at {id}, which may migrate {self._num_migrations} times",
                )

    def _leaving(self, worker: Actor, ids: set[str], now: float, *, is_listed: bool) -> Found:
        """Check that a worker which was asked to end, and has left discovery, takes nothing new."""
        name, node = worker.program.name, worker.node
        if not worker.stopping.is_set() or is_listed or node.is_paused or self._is_cut(name):
            self._left.pop(node, None)
            return
        since_s, before = self._left.setdefault(node, (now, set()))
        if now - since_s > LEFT_S and (new := ids - before):
            yield "left", f"{name} took {', '.join(sorted(new))}, {now - since_s:.2f} s after it had left discovery"
        before |= ids

    def _is_cut(self, name: str) -> bool:
        return any(name in way for way in self._stage.network._cuts)

    def _read(self, worker: Actor, lives: list[Live]) -> Found:
        """Check that KV came from workers that were there until it had come."""
        for live in lives:
            load = live.load
            if load is None or load.kv is None or load.error is not None or not load.num_bytes:
                continue
            owner = self._owners.get(load.kv.remote_engine_id.rpartition("-")[0])
            died_s = None if owner is None else self._stage.killed_s.get(owner)
            if died_s is not None and load.times["transfer_end"] > died_s + ANSWER_S:
                yield "whole", f"{worker.program.name} took KV for {live.request_id} from {owner!r} after its end"


def read_well(stage: Stage) -> Found:
    """Check that no KV failed to come, was kept in vain or was wrong, and no store counted as away: nothing went wrong."""
    for worker in stage.running(stage.workers):
        engine = worker.engine
        for rank in range(0 if engine is None else len(engine.ranks)):
            assert engine is not None
            load = engine.load(rank)
            moved = load.kv_transfers
            if moved.num_failed or moved.num_expired:
                numbers = f"{moved.num_failed} reads that failed and {moved.num_expired} leases that ran out"
                yield "sound", f"{worker.program.name} has {numbers}, without a fault"
            for tier in load.kv_tiers:
                if tier.num_faults:
                    yield (
                        "sound",
                        f"{worker.program.name}: {tier.num_faults} calls to its {tier.name} failed, without a fault",
                    )


def in_stores(stage: Stage) -> Found:
    """Check that stores of KV have room for what is in them, and for nothing else."""
    for actor in stage.running(list(stage.programs)):
        if actor.store is None:
            continue
        shelf = actor.store.shelf
        if (lost := shelf.num_used - shelf.num_filled) != 0:
            yield "released", f"{actor.program.name} keeps {lost} bytes of room for chunks that never came"
        if num_readers := sum(entry.num_readers for entry in shelf.entries.values()):
            yield "released", f"{actor.program.name} still sends {num_readers} chunks"


def _lives(worker: Actor) -> Iterator[Live]:
    assert worker.engine is not None
    for rank in worker.engine.ranks:
        yield from map(live_of, rank.engine.sequences())


def _listed(stage: Stage) -> Iterator[str]:
    """Yield the names of the programs that discovery knows."""
    found: Mapping[str, object] = stage.network.discovery.keys
    for key in found:
        if key.startswith(INSTANCES):
            value = stage.network.discovery.keys[key].value
            yield Instance.parse(key, value).transport.removeprefix("memory:").partition("/")[0]
