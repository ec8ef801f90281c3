"""What comes once, and what takes its time, without a server."""

import asyncio

import pytest

from serving.stand_in.faults.state import Faults
from serving.stand_in.faults.words import changed_faults, read_faults


class Server:
    """Notes what faults do to it."""

    def __init__(self):
        self.factors, self.ends = [], []

    def slow_down(self, factor):
        self.factors.append(factor)

    def spoil_loads(self, spoil):
        self.spoil = spoil

    def kill_engine(self, why):
        self.ends.append("engine_death")

    def stop(self):
        self.ends.append("stop")

    def end(self, how):
        self.ends.append(how)


def with_faults(words, do):
    """Do something with faults and a server in a running loop; return the server."""

    async def main():
        faults, server = Faults(read_faults(words)), Server()
        faults.connect(server)
        try:
            await do(faults)
            return server
        finally:
            faults.close()

    return asyncio.run(main())


@pytest.mark.parametrize("how", ["exit", "kill", "engine_death"])
def test_a_crash_comes_after_so_many_answers_once_the_last_is_sent(how):
    async def do(faults):
        faults.answered()
        await asyncio.sleep(0)
        assert not faults.counts[how]
        faults.answered()
        assert not faults.counts[how]  # the answer is still being sent
        for _ in range(3):
            await asyncio.sleep(0)
            faults.answered()

    assert with_faults([f"{how}=2"], do).ends == [how]


def test_a_crash_comes_after_a_time():
    async def do(faults):
        while not faults.counts["exit"]:
            await asyncio.sleep(0.001)

    assert with_faults(["exit=5ms"], do).ends == ["exit"]


def test_a_change_counts_anew_only_for_what_it_changes():
    async def do(faults):
        faults.answered()
        faults.change(changed_faults(faults.config, {"429": 0.5}))
        faults.answered()
        await asyncio.sleep(0)
        assert faults.counts == {"exit": 1}
        faults.change(changed_faults(faults.config, {"kill": 1, "exit": None}))
        await asyncio.sleep(0)
        faults.answered()
        await asyncio.sleep(0)

    assert with_faults(["exit=2"], do).ends == ["exit", "kill"]


def test_what_is_removed_does_not_come():
    async def do(faults):
        faults.change(faults.config.healed())
        faults.answered()
        await asyncio.sleep(0.005)

    server = with_faults(["exit=1", "kill=1ms", "slow=3"], do)
    assert (server.ends, server.factors) == ([], [3.0, 1.0])


def test_it_is_ready_after_its_time_or_when_told():
    async def do(faults):
        assert not faults.is_ready
        faults.make_ready()
        assert faults.is_ready
        faults.change(changed_faults(faults.config, {"unready": "2ms"}))
        assert faults.health == 503
        while not faults.is_ready:
            await asyncio.sleep(0.001)
        assert faults.health is None

    with_faults(["unready=1h"], do)


def test_the_port_may_open_after_startup_or_when_told():
    async def main():
        faults = Faults(read_faults(["startup=2ms"]))
        await faults.started.wait()
        told = Faults(read_faults(["startup=1h", "unready=1h"]))
        assert not told.started.is_set()
        told.make_ready()
        assert told.started.is_set()
        told.connect(Server())
        assert told.is_ready

    asyncio.run(main())
