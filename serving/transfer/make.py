"""Agents by the name of their transport."""

import sys
from pathlib import Path
from typing import Any

from serving.runtime.memory.node import NODE
from serving.transfer.agent import Agent
from serving.transfer.config import Transport
from serving.transfer.memory_agent import MemoryAgent
from serving.transfer.proven import Token
from serving.transfer.shm import Shm
from serving.transfer.tcp import Tcp
from serving.transfer.way import OnNotice, Way


def make_agent(
    kind: Transport,
    num_bytes: int,
    *,
    on_notice: OnNotice,
    folder: Path | None = None,
    host: str = "127.0.0.1",
    token: Token | None = None,
) -> Agent:
    """Return an agent; the caller starts it in a running loop, and closes it.

    Args:
        kind: `auto` is shared memory to agents on this host and, if there is a token, TCP to the others; nodes of a memory
            network have TCP alone.
        num_bytes: the size of its memory.
        on_notice: is called in the loop with each notice; one may arrive twice, or late.
        folder: for shared memory: where its socket will be; nobody else may write there.
        host: for TCP: the address of this host to listen at and to give to others.
        token: for TCP: returns the cluster's current token.
    """
    return MemoryAgent(num_bytes, _ways(kind, folder, host, token), on_notice)


def _ways(kind: Transport, folder: Path | None, host: str, token: Token | None) -> list[Way[Any]]:
    match kind:
        case "shm":
            return [Shm(folder)]
        case "tcp":
            return [Tcp(host, token)]
        case "auto":
            has_shm = sys.platform == "linux" and NODE.get() is None
            near: list[Way[Any]] = [Shm(folder)] if has_shm else []
            return near if near and token is None else [*near, Tcp(host, token)]
