"""What holds of programs once requests and faults are over: nothing is left of requests, and nothing failed."""

from collections import deque
from collections.abc import Iterator
from typing import Any

from dynabench.rehearsal.checks.invariants import Violation
from dynabench.rehearsal.checks.programs import num_asked, routings
from dynabench.rehearsal.stage.stage import Actor, Stage
from foundation.ordered_set import OrderedSet

MOST_KEPT = 24
"""Most entries of a container that is not a cache, when all requests are over."""


def at_rest(stage: Stage) -> Iterator[Violation]:
    """Check that nothing is left of requests that are over."""
    for actor in stage.running([*stage.frontends, *stage.routers]):
        name = actor.program.name
        num_open = 0 if actor.handlers is None else actor.handlers.answering.num_open
        if num_open > num_asked(stage):
            yield Violation("released", f"{name} has {num_open} requests in progress")
        for routing in routings(actor):
            for rank, books in routing.books():
                numbers = books.num_requests, books.prefill_tokens, books.decode_blocks, books.num_decoding
                if any(numbers):
                    whose = f"{name} has {numbers} requests, prefill tokens, blocks and decoding requests"
                    yield Violation("released", f"{whose} booked at worker {rank.instance_id:x}")
    for worker in stage.running(stage.workers):
        yield from _idle(worker)
    for actor in stage.running(list(stage.programs)):
        for where, size in _kept(actor):
            yield Violation("memory", f"{actor.program.name} keeps {size} entries in {where}")


def _idle(worker: Actor) -> Iterator[Violation]:
    """Check that an engine has nothing to do, and holds nothing."""
    name, engine = worker.program.name, worker.engine
    for number, rank in enumerate(() if engine is None else engine.ranks):
        assert engine is not None
        transfers = engine.load(number).kv_transfers
        held = transfers.num_held, transfers.num_waiting, transfers.num_loading
        if left := rank.engine.sequences():
            yield Violation("released", f"{name} still has {len(left)} sequences")
        elif used := rank.engine.view().num_used_blocks:
            yield Violation("released", f"{name} has {used} used blocks without a sequence")
        if any(held):
            yield Violation("released", f"{name} has KV of {held} prompts that is held, awaited and being read")
    if num_renewed := _renewed(worker):
        yield Violation("released", f"{name} still renews {num_renewed} leases of KV")


def _renewed(worker: Actor) -> int:
    """Return how many leases of KV a worker renews, and how many meetings it waits for."""
    readers = [each._decode.reader for each in worker.engine._handovers if each._decode] if worker.engine else []
    kinds = [kind for reader in readers for kind in (reader._leases, reader._meetings)]
    return sum(len(owner.names) for kind in kinds for owner in kind._owners.values())


CACHES = frozenset(
    {
        "KnownTier.whole",
        "KnownTier.parts",
        "Run.ids",
        "Run.children",
        "PrefixIndex._runs",
        "BlockLedger._parents",
        "ByteTable.escaped",
    }
)
"""What is as large as the KV caches of engines, or as the alphabet."""
CONTAINERS = (list, dict, set, deque, OrderedSet)


def _kept(actor: Actor) -> Iterator[tuple[str, int]]:
    """Yield the containers of a program that have many entries, with their sizes."""
    waiting: list[Any] = [actor.models, actor.handlers, actor.router]
    if actor.engine is not None:
        waiting += [
            actor.engine._handovers,
            *(getattr(rank._events, "_publisher", None) for rank in actor.engine.ranks),
        ]
    seen = set[int]()
    while waiting:
        owner = waiting.pop()
        if id(owner) in seen or not _is_ours(owner):
            continue
        seen.add(id(owner))
        for name, value in _attributes(owner):
            where = f"{type(owner).__name__}.{name}"
            if isinstance(value, CONTAINERS) and len(value) > MOST_KEPT and where not in CACHES:
                yield where, len(value)
            waiting += _contents(value)


def _is_ours(value: object) -> bool:
    module = type(value).__module__
    return module.startswith("serving.") and not module.startswith("serving.runtime.memory.")  # that is the network


def _attributes(owner: object) -> Iterator[tuple[str, Any]]:
    yield from getattr(owner, "__dict__", {}).items()
    for kind in type(owner).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(owner, name):
                yield name, getattr(owner, name)


def _contents(value: Any) -> list[Any]:
    match value:
        case dict():
            return list(value.values())
        case list() | tuple() | set() | deque():
            return list(value)
    return [value]


def in_stores(stage: Stage) -> Iterator[Violation]:
    """Check that stores of KV have room for what is in them, and for nothing else."""
    for actor in stage.running(list(stage.programs)):
        if actor.store is None:
            continue
        shelf = actor.store.shelf
        if (lost := shelf.num_used - shelf.num_filled) != 0:
            yield Violation("released", f"{actor.program.name} keeps {lost} bytes of room for chunks that never came")
        if num_readers := sum(entry.num_readers for entry in shelf.entries.values()):
            yield Violation("released", f"{actor.program.name} still sends {num_readers} chunks")


def read_well(stage: Stage) -> Iterator[Violation]:
    """Check that no KV failed to come, was kept in vain or was wrong, and no store counted as away: nothing went wrong."""
    for worker in stage.running(stage.workers):
        engine = worker.engine
        for rank in range(0 if engine is None else len(engine.ranks)):
            assert engine is not None
            load = engine.load(rank)
            moved = load.kv_transfers
            if moved.num_failed or moved.num_expired:
                numbers = f"{moved.num_failed} reads that failed and {moved.num_expired} leases that ran out"
                yield Violation("sound", f"{worker.program.name} has {numbers}, without a fault")
            for tier in load.kv_tiers:
                if tier.num_faults:
                    yield Violation(
                        "sound",
                        f"{worker.program.name}: {tier.num_faults} calls to its {tier.name} failed, without a fault",
                    )


def of_programs(stage: Stage) -> Iterator[Violation]:
    """Check that no program ended by an error, or unasked."""
    yield from (Violation("alive", failure) for failure in stage.failures)
