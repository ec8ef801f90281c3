"""What routers tell each other of their requests, on a network in memory."""

import asyncio
import random
from types import SimpleNamespace

import msgspec
import pytest

from serving.router import Router, RouterConfig
from serving.routing import peers
from serving.routing.peers import Booked, BookingMessage, Ended, Open, Peers, Prefilled, portions
from serving.routing.placement import RankAddress
from serving.runtime.address import EndpointAddress
from serving.worker.kv_events import MESSAGE_HASHES
from tests.routing.network import Network

ADDRESS = EndpointAddress("test", "backend", "generate")
SYNC = ADDRESS.subject("router_sync")
KEY = "v1/routers/test/backend/generate/"
SLOTS = {RankAddress(7, 0): 0, RankAddress(7, 1): 1}


async def router(network, id):
    core = Router("kv", RouterConfig(), block_size=16, rng=random.Random(1))
    for slot in SLOTS.values():
        core.add_rank(slot)
    made = Peers(network.join(id), ADDRESS, core, SLOTS)
    await made.start()
    return SimpleNamespace(peers=made, core=core)


def routers(talk, count=2):
    async def main():
        network = Network()
        made = [await router(network, id) for id in range(1, count + 1)]
        await talk(network, *made)
        for each in made:
            each.peers.close()

    asyncio.run(main())


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


def book(router, request=0, *, rank=RankAddress(7, 0), hashes=(1, 2, 3)):  # noqa: B008
    router.peers.on_booked(
        request, rank, num_tokens=16 * len(hashes), hashes=list(hashes), prefill_tokens=16 * len(hashes)
    )


def load(router, number=0):
    books = router.core.load(number)
    return books.num_requests, books.prefill_tokens, books.decode_blocks


def test_what_one_router_books_the_others_book_too_until_it_is_over():
    async def talk(network, here, there, third):
        book(here)
        await settle()
        assert load(there) == load(third) == (1, 48, 3)
        assert load(here) == (0, 0, 0)  # its core books by itself
        here.peers.on_first_token(0)
        await settle()
        assert load(there) == (1, 0, 3)
        here.peers.on_finish(0)
        await settle()
        assert load(there) == load(third) == (0, 0, 0)

    routers(talk, 3)


def test_requests_of_two_routers_with_one_number_are_two():
    async def talk(network, here, there, third):
        book(here)
        book(there)
        await settle()
        assert load(third)[0] == 2
        here.peers.on_finish(0)
        await settle()
        assert load(third)[0] == 1

    routers(talk, 3)


def test_a_router_that_leaves_takes_its_bookings_with_it():
    async def talk(network, here, there):
        book(here)
        await settle()
        network.change(f"{KEY}1", None)
        assert load(there) == (0, 0, 0)
        assert there.peers.ids == set()

    routers(talk)


def test_the_list_of_open_requests_ends_what_was_missed(monkeypatch):
    monkeypatch.setattr(peers, "OPEN_S", 0.01)

    async def talk(network, here, there):
        book(here, 0)
        book(here, 1)
        await settle()
        assert load(there)[0] == 2
        network.listeners[SYNC], kept = [], network.listeners[SYNC]
        here.peers.on_finish(0)
        await settle()
        network.listeners[SYNC] = kept
        async with asyncio.timeout(60):
            while load(there)[0] == 2:
                await asyncio.sleep(0.01)
        assert load(there)[0] == 1

    routers(talk)


def test_bookings_at_unknown_workers_and_of_ones_own_count_for_nothing():
    async def talk(network, here, there):
        book(here, rank=RankAddress(99, 0))
        own = BookingMessage(2, [Booked(5, 7, 0, 16, [1], 16)])
        await there.peers._runtime.publish(SYNC, msgspec.msgpack.encode(own))
        await settle()
        assert load(there) == (0, 0, 0)

    routers(talk)


def test_a_booking_that_comes_twice_counts_once():
    async def talk(network, here, there):
        message = msgspec.msgpack.encode(BookingMessage(1, [Booked(5, 7, 1, 16, [1], 16)] * 2))
        for _ in range(2):
            await network.join(1).publish(SYNC, message)
        assert load(there, 1) == (1, 16, 1)

    routers(talk)


def test_a_router_alone_tells_nothing_and_tells_late_comers_of_new_requests():
    async def talk(network, here):
        book(here, 0)
        await settle()
        assert network.published == []
        there = await router(network, 9)
        book(here, 1)
        await settle()
        assert load(there)[0] == 1
        there.peers.close()

    routers(talk, 1)


@pytest.mark.parametrize("data", [b"", b"\xc1", [1, 2], {"a": 1}, [1, [[9, 1]]], [1, [["x", 1]]], [1, [[0, 1]]]])
def test_what_is_no_message_is_ignored_and_logged(data, caplog):
    async def talk(network, here, there):
        encoded = data if isinstance(data, bytes) else msgspec.msgpack.encode(data)
        await network.join(3).publish(SYNC, encoded)
        assert load(there) == (0, 0, 0)

    routers(talk)
    assert "bookings from another router were ignored" in caplog.text


def test_a_key_that_is_no_router_is_ignored_and_logged(caplog):
    async def talk(network, here, there):
        network.change(f"{KEY}nothex", b"{}")
        assert there.peers.ids == {1}

    routers(talk)
    assert f"{KEY}nothex in discovery is not a valid router" in caplog.text


def test_bookings_travel_as_short_arrays():
    message = BookingMessage(1, [Booked(5, 7, 0, 48, [11, 12], 32), Prefilled(5), Ended(5), Open([6])])
    data = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.decode(data) == [1, [[0, 5, 7, 0, 48, [11, 12], 32], [1, 5], [2, 5], [3, [6]]]]
    assert msgspec.msgpack.decode(data, type=BookingMessage) == message


def test_bookings_are_told_in_messages_that_every_event_plane_takes():
    def booking(size):
        return Booked(2, 7, 0, 16 * size, list(range(size)), 0)

    bookings = [booking(size) for size in (3, MESSAGE_HASHES, 5, 6, MESSAGE_HASHES, 0)]
    cut = list(portions([*bookings, Prefilled(2), Open([1] * MESSAGE_HASHES)]))
    assert [booking for portion in cut for booking in portion][:6] == bookings
    assert [len(portion) for portion in cut] == [1, 1, 2, 1, 2, 1]
    assert list(portions([])) == []
