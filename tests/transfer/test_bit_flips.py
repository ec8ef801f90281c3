"""Whichever message of a read of KV is damaged: the read is repeated, or fails as if its owner were lost."""

import random

import pytest

from dynabench.rehearsal.virtual_time.loop import run
from serving.runtime.memory.network import Network
from serving.transfer.agent import Piece, TransferError
from serving.transfer.make import make_agent
from tests.support.nodes import on

TOKEN = b"a token that the whole cluster knows"
NUM_SEGMENTS = 8
"""Four to begin a connection, the id of its caller, a read, and the two of its answer."""
WELCOME = 3
SAID = b"ticket of 16 by."


class Damaging(Network):
    """A network that damages one segment."""

    def __init__(self, number, seed):
        super().__init__(random.Random(seed), delay=lambda sender, receiver, rng: 0.001)
        self.num_segments, self._number = 0, number

    def flipped(self, segment):
        self.bit_flips = float(self.num_segments == self._number)
        self.num_segments += 1
        return super().flipped(segment)


async def agent(host):
    made = make_agent("tcp", 64, on_notice=lambda notice: None, host=host, token=lambda: TOKEN)
    await made.start()
    return made


async def read(network):
    """Return what one node reads of another's memory, or the kind of error."""
    owner = await on(network.node("owner"), agent("owner"))
    node = network.node("reader")
    reader = await on(node, agent("reader"))
    owner.memory[:16] = SAID
    try:
        await on(node, reader.read(owner.address, [Piece(0, 32, 16)], timeout_s=30.0))
    except TransferError as error:
        return error.kind
    return bytes(reader.memory[32:48])


def test_a_read_has_as_many_segments_as_are_damaged_below():
    network = Damaging(-1, 0)
    assert run(read(network)) == SAID
    assert network.num_segments == NUM_SEGMENTS


@pytest.mark.parametrize("number", range(NUM_SEGMENTS))
def test_a_read_of_which_a_message_was_damaged_is_never_refused(number):
    found = [run(read(Damaging(number, seed))) for seed in range(8)]
    if number == NUM_SEGMENTS - 1:
        assert all((int.from_bytes(one) ^ int.from_bytes(SAID)).bit_count() == 1 for one in found)  # its reader looks
    else:
        assert {*found} <= ({"lost"} if number == WELCOME else {SAID, "late"})
