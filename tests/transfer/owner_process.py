"""An agent in a process of its own: says its address, closes when told so, and ends with its standard input."""

import asyncio
import sys
from pathlib import Path

import msgspec
import uvloop

from serving.transfer.make import make_agent
from tests.transfer.world import TOKEN, fill


async def main(kind, num_bytes, folder):
    agent = make_agent(kind, num_bytes, on_notice=print, folder=folder, token=lambda: TOKEN)
    await agent.start()
    fill(agent.memory)
    print(msgspec.json.encode(agent.address).decode(), flush=True)
    line = await asyncio.to_thread(sys.stdin.readline)
    await agent.close()
    if line:
        print("closed", flush=True)
        await asyncio.to_thread(sys.stdin.readline)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
