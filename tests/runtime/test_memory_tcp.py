"""TCP between nodes of a memory network, and how its faults look from either end."""

import asyncio
import errno
import random

import pytest

from dynabench.rehearsal.virtual_time.loop import run
from serving.runtime.memory import tcp
from serving.runtime.memory.network import Network
from serving.runtime.memory.requests import HIGH_WATER_BYTES
from serving.runtime.memory.tcp import FIRST_FREE_PORT, SEGMENT_BYTES
from tests.support.nodes import on

MIB = 1 << 20
DELAY_S = 0.001


def network_of(**options):
    network = Network(random.Random(7), delay=lambda sender, receiver, rng: DELAY_S, **options)
    network.node("a"), network.node("b")
    return network


async def listen(network, name="b", host="127.0.0.1", port=0):
    node = network.nodes[name]
    return await on(node, tcp.listen(node, host, port))


async def connect(network, host, port, name="a"):
    node = network.nodes[name]
    return await on(node, tcp.connect(node, host, port))


async def connected(network):
    """Return the two ends of a connection from a to b."""
    listener = await listen(network)
    return await connect(network, listener.host, listener.port), await listener.accept()


async def receive(connection, num_bytes=MIB):
    data = bytearray(num_bytes)
    return bytes(data[: await connection.receive_into(data)])


def test_bytes_arrive_in_order_in_amounts_of_the_readers_choice():
    async def main():
        ours, theirs = await connected(network_of())
        await ours.send(b"one, ")
        await ours.send(memoryview(b"two"))
        await theirs.send(b"three")
        return [await receive(theirs, 3), await receive(theirs), await receive(theirs, 2), await receive(theirs)], (
            await receive(ours)
        )

    assert run(main()) == ([b"one", b", ", b"tw", b"o"], b"three")


def test_a_reader_that_stops_reading_stops_the_sender():
    async def main():
        ours, theirs = await connected(network_of())
        sending = asyncio.create_task(ours.send(bytes(4 * MIB)))
        await asyncio.sleep(10.0)
        assert not sending.done()
        assert sum(map(len, theirs._arrived)) <= HIGH_WATER_BYTES + SEGMENT_BYTES
        left = 4 * MIB
        while left:
            left -= len(await receive(theirs))
        await sending

    run(main())


def test_who_hangs_up_has_sent_everything_before():
    async def main():
        ours, theirs = await connected(network_of())
        await ours.send(b"the last words")
        ours.close()
        assert [await receive(theirs), await receive(theirs), await receive(theirs)] == [b"the last words", b"", b""]
        with pytest.raises(BrokenPipeError):
            await theirs.send(b"are you there?")

    run(main())


def test_a_sender_that_waits_for_room_hears_that_the_other_side_hung_up():
    async def main():
        ours, theirs = await connected(network_of())
        sending = asyncio.create_task(ours.send(bytes(4 * MIB)))
        await asyncio.sleep(1.0)
        theirs.close()
        with pytest.raises(BrokenPipeError):
            await sending

    run(main())


@pytest.mark.parametrize("what", ["bytes", "an end"])
def test_who_watches_a_connection_is_called_when_something_comes_until_no_more(what):
    async def main():
        network = network_of()
        ours, theirs = await connected(network)
        seen = []
        theirs.watch(lambda: (seen.append("a call"), theirs.unwatch()))
        await asyncio.sleep(1.0)
        assert seen == []
        if what == "bytes":
            await ours.send(b"x")
        else:
            network.kill(network.nodes["a"])
        await asyncio.sleep(1.0)
        assert seen == ["a call"]
        theirs.watch(lambda: (seen.append("another"), theirs.unwatch()))  # it is readable already
        await asyncio.sleep(1.0)
        return seen

    assert run(main()) == ["a call", "another"]


def test_a_cut_holds_bytes_up_and_a_reset_loses_them():
    async def main():
        network = network_of()
        ours, theirs = await connected(network)
        network.partition(["a"], ["b"])
        await ours.send(b"x")
        await asyncio.sleep(60.0)
        assert not theirs._arrived
        network.heal()
        assert await receive(theirs) == b"x"
        await ours.send(b"y")
        network.reset("a", "b")
        assert await receive(theirs) == await receive(ours) == b""

    run(main())


def test_a_bit_that_flips_is_one_of_a_segment():
    async def main():
        network = network_of()
        ours, theirs = await connected(network)
        network.bit_flips = 1.0
        await ours.send(bytes(100))
        return int.from_bytes(await receive(theirs))

    assert run(main()).bit_count() == 1


def test_what_was_not_received_counts_as_a_rest_unless_a_bit_was_wrong_before():
    async def rests(network):
        ours, theirs = await connected(network)
        found = [theirs.has_rest]
        for share in (0.0, 1.0, 0.0):
            network.bit_flips = share
            await ours.send(b"a")
            await asyncio.sleep(2 * DELAY_S)
            found.append(theirs.has_rest)
        return found, (await connected(network))[0].has_rest

    assert run(rests(network_of())) == ([False, True, False, False], False)


def test_ports_of_nodes_are_their_own():
    async def main():
        network = network_of()
        first, second, other = await listen(network), await listen(network), await listen(network, "a")
        assert [(each.host, each.port - FIRST_FREE_PORT) for each in (first, second, other)] == [
            ("b", 0),
            ("b", 1),
            ("a", 0),
        ]
        with pytest.raises(OSError, match="in use") as caught:
            await listen(network, port=first.port)
        assert caught.value.errno == errno.EADDRINUSE
        first.close()
        assert (await listen(network, port=first.port)).port == first.port
        network.kill(network.nodes["b"])
        network.node("b")
        assert (await listen(network)).port == FIRST_FREE_PORT

    run(main())


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0", "localhost", "b"])
def test_a_nodes_own_addresses_are_its_name(host):
    async def main():
        network = network_of()
        listener = await listen(network, host=host)
        assert listener.host == "b"
        ours = await connect(network, host, listener.port, "b")
        await ours.send(b"x")
        assert await receive(await listener.accept()) == b"x"
        if host != "b":
            with pytest.raises(ConnectionRefusedError):
                await connect(network, host, listener.port, "a")

    run(main())


@pytest.mark.parametrize("host", ["a", "192.0.2.1", "host.example"])
def test_a_node_has_no_other_address(host):
    with pytest.raises(OSError, match=f"the node b has no address {host}") as caught:
        run(listen(network_of(), host=host))
    assert caught.value.errno == errno.EADDRNOTAVAIL


def test_who_was_not_accepted_is_hung_up_on():
    async def main():
        network = network_of()
        listener = await listen(network)
        ours = await connect(network, "b", listener.port)
        listener.close()
        assert await receive(ours) == b""
        with pytest.raises(ConnectionRefusedError):
            await connect(network, "b", listener.port)

    run(main())


def test_connections_do_not_go_over_a_server_for_requests():
    async def main():
        network = network_of(has_broker=True)
        network.broker.go_away()
        ours, theirs = await connected(network)
        await ours.send(b"x")
        return await receive(theirs)

    assert run(main()) == b"x"
