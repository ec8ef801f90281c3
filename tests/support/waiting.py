"""How tests wait: for a state, never for a time to pass."""

import asyncio
import contextlib
import time

import httpx

PATIENCE_S = 120.0
"""A test that waits in vain fails anyway, so patience costs nothing; too little of it fails on a busy machine."""


def until(condition, process=None, *, patience_s=PATIENCE_S):
    """Wait until a condition holds and return what it gave; fail at once if the process that must bring it about ended."""
    deadline = time.monotonic() + patience_s
    while not (found := condition()):
        if process is not None and process.poll() is not None:
            said = "\n".join(filter(None, process.communicate(timeout=PATIENCE_S)))
            raise AssertionError(f"the process ended with {process.returncode}: {said[-3000:]}")
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return found


async def until_async(condition):
    async with in_time():
        while not (found := condition()):
            await asyncio.sleep(0.01)
        return found


def in_time(patience_s=PATIENCE_S):
    return asyncio.timeout(patience_s)


def instances(url):
    """Return the ids of the instances that /health names, none if nobody answers."""
    with contextlib.suppress(httpx.HTTPError):
        return [instance["instance_id"] for instance in httpx.get(f"{url}/health").json().get("instances", ())]
    return []


def wait_for(url, count, process=None):
    """Wait until /health names so many instances."""
    until(lambda: len(instances(url)) == count, process)
