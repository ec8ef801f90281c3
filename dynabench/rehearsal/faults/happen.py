"""What faults do to the programs of a stage, and to the network between them."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from functools import partial

from dynabench.rehearsal.faults.fault import Fault, Kind
from dynabench.rehearsal.faults.weather import Weather
from dynabench.rehearsal.stage.stage import Actor, Stage
from serving.engines.mock.live import live_of

CHASED_S = 1.0
"""After what time the end of each is seen, if its machine is lost with it (s)."""
AIM_S = 0.005
"""How often a chase looks for the next (s)."""


class Happenings:
    """Lets faults happen to a stage."""

    def __init__(
        self,
        stage: Stage,
        weather: Weather,
        on_fault: Callable[[Fault], None] = lambda _: None,
    ) -> None:
        """Begin now.

        Args:
            stage: to whom they happen.
            weather: notes what is wrong.
            on_fault: is told what happens, whom a chase kills included: that depends on where its request goes.
        """
        self._stage, self._weather, self._on_fault = stage, weather, on_fault
        self._start_s = asyncio.get_running_loop().time()

    async def carry_out(self, faults: Sequence[Fault]) -> None:
        """Let everything happen at its time, and end; return once all faults are over."""
        await asyncio.gather(*(self._happen(fault) for fault in faults))

    async def _happen(self, fault: Fault) -> None:
        await asyncio.sleep(max(self._start_s + fault.at_s - asyncio.get_running_loop().time(), 0.0))
        if (end := self._begin(fault)) is None:
            return
        if fault.kind == "chase":
            await asyncio.gather(_later(fault.lasts_s, end), self._chase(fault))
        else:
            await _later(fault.lasts_s, end)

    def _begin(self, fault: Fault) -> Callable[[], None] | None:
        """Begin a fault; return what ends it, or None if its program does not run now, or there is no such server."""
        undo = _begun(fault, self._stage, self._weather)
        if undo is None:
            return None
        self._weather.begin()
        trouble = self._stage.story.trouble(fault.label, *fault.ends)
        self._on_fault(fault)

        def end() -> None:
            undo()
            self._weather.end()
            trouble.end(asyncio.get_running_loop().time())

        return end

    async def _chase(self, chase: Fault) -> None:
        """Kill the workers of one request in turn, some with their machines: the one whose KV is read, and the one that answers."""
        id, rng, deaths = "", random.Random(f"chase {chase.at_s}"), []
        share_lost = rng.random()  # a lost machine costs its request 10 s: without any, it meets more deaths
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(chase.lasts_s):
                for number in range(round(chase.amount)):
                    while (found := _at_work(self._stage, id, is_reading=number % 2 == 0)) is None:
                        await asyncio.sleep(AIM_S)
                    actor, id = found
                    at_s = asyncio.get_running_loop().time() - self._start_s
                    kind: Kind = "lose-machine" if rng.random() < share_lost else "kill"
                    death = Fault(kind, at_s, CHASED_S, actor.program.name)
                    if (end := self._begin(death)) is not None:
                        deaths.append(asyncio.create_task(_later(CHASED_S, end)))
        await asyncio.gather(*deaths)


async def _later(after_s: float, end: Callable[[], None]) -> None:
    await asyncio.sleep(after_s)
    end()


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


def _begun(fault: Fault, stage: Stage, weather: Weather) -> Callable[[], object] | None:
    """Begin a fault; return what ends it, or None if it cannot happen now."""
    network, name, what = stage.network, fault.target, (fault.kind, fault.target)
    match fault.kind:
        case "partition" | "half-open":
            ways = [(name, fault.other), (fault.other, name)][: 2 if fault.kind == "partition" else 1]
            ends = [_cut(*way, stage, weather) for way in ways]
            return lambda: [end() for end in ends]
        case "reset":
            network.reset(name, fault.other)
        case "delay":
            weather.delays.append(fault.amount)
            return partial(weather.delays.remove, fault.amount)
        case "lose-events":
            return weather.add(what, fault.amount, partial(setattr, network, "event_loss"))
        case "bit-flip":
            return weather.add(what, fault.amount, partial(setattr, network, "bit_flips"))
        case "repeat-events":
            if network.broker is None:
                return None
            return weather.add(what, fault.amount, partial(setattr, network, "event_repeats"))
        case "discovery-away" | "broker-away":
            server = network.discovery if fault.kind == "discovery-away" else network.broker
            return None if server is None else weather.hold(what, server.go_away, server.come_back)
        case "discovery-wiped":
            network.discovery.wipe()
        case "broker-wiped":
            if network.broker is None:
                return None
            network.broker.wipe()
        case "start-fails" | "start-hangs":
            starts = stage.bad_starts
            return weather.hold(what, partial(starts.add, fault.kind), partial(starts.remove, fault.kind))
        case "overload" | "chase":
            pass  # see `bursts`, and `Happenings`
        case "slow-store":
            return weather.add(what, fault.amount, partial(weather.slow.__setitem__, name))
        case _:
            actor = next(stage.running([name]), None)
            return None if actor is None else _harm(fault, actor, stage, weather)
    return lambda: None


def _cut(sender: str, receiver: str, stage: Stage, weather: Weather) -> Callable[[], None]:
    """Cut the way from one program to another, one way."""
    ends, network = ([sender], [receiver]), stage.network
    return weather.hold((sender, receiver), partial(network.cut, *ends), partial(network.mend, *ends))


def _harm(fault: Fault, actor: Actor, stage: Stage, weather: Weather) -> Callable[[], object] | None:
    """Let something happen to a program that runs; return what ends it, or None if it cannot happen now."""
    network, node, what = stage.network, actor.node, (fault.kind, actor.node)
    match fault.kind:
        case "pause":
            return weather.hold(what, partial(network.pause, node), partial(network.resume, node))
        case "clock-jump":
            actor.world.jump(fault.amount)
            return lambda: None
        case "clock-drift":
            return weather.add(what, fault.amount, actor.world.gain)
        case "early-timeout":
            return weather.add(what, fault.amount, partial(setattr, actor.world, "haste"))
        case "slow-disk":
            return None if actor.engine is None else weather.add(what, fault.amount, actor.engine.slow_disks)
        case "full-disk":
            fill = None if actor.engine is None else actor.engine.fill_disks
            return None if fill is None else weather.hold(what, partial(fill, True), partial(fill, False))
        case "restart":
            stage.restart(actor)
        case _:
            stage.kill(fault.target, is_lost=fault.kind == "lose-machine")
    return partial(stage.see_end, actor)
