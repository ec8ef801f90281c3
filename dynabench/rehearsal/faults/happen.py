"""What faults do to the programs of a stage, and to the network between them."""

import asyncio
import random
from collections.abc import Callable, Sequence
from contextvars import Context
from functools import partial

from dynabench.rehearsal.faults.fault import Fault, Kind
from dynabench.rehearsal.faults.weather import Weather
from dynabench.rehearsal.stage.stage import Actor, Stage
from serving.engines.mock.engine import Mocker
from serving.engines.mock.live import live_of
from serving.runtime.memory.network import Network

CHASED_S = 1.0
"""After what time the end of each is seen, if its machine is lost with it (s)."""
AIM_S = 0.005
"""How often a chase looks for the next (s)."""


async def carry_out(
    faults: Sequence[Fault],
    stage: Stage,
    weather: Weather,
    on_event: Callable[[str], None],
    on_death: Callable[[Fault], None] = lambda _: None,
) -> None:
    """Let everything happen at its time, and end; return once all faults are over.

    Args:
        faults: what happens.
        stage: to whom.
        weather: notes what is wrong.
        on_event: is told what begins and ends.
        on_death: is told whom a chase kills: that depends on where its request goes.
    """
    start_s = asyncio.get_running_loop().time()

    async def happen(fault: Fault) -> None:
        await asyncio.sleep(max(start_s + fault.at_s - asyncio.get_running_loop().time(), 0.0))
        if fault.kind == "chase":
            chasing = asyncio.create_task(_chase(fault, stage, start_s, on_death))
            undo: Callable[[], object] | None = partial(_end_chase, chasing)
        else:
            undo = _begin(fault, stage, weather)
        if undo is None:
            return  # its program does not run now, or there is no such server
        weather.begin()
        trouble = stage.story.trouble(fault.label, *fault.ends)
        on_event(f"{fault.kind} {fault.target}".strip())
        await asyncio.sleep(fault.lasts_s)
        undo()
        weather.end()
        trouble.end(asyncio.get_running_loop().time())
        on_event(f"end of {fault.kind} {fault.target}".strip())

    await asyncio.gather(*(happen(fault) for fault in faults))


async def _chase(fault: Fault, stage: Stage, start_s: float, on_death: Callable[[Fault], None]) -> None:
    """Kill the workers of one request, some with their machines: the one whose KV is read, and the one that answers, in turn."""
    loop, id, rng = asyncio.get_running_loop(), "", random.Random(f"chase {fault.at_s}")
    # A lost machine costs its request 10 s, so that it meets fewer deaths: each chase has its own share of them.
    share_lost = rng.random()
    for number in range(round(fault.amount)):
        while (found := _at_work(stage, id, is_reading=number % 2 == 0)) is None:
            await asyncio.sleep(AIM_S)
        actor, id = found
        kind: Kind = "lose-machine" if rng.random() < share_lost else "kill"
        on_death(Fault(kind, loop.time() - start_s, CHASED_S, actor.program.name))
        stage.kill(actor.program.name, is_lost=kind == "lose-machine")
        loop.call_later(CHASED_S, stage.see_end, actor, context=Context())


def _end_chase(chasing: asyncio.Task[None]) -> None:
    """End a chase; raise what it raised."""
    if chasing.done():
        chasing.result()
    chasing.cancel()


def _at_work(stage: Stage, id: str, *, is_reading: bool) -> tuple[Actor, str] | None:
    """Return a worker that has made some of the answer to a request (default: to any), or whose KV is read for it now."""
    for actor in stage.running(stage.workers):
        for rank in () if actor.engine is None else actor.engine.ranks:
            for live in map(live_of, rank.engine.sequences()):
                if id not in ("", live.request_id):
                    continue
                if live.load is not None and is_reading:
                    is_moving = live.load.moving is not None and not live.load.moving.done()
                    owner = stage.owner_of(live.load.kv) if is_moving and live.load.kv is not None else None
                    if owner is not None:
                        return owner, live.request_id
                elif live.sent and live.end is None:
                    return actor, live.request_id
    return None


def _begin(fault: Fault, stage: Stage, weather: Weather) -> Callable[[], object] | None:
    """Begin a fault; return what ends it, or None if it cannot happen now."""
    network, name = stage.network, fault.target
    match fault.kind:
        case "partition":
            network.partition([name], [fault.other])
            return lambda: network.mend([name], [fault.other])
        case "half-open":
            network.cut([name], [fault.other])
            return lambda: network.mend([name], [fault.other])
        case "reset":
            network.reset(name, fault.other)
        case "delay":
            weather.delays.append(fault.amount)
            return lambda: weather.delays.remove(fault.amount)
        case "lose-events":
            return _more(network, "event_loss", fault.amount)
        case "bit-flip":
            return _more(network, "bit_flips", fault.amount)
        case "repeat-events":
            return _more(network, "event_repeats", fault.amount) if network.broker else None
        case "discovery-away" | "broker-away":
            server = network.discovery if fault.kind == "discovery-away" else network.broker
            if server is None or server.is_away:
                return None
            server.go_away()
            return server.come_back
        case "discovery-wiped":
            network.discovery.wipe()
        case "broker-wiped":
            if network.broker is None:
                return None
            network.broker.wipe()
        case "start-fails":
            stage.num_failing += 1
            return partial(_lower, stage, "num_failing")
        case "start-hangs":
            stage.num_hanging += 1
            return partial(_lower, stage, "num_hanging")
        case "overload":
            pass  # see `bursts`
        case "slow-store":
            weather.slow[name] = fault.amount
            return partial(weather.slow.pop, name, None)
        case _:
            actor = next(stage.running([name]), None)
            return None if actor is None else _harm(fault, actor, stage)
    return lambda: None


def _harm(fault: Fault, actor: Actor, stage: Stage) -> Callable[[], object] | None:
    """Let something happen to a program that runs; return what ends it, or None if it cannot happen now."""
    network, node = stage.network, actor.node
    match fault.kind:
        case "pause":
            network.pause(node)
            return lambda: network.resume(node) if not node.is_dead else None
        case "clock-jump":
            actor.world.jump(fault.amount)
            return lambda: None
        case "clock-drift":
            actor.world.gain(fault.amount)
            return partial(actor.world.gain, 0.0)
        case "early-timeout":
            actor.world.haste = fault.amount
            return partial(setattr, actor.world, "haste", 0.0)
        case "slow-disk" | "full-disk":
            return _harm_disks(fault, actor.engine)
        case "restart":
            stage.restart(actor)
        case _:
            stage.kill(fault.target, is_lost=fault.kind == "lose-machine")
    return partial(stage.see_end, actor)


def _harm_disks(fault: Fault, engine: Mocker | None) -> Callable[[], object] | None:
    """Make the disks of a worker slow or full, as long as this process uses them; return what ends it."""
    if engine is None:
        return None
    if fault.kind == "full-disk":
        engine.fill_disks(True)
        return partial(engine.fill_disks, False)
    engine.slow_disks(fault.amount)
    return partial(engine.slow_disks, 0.0)


def _more(network: Network, share: str, amount: float) -> Callable[[], object]:
    """Raise a share of the network's; return what lowers it again."""
    setattr(network, share, getattr(network, share) + amount)
    return lambda: setattr(network, share, max(getattr(network, share) - amount, 0.0))


def _lower(stage: Stage, count: str) -> None:
    setattr(stage, count, getattr(stage, count) - 1)
