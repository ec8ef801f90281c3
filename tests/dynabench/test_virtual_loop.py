"""The event loop on virtual time."""

import asyncio
import gc
import random
import signal
import warnings

import pytest

from dynabench.rehearsal.virtual_time.errors import DeadlockError, LivelockError, OutsideError, TooLongError
from dynabench.rehearsal.virtual_time.loop import VirtualLoop, run
from serving.runtime.memory.network import Network
from serving.runtime.ports import RuntimeUnavailableError
from serving.runtime.world import SeededWorld, World, within, world


def a_network():
    return Network(random.Random(0))


def now():
    return asyncio.get_running_loop().time()


def test_time_jumps_to_the_next_timer_and_timers_run_in_order():
    async def main():
        begun, seen = now(), []

        async def wait(name, s):
            await asyncio.sleep(s)
            seen.append((name, round(now() - begun, 9)))

        await asyncio.gather(wait("a day", 86400.0), wait("an hour", 3600.0), wait("at once", 0))
        return seen

    assert run(main()) == [("at once", 0.0), ("an hour", 3600.0), ("a day", 86400.0)]


def test_timeouts_and_cancelled_timers_cost_nothing():
    async def main():
        for _ in range(1000):
            async with asyncio.timeout(100.0):
                await asyncio.sleep(0.001)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.Event().wait()
        assert len(asyncio.get_running_loop()._scheduled) < 250
        return now()

    assert run(main()) == pytest.approx(1006.0)


def test_work_for_threads_runs_inline():
    async def main():
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)
        return await asyncio.to_thread(sum, [1, 2])

    assert run(main()) == 3


async def connect():
    await asyncio.open_connection("127.0.0.1", 80)


async def start_a_process():
    await asyncio.create_subprocess_exec("true")


async def listen():
    await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)


def test_nothing_outside_of_the_process_can_be_used():
    with pytest.raises(OutsideError, match="calls subprocess_exec of its event loop"):
        run(start_a_process())


@pytest.mark.parametrize("outside", [connect, listen])
def test_only_nodes_connect_to_each_other(outside):
    with pytest.raises(RuntimeUnavailableError, match="this code runs in none of them"):
        run(outside())


def test_a_deadlock_names_who_waits_and_where():
    network = a_network()

    async def never_comes():
        await asyncio.get_running_loop().create_future()

    async def main():
        paused = network.node("worker-1")
        left = asyncio.create_task(never_comes(), context=paused.context())
        await asyncio.sleep(1.0)
        network.pause(paused)
        await left

    with pytest.raises(DeadlockError, match=r"nothing is scheduled at 1001\.0") as failed:
        run(main())
    assert "main at" in str(failed.value)
    assert "worker-1 (paused): " in str(failed.value)
    assert f"never_comes at {__file__}:" in str(failed.value)


def test_virtual_time_is_bounded():
    async def follow():
        while True:
            await asyncio.sleep(7.0)

    with pytest.raises(TooLongError, match=r"60 s of virtual time have passed; these wait: .*follow at"):
        run(follow(), max_s=60.0)


def test_a_livelock_names_the_callback():
    async def spin():
        while True:
            await asyncio.sleep(0)

    with pytest.raises(LivelockError, match=r"1000 callbacks have run at 1000.000000 s.*spin at"):
        run(spin(), max_at_once=1000)


def test_a_paused_node_does_nothing_until_it_is_resumed():
    network = a_network()

    async def main():
        seen = []

        async def tick(name):
            while True:
                await asyncio.sleep(1.0)
                seen.append((name, now()))

        node = network.node("stopped")
        tasks = [asyncio.create_task(tick("stopped"), context=node.context()), asyncio.create_task(tick("other"))]
        await asyncio.sleep(1.5)
        network.pause(node)
        await asyncio.sleep(3.0)
        network.resume(node)
        await asyncio.sleep(1.2)
        for task in tasks:
            task.cancel()
        return seen

    seen = run(main())
    assert [at for name, at in seen if name == "other"] == [1001.0, 1002.0, 1003.0, 1004.0, 1005.0]
    assert [at for name, at in seen if name == "stopped"] == [1001.0, 1004.5, 1005.5]


