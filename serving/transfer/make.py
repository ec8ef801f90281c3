"""Agents by the name of their transport."""

from pathlib import Path
from typing import Any, Literal

from serving.transfer.agent import Agent
from serving.transfer.memory_agent import MemoryAgent
from serving.transfer.shm import Shm
from serving.transfer.way import OnNotice, Way

Transport = Literal["auto", "shm", "tcp", "nixl"]


def make_agent(
    kind: Transport,
    num_bytes: int,
    *,
    on_notice: OnNotice,
    folder: Path | None = None,
) -> Agent:
    """Return an agent, which is to be started in a running loop, and closed.

    Args:
        kind: `auto` takes shared memory to agents on this host.
        num_bytes: of its memory.
        on_notice: is called in the loop with each notice that comes; may come twice, or late.
        folder: for shared memory: where its socket will be; nobody else may write there.
    """
    ways: list[Way[Any]] = [Shm(folder)]
    return MemoryAgent(num_bytes, ways, on_notice)
