"""Work that is waited for until the process is asked to end."""

import asyncio

import pytest

from serving.runtime.stopping import to_its_end, until_stopped
from tests.support.waiting import in_time


def test_work_that_ends_first_is_done_and_its_error_is_raised():
    async def main():
        stopping = asyncio.Event()
        assert await until_stopped(stopping, asyncio.sleep(0))
        with pytest.raises(ZeroDivisionError):
            await until_stopped(stopping, fail())

    async def fail():
        raise ZeroDivisionError

    asyncio.run(main())


def test_work_that_is_not_done_in_time_has_given_back_what_it_holds():
    given_back = []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            given_back.append("a lease")

    async def main():
        stopping = asyncio.Event()
        asyncio.get_running_loop().call_soon(stopping.set)
        async with in_time():
            assert not await until_stopped(stopping, work())
        assert given_back == ["a lease"]

    asyncio.run(main())


def test_shielded_work_goes_on():
    async def main():
        stopping, may_end = asyncio.Event(), asyncio.Event()
        stopping.set()
        going_on = asyncio.create_task(may_end.wait())
        assert not await until_stopped(stopping, asyncio.shield(going_on))
        may_end.set()
        async with in_time():
            assert await going_on

    asyncio.run(main())


def test_what_is_being_given_back_is_given_back_also_when_cancelled_meanwhile():
    given_back = []

    async def give_back():
        await asyncio.sleep(0.01)
        given_back.append("a lease")

    async def main():
        closing = asyncio.create_task(to_its_end(give_back()))
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert given_back == ["a lease"]

    asyncio.run(main())


def test_a_second_cancellation_breaks_it_off():
    async def main():
        closing = asyncio.create_task(to_its_end(asyncio.Event().wait()))
        for _ in range(2):
            await asyncio.sleep(0)
            closing.cancel()
            await asyncio.sleep(0)
        async with in_time():
            with pytest.raises(asyncio.CancelledError):
                await closing

    asyncio.run(main())
