"""Worlds: the real one by default, and simulated nodes, each with its own clock and randomness, in one event loop."""

import asyncio
import random
import selectors
import threading
import time

import pytest

from serving.runtime.threads import in_thread
from serving.runtime.world import EPOCH_NS, HASTY_S, SeededWorld, World, within, world


class Clock(selectors.DefaultSelector):
    """Lets a loop's time jump to its next timer."""

    now = 0.0

    def select(self, timeout=None):
        found = super().select(0)
        self.now += 0 if found else timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at 0."""

    def __init__(self):
        self._clock = Clock()
        super().__init__(self._clock)

    def time(self):
        """Return the virtual time (s)."""
        return self._clock.now


def run(main):
    """Run in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def drawn(node):
    """Return something of each kind that a world draws."""
    return node.token_hex(8), str(node.uuid()), node.entropy.getrandbits(62), node.entropy.uniform(0.5, 1.0)


def test_the_default_is_this_machine():
    before = time.monotonic(), time.time_ns()
    found = world().now(), world().wall_ns()
    after = time.monotonic(), time.time_ns()
    assert before[0] <= found[0] <= after[0]
    assert before[1] / 1e9 - 1 < world().wall_s() < after[1] / 1e9 + 300
    assert not world().is_virtual


def test_the_randomness_of_this_machine_is_the_systems_whatever_is_seeded():
    random.seed(1)
    first = drawn(world())
    random.seed(1)
    assert not set(first) & set(drawn(world()))
    assert isinstance(world().entropy, random.SystemRandom)


def test_a_token_and_a_uuid_have_the_form_of_those_of_secrets_and_uuid():
    token, uuid = world().token_hex(16), world().uuid()
    assert len(token) == 32
    assert int(token, 16) >= 0
    assert (uuid.version, uuid.variant) == (4, "specified in RFC 4122")


def test_the_same_seed_and_name_draw_the_same_and_others_do_not():
    first, again, neighbour, other = (
        drawn(SeededWorld(seed, name)) for seed, name in ((1, "a"), (1, "a"), (1, "b"), (2, "a"))
    )
    assert first == again
    assert len({*first, *neighbour, *other}) == 3 * len(first)


def test_the_clocks_of_a_simulated_node_are_the_loops():
    async def main():
        node = SeededWorld(1, "a")
        assert (node.now(), node.wall_ns()) == (0.0, EPOCH_NS)
        await asyncio.sleep(2.5)
        assert (node.now(), node.wall_ns(), node.wall_s()) == (2.5, EPOCH_NS + 2_500_000_000, EPOCH_NS / 1e9 + 2.5)

    run(main())


def test_a_wall_clock_drifts_and_jumps_and_the_other_clock_does_neither():
    async def main():
        node = SeededWorld(1, "a")
        node.jump(10.0)
        node.gain(-0.01)
        assert node.wall_s() == EPOCH_NS / 1e9 + 10
        await asyncio.sleep(100.0)
        assert node.wall_s() == EPOCH_NS / 1e9 + 10 + 99
        node.jump(-3600.0)
        assert node.wall_s() == EPOCH_NS / 1e9 + 10 + 99 - 3600
        assert node.now() == 100.0
        node.gain(0.5)
        assert node.wall_s() == EPOCH_NS / 1e9 + 10 + 99 - 3600
        await asyncio.sleep(2.0)
        assert node.wall_s() == EPOCH_NS / 1e9 + 10 + 99 - 3600 + 3

    run(main())


def test_nodes_in_one_loop_have_their_own_clocks_and_randomness_in_all_that_they_start():
    async def seen(log):
        """Look from a task, a callback and a task's task."""
        asyncio.get_running_loop().call_later(1.0, lambda: log.append(world()))
        log.append(world())
        await asyncio.sleep(2.0)
        await asyncio.create_task(own(log))

    async def own(log):
        log.append(world())

    async def main():
        nodes = SeededWorld(1, "a"), SeededWorld(1, "b")
        nodes[1].jump(60.0)
        logs, tasks = ([], []), []
        for node, log in zip(nodes, logs, strict=True):
            with within(node):
                tasks.append(asyncio.create_task(seen(log)))
        assert isinstance(world(), World)
        assert not isinstance(world(), SeededWorld)
        await asyncio.gather(*tasks)
        assert logs == ([nodes[0]] * 3, [nodes[1]] * 3)
        assert nodes[1].wall_s() - nodes[0].wall_s() == 60

    run(main())


def test_in_virtual_time_nothing_runs_beside_the_loop():
    async def main():
        with within(SeededWorld(1, "a")):
            assert await in_thread(threading.current_thread) is threading.current_thread()
            with pytest.raises(ZeroDivisionError):
                await in_thread(lambda: 1 / 0)

    run(main())


def test_a_thread_is_in_the_world_of_who_starts_it():
    async def main():
        node = World()
        with within(node):
            assert await in_thread(world) is node
            assert await in_thread(threading.current_thread) is not threading.current_thread()

    asyncio.run(main())


def test_a_step_timer_of_virtual_time_waits_on_the_loop():
    async def main():
        timer = SeededWorld(1, "a").step_timer()
        for when in (0.0003, 0.0071, 5.0):
            await timer.until(when)
            assert world_time() == pytest.approx(when, abs=1e-12)
        await timer.until(1.0)
        assert world_time() == pytest.approx(5.0, abs=1e-12)
        timer.close()

    def world_time():
        return asyncio.get_running_loop().time()

    run(main())


def test_a_simulated_node_has_no_time_outside_a_loop():
    with pytest.raises(RuntimeError, match="no running event loop"):
        SeededWorld(1, "a").now()


def test_only_a_simulated_node_in_haste_waits_too_shortly_at_times():
    node = SeededWorld(1, "a")
    assert {each.patience(10.0) for each in (World(), node)} == {10.0}
    node.haste = 0.5
    waits = [node.patience(10.0) for _ in range(200)]
    assert {wait for wait in waits if wait > HASTY_S} == {10.0}
    assert 60 < sum(wait <= HASTY_S for wait in waits) < 140
