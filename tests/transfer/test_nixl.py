"""What NIXL's library keeps of owners: none that was refused, or is gone."""

import pytest
import uvloop

from serving.transfer.agent import Piece, TransferError
from tests.support.waiting import until_async
from tests.transfer.world import MIB, PATIENCE_S, fill, needs_nixl

pytestmark = needs_nixl


def knows(reader, owner_id):
    return reader._ways[0]._library.check_remote_metadata(owner_id)


async def read(reader, address):
    await reader.read(address, [Piece(8, 0, 8)], timeout_s=PATIENCE_S)


def test_an_owner_whose_metadata_is_anothers_is_refused_and_not_kept(world):
    async def main():
        async with world.agent("nixl") as owner, world.agent("nixl") as reader:
            with pytest.raises(TransferError, match="belongs to another agent") as caught:
                await read(reader, owner.address | {"id": "ab" * 16})
            assert caught.value.kind == "refused"
            assert not knows(reader, owner.address["id"])

    uvloop.run(main())


def test_who_comes_with_the_metadata_of_an_owner_that_is_known_costs_that_one_nothing(world):
    async def main():
        async with world.agent("nixl") as owner, world.agent("nixl") as reader:
            fill(owner.memory)
            await read(reader, owner.address)
            with pytest.raises(TransferError, match="belongs to another agent"):
                await read(reader, owner.address | {"id": "ab" * 16})
            reader.memory[:] = bytes(MIB)
            await read(reader, owner.address)
            assert reader.memory[:8] == owner.memory[8:16]

    uvloop.run(main())


def test_an_owner_that_was_closed_is_not_kept(world):
    async def main():
        async with world.agent("nixl") as reader, world.agent("nixl") as owner:
            await read(reader, owner.address)
            # All that a closed agent takes away at once: on one host its process can still be read from.
            owner._ways[0]._life[:16] = bytes(16)
            with pytest.raises(TransferError, match="the owner is gone"):
                await read(reader, owner.address)
            await until_async(lambda: not knows(reader, owner.address["id"]))

    uvloop.run(main())


def test_an_owner_that_was_killed_is_not_kept(world):
    async def main():
        process, address = world.process("nixl")
        async with world.agent("nixl") as reader:
            await read(reader, address)
            process.kill()
            process.wait()
            with pytest.raises(TransferError):
                await read(reader, address)
            await until_async(lambda: not knows(reader, address["id"]))

    uvloop.run(main())
