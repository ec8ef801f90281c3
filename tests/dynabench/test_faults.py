"""What faults of a rehearsal do while they last, and that nothing of them is left after their end."""

import asyncio
import random

import pytest

from dynabench.rehearsal.clients.client import Question
from dynabench.rehearsal.faults.fault import Fault
from dynabench.rehearsal.faults.happen import Happenings
from dynabench.rehearsal.faults.weather import Weather
from dynabench.rehearsal.run import Rehearsal, rehearse
from dynabench.rehearsal.stage import stage as staged
from dynabench.rehearsal.stage.stage import Stage
from dynabench.rehearsal.stage.story import Story
from dynabench.rehearsal.virtual_time.loop import run
from serving.runtime.memory.network import Network
from tests.dynabench.test_rehearsal import WORKERS
from tests.dynabench.test_rehearsed_kv import STORED

WORKER = "worker-0"


def disk_of(stage):
    return stage.actors[WORKER].engine._tiers[0]._disk


STATES = {
    "partition": lambda stage, _: stage.network.is_cut([(WORKER, "frontend")]),
    "half-open": lambda stage, _: stage.network.is_cut([(WORKER, "frontend")]),
    "pause": lambda stage, _: stage.actors[WORKER].node.is_paused,
    "clock-drift": lambda stage, _: stage.actors[WORKER].world._drift,
    "early-timeout": lambda stage, _: stage.actors[WORKER].world.haste,
    "slow-disk": lambda stage, _: disk_of(stage).added_s,
    "full-disk": lambda stage, _: disk_of(stage).is_full,
    "slow-store": lambda _, weather: weather.slow[WORKER],
    "delay": lambda _, weather: weather.delays,
    "discovery-away": lambda stage, _: stage.network.discovery.is_away,
    "broker-away": lambda stage, _: stage.network.broker.is_away,
    "lose-events": lambda stage, _: stage.network.event_loss,
    "repeat-events": lambda stage, _: stage.network.event_repeats,
    "bit-flip": lambda stage, _: stage.network.bit_flips,
    "start-fails": lambda stage, _: "start-fails" in stage.bad_starts,
    "start-hangs": lambda stage, _: "start-hangs" in stage.bad_starts,
}
"""What shows that a fault is in force."""


def seen(state, *faults):
    """Return whether something is wrong in the middle of each second from 0 to 4."""

    async def main():
        stage, weather, found = Stage(STORED, 0, Network(random.Random(0), has_broker=True)), Weather(), []
        stage.start(WORKER)
        await asyncio.sleep(1.0)
        happening = asyncio.create_task(Happenings(stage, weather).carry_out(faults))
        for _ in range(5):
            await asyncio.sleep(0.5)
            found.append(bool(state(stage, weather)))
            await asyncio.sleep(0.5)
        await happening
        return found

    return run(main())


@pytest.mark.parametrize("kind", STATES)
def test_faults_that_overlap_end_with_the_last_of_them(kind):
    faults = [Fault(kind, 0.0, 2.0, WORKER, "frontend", 0.1), Fault(kind, 1.0, 2.0, WORKER, "frontend", 0.3)]
    assert seen(STATES[kind], *faults) == [True, True, True, False, False]


def test_a_way_that_is_cut_twice_is_restored_once_both_faults_have_ended():
    faults = [Fault("partition", 0.0, 4.0, "frontend", WORKER), Fault("half-open", 1.0, 1.0, WORKER, "frontend")]
    assert seen(STATES["half-open"], *faults) == [True, True, True, True, False]


def test_whom_a_chase_kills_is_reported_and_drawn():
    story = Story()
    chase = Fault("chase", 0.0, 10.0, amount=3)
    outcome = rehearse(WORKERS, Rehearsal(0, [Question(0, 0.01, [97] * 40, 60)], [chase]), story=story)
    deaths = [event for event in outcome.happened if event.startswith(("kill worker-", "lose-machine worker-"))]
    assert len(set(deaths)) == 3
    assert [f"{one.what} {one.where[0]}" for one in story.troubles if one.where] == deaths


def test_a_program_that_ends_unasked_is_found(monkeypatch):
    async def quits(*_, **__):
        await asyncio.sleep(1.0)

    monkeypatch.setattr(staged, "run_worker", quits)
    outcome = rehearse(WORKERS, Rehearsal(0, [Question(0, 0.01, [97] * 40, 5)], []))
    assert "worker-0 ended unasked, without an error" in [
        one.what for one in outcome.violations if one.invariant == "alive"
    ]
