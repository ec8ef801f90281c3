"""What discovery, frontends and routers know once leases of the dead have run out and events have settled."""

from collections.abc import Iterator, Mapping
from typing import Any

from dynabench.rehearsal.checks.invariants import Violation
from dynabench.rehearsal.checks.programs import known_instances, routings
from dynabench.rehearsal.stage.stage import Actor, Stage
from serving.router.index import PrefixIndex
from serving.routing.live import LiveRouting


def of_discovery(stage: Stage) -> Iterator[Violation]:
    """Check that discovery and frontends know exactly the programs that take requests, and what those have cached."""
    takers = [*stage.workers, *stage.routers]
    running = {actor.program.name: actor for actor in stage.running(takers)}
    found = known_instances(stage)
    for id, name in found.items():
        if name in takers and name not in running:
            yield Violation("forgotten", f"discovery knows {name} as instance {id:x}, which does not run")
    for name in running.keys() - found.values():
        yield Violation("reached", f"discovery does not know {name}, which runs")
    known = {id: running[name] for id, name in found.items() if name in running}
    wanted = {id for id in known if found[id] in (stage.routers or running)}
    for frontend in stage.running(stage.frontends):
        yield from _of_routing(frontend, known, wanted)
    for router in stage.running(stage.routers):
        yield from _of_routing(
            router, known, {id for id, name in found.items() if name in stage.workers} & known.keys()
        )


def _of_routing(actor: Actor, known: Mapping[int, Actor], wanted: set[int]) -> Iterator[Violation]:
    """Check what a frontend or a router knows.

    Args:
        actor: the frontend or router.
        known: who runs, by the ids of their instances.
        wanted: those that it has to route to: the routers, if there are any, else the workers.
    """
    name, ids = actor.program.name, set[int]()
    for pool in actor.models.pools() if actor.models is not None else ():
        for card in pool.cards.values():
            if card.instance_id not in known:
                yield Violation("forgotten", f"{name} has the card of {card.instance_id:x}, which does not run")
    for routing in routings(actor):
        for id in {instance.instance_id for instance in routing._following.client._known.values()} - known.keys():
            yield Violation("forgotten", f"{name} knows instance {id:x}, which does not run")
        ids.update(rank.instance_id for rank in routing.ranks())
        yield from _known_blocks(name, routing, known)
    for id in wanted - ids:
        yield Violation("reached", f"{name} cannot route to {known[id].program.name}, instance {id:x}")


def _known_blocks(name: str, routing: LiveRouting, workers: Mapping[int, Actor]) -> Iterator[Violation]:
    """Check that an index has the blocks that engines have, where engines report them."""
    index = routing.core.index
    if not isinstance(index, PrefixIndex):
        return
    for slot, rank in routing._following.ranks.items():
        worker, traits = workers.get(rank.instance_id), routing.traits(rank.instance_id)
        if worker is None or worker.engine is None or traits is None or not traits.has_kv_events:
            continue
        pool = getattr(worker.engine.ranks[rank.dp_rank].engine._core, "pool", None)
        if pool is None or type(pool).__name__ != "BlockPool":
            continue  # others cache parts of prompts, which an index of whole prefixes cannot have
        cached, known = set(pool._index), _held(index, slot)
        if cached != known:
            numbers = f"{len(known - cached)} blocks that it has not, and misses {len(cached - known)} of {len(cached)}"
            yield Violation("known", f"{name} knows of {worker.program.name} {numbers}")


def _held(index: PrefixIndex, slot: int) -> set[Any]:
    """Return the blocks that a rank has, as an index knows them."""
    held, waiting = set[Any](), list(index._roots.get(slot, ()))
    while waiting:
        run = waiting.pop()
        held.update(run.ids[: run.depths.get(slot, run.start) - run.start])
        waiting += [child for child in run.children or () if slot in child.depths]
    return held
