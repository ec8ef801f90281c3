"""Code on the nodes of a memory network."""

import asyncio

from serving.runtime.world import SeededWorld, within

SEED = 7


def on(node, work, world=None):
    """Run a coroutine as a node's, in a world that begins now unless one is given."""
    with within(world or SeededWorld(SEED, node.name)):
        return asyncio.create_task(work, context=node.context())
