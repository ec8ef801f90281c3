"""A node of a memory network, and the link from one node to another.

Code belongs to the node in its context (`NODE`), which tasks and callbacks inherit. Whatever a node causes elsewhere
travels over a link, as a call that is made later in the receiver's context. So a node that is dead causes nothing more,
and what is sent to one that is paused waits.

A node is a process. Its kernel outlives it, unless the machine is lost: it accepts connections for a process that is
paused, and hangs up for one that was killed.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from itertools import pairwise
from types import ModuleType
from typing import Any, Protocol

from foundation.own_code import MODULES
from serving.runtime.ports import RuntimeUnavailableError


class Node:
    """See the module. Its network makes it, kills, pauses and resumes it."""

    def __init__(self, name: str, network: Any, kernel: "Node | None" = None) -> None:
        self.name = name
        self.network = network  # a `Network`; its module imports this one
        self.kernel = kernel or self
        self.is_paused = False
        self.is_dead = False
        self._own_code: dict[str, ModuleType] = {}

    def __repr__(self) -> str:
        """Return its name and state."""
        return f"<node {self.name}{' (dead)' if self.is_dead else ' (paused)' if self.is_paused else ''}>"

    def context(self) -> Context:
        """Return a copy of the current context in which code is this node's."""
        context = copy_context()
        context.run(NODE.set, self)
        context.run(MODULES.set, self._own_code)
        return context


NODE: ContextVar[Node | None] = ContextVar("NODE", default=None)
"""The node whose code runs; None outside of all."""


def this_node() -> Node:
    """Return the node whose code runs.

    Raises:
        RuntimeUnavailableError: it is none's.
    """
    node = NODE.get()
    if node is None:
        raise RuntimeUnavailableError(
            "the discovery backend 'memory' connects nodes within one process, and this code runs in none of them: run "
            "it in the context of a node (Network.node(NAME).context()), or choose another with --discovery-backend"
        )
    return node


class Way(Protocol):
    """A server that passes messages on."""

    node: Node
    is_away: bool


class Link:
    """Calls on their way from one node to another: in order, each after its delay, made in the receiver's context."""

    def __init__(self, sender: Node, receiver: Node, context: Context | None = None, *, via: Way | None = None) -> None:
        """Connect two nodes.

        Args:
            sender: whose calls these are.
            receiver: at which they are made.
            context: in which they are made (default: an empty one, for what kernels and servers do).
            via: a server that passes them on.
        """
        self._network = sender.network
        self._sender = sender
        self._receiver = receiver
        self._context = Context() if context is None else context
        self._via = via
        stops = [sender.name, *([via.node.name] if via else []), receiver.name]
        self._hops = tuple(pairwise(dict.fromkeys(stops)))  # none within a node
        self._waiting: deque[tuple[float, Callable[..., object], tuple[Any, ...]]] = deque()
        self._last_s = 0.0
        self._is_scheduled = False

    def __len__(self) -> int:
        """Return the number of calls on their way."""
        return len(self._waiting)

    @property
    def is_dead(self) -> bool:
        """Whether nobody is there to receive."""
        return self._receiver.is_dead

    def send(self, call: Callable[..., object], *arguments: Any) -> None:
        """Make a call at the receiver; if the sender is dead, do nothing."""
        if self._sender.is_dead or self._receiver.is_dead:
            return
        delay_s = 0.0
        for sender, receiver in self._hops:
            delay_s += self._network.delay_s(sender, receiver)
        self._last_s = max(self._last_s, asyncio.get_running_loop().time() + delay_s)
        self._waiting.append((self._last_s, call, arguments))
        if not self._is_scheduled:
            self.schedule()

    def lose(self) -> None:
        """Lose what is on its way."""
        self._waiting.clear()

    def schedule(self) -> None:
        """Let the first call arrive when it is due; while the way is blocked, it waits."""
        if not self._waiting or self._is_scheduled:
            return
        if self._is_blocked:
            self._network.wait(self)
            return
        self._is_scheduled = True
        loop, due_s = asyncio.get_running_loop(), self._waiting[0][0]
        if due_s <= loop.time():
            loop.call_soon(self._arrive, context=self._context)
        else:
            loop.call_at(due_s, self._arrive, context=self._context)

    @property
    def _is_blocked(self) -> bool:
        via = self._via
        is_held = self._receiver.is_paused or (via is not None and (via.is_away or via.node.is_paused))
        return is_held or self._network.is_cut(self._hops)

    def _arrive(self) -> None:
        self._is_scheduled = False
        if self._receiver.is_dead:
            self._waiting.clear()
        elif self._is_blocked or not self._waiting or self._waiting[0][0] > asyncio.get_running_loop().time():
            self.schedule()  # the call that was due then is lost, or waits
        else:
            _, call, arguments = self._waiting.popleft()
            self.schedule()
            call(*arguments)