def test_a_killed_node_runs_nothing_more_not_even_its_cleanup_while_the_simulation_goes_on():
    network, ended = a_network(), []

    async def forever():
        try:
            await asyncio.sleep(1000.0)
        finally:
            ended.append("finally")
            await asyncio.sleep(0)
            ended.append("after a wait in finally")

    async def items():
        try:
            while True:
                yield 1
        finally:
            ended.append("generator")

    async def read():
        async for _ in items():
            await asyncio.sleep(1.0)

    async def main():
        node = network.node("victim")
        for work in (forever, read):
            asyncio.create_task(work(), context=node.context())  # noqa: RUF006 (nobody keeps it)
        asyncio.get_running_loop().call_later(3.0, ended.append, "timer", context=node.context())
        await asyncio.sleep(2.0)
        network.kill(node)
        asyncio.create_task(forever(), context=node.context())  # noqa: RUF006
        await asyncio.sleep(5000.0)
        return list(ended)

    assert run(main()) == []
    assert "after a wait in finally" not in ended


def test_a_generator_that_is_dropped_is_closed_by_its_own_node():
    network, seen = a_network(), []

    async def items():
        try:
            while True:
                yield 1
        finally:
            await asyncio.sleep(0.5)
            seen.append(("closed", now()))

    async def take_one():
        async for _ in items():
            return

    async def main():
        await asyncio.create_task(take_one(), context=network.node("one").context())
        await asyncio.sleep(1.0)

    run(main())
    assert seen == [("closed", 1000.5)]


def test_signals_reach_the_handlers_of_their_node():
    network, seen = a_network(), []

    async def handle(name):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, seen.append, name)

    async def main():
        one, other = network.node("one"), network.node("other")
        for node in (one, other):
            await asyncio.create_task(handle(node.name), context=node.context())
        asyncio.get_running_loop().signal(other, signal.SIGTERM)
        await asyncio.sleep(0)

    run(main())
    assert seen == ["other"]


def test_tasks_that_are_left_are_cancelled_in_the_order_in_which_they_began():
    seen = []

    async def wait(name):
        try:
            await asyncio.Event().wait()
        finally:
            seen.append(name)

    async def main():
        for name in range(20):
            asyncio.create_task(wait(name))  # noqa: RUF006
        await asyncio.sleep(1.0)

    run(main())
    assert seen == list(range(20))


def test_a_thread_cannot_call_into_virtual_time():
    import threading

    failed = []

    async def main():
        loop = asyncio.get_running_loop()

        def call():
            try:
                loop.call_soon_threadsafe(print)
            except OutsideError as error:
                failed.append(str(error))

        thread = threading.Thread(target=call, name="intruder")
        thread.start()
        thread.join()

    run(main())
    assert failed == ["the thread intruder calls into virtual time; expected no threads"]


def test_a_closed_loop_can_be_closed_again():
    loop = VirtualLoop()
    loop.close()
    loop.close()
    assert loop.is_closed()


def test_who_waits_until_an_instant_is_settled_goes_on_after_all_else_of_it():
    async def main():
        seen = []

        async def others(count):
            await asyncio.sleep(1.0)
            for turn in range(count):
                seen.append(f"turn {turn}")
                await asyncio.sleep(0)

        async def settles():
            await asyncio.sleep(1.0)
            await world().settled()
            seen.append(f"settled at {now() - begun:g} s")

        begun = now()
        with within(SeededWorld(1, "a")):
            await asyncio.gather(settles(), others(3))
        return seen

    assert run(main()) == ["turn 0", "turn 1", "turn 2", "settled at 1 s"]


def test_on_a_real_clock_every_instant_is_settled_at_once():
    async def main():
        seen = []
        asyncio.get_running_loop().call_soon(seen.append, "something else")
        await World().settled()
        return list(seen)

    assert asyncio.run(main()) == []


def test_what_the_left_begin_while_they_are_ended_warns_nobody():
    kept = []  # as a cycle of exceptions and frames keeps it, until the garbage collector runs in somebody else's time

    async def clean_up():
        """Do nothing."""

    async def left():
        try:
            await asyncio.Event().wait()
        finally:
            cleaning = clean_up()
            kept.append(cleaning)
            await asyncio.create_task(cleaning)

    async def main():
        kept.append(asyncio.create_task(left(), context=a_network().node("a").context()))
        await asyncio.sleep(1)

    run(main())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        kept.clear()
        gc.collect()
    assert not said
