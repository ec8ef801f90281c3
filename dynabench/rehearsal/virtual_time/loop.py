"""An event loop on virtual time: when nothing is ready, time jumps to the next timer.

What runs, and in which order, depends on the program alone: threads' work runs inline, nothing outside of the process
can be waited for, and the garbage collector runs after fixed numbers of callbacks.

A callback belongs to the node in its context (`serving/runtime/memory/node.py`):

    the node runs        its callbacks run
    it is paused         they are held, and run once it is resumed
    it is dead           they are dropped. Its tasks are kept as they are until the loop is closed: a killed process
                         runs no `finally` block, so nothing of it may be finalised while the simulation goes on
"""

import asyncio
import contextlib
import gc
import heapq
import inspect
import logging
import math
import threading
import warnings
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context, copy_context
from typing import Any, Never, TypeVar

from dynabench.rehearsal.virtual_time.errors import (
    DeadlockError,
    LivelockError,
    OutsideError,
    StuckError,
    TooLongError,
    VirtualLoopError,
)
from dynabench.rehearsal.virtual_time.places import described, place_of
from dynabench.rehearsal.virtual_time.tcp import create_connection, create_server
from dynabench.rehearsal.virtual_time.watch import watched
from serving.runtime.memory.node import NODE, Node

COLLECT_EVERY = 200_000
"""Callbacks between two runs of the garbage collector."""

PRUNE_AT = 1000
"""Tasks at which those that are done are first forgotten."""

START_S = 1000.0
"""Where time begins: a monotonic clock is rarely at 0."""

MAX_CLOSINGS = 100
"""How often a coroutine is closed that goes on waiting."""

OUTSIDE = (
    *("add_reader", "remove_reader", "add_writer", "remove_writer", "getaddrinfo", "getnameinfo", "sendfile"),
    *("create_unix_connection", "create_unix_server", "create_datagram_endpoint"),
    *("connect_accepted_socket", "start_tls", "connect_read_pipe", "connect_write_pipe"),
    *("subprocess_exec", "subprocess_shell", "sock_accept", "sock_connect", "sock_recv", "sock_recv_into"),
    *("sock_recvfrom", "sock_recvfrom_into", "sock_sendall", "sock_sendto", "sock_sendfile"),
)
"""What a loop offers for sockets, pipes and processes."""

Result = TypeVar("Result")


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module. Use `run`, which also ends what is left."""

    def __init__(self, *, max_s: float = math.inf, max_at_once: int = 1_000_000, is_strict: bool = False) -> None:
        """Begin at `START_S`.

        Args:
            max_s: the most virtual time that may pass (s).
            max_at_once: the most callbacks that may run without time passing.
            is_strict: whether the simulation ends when a program wants something from outside, also if it does not mind.
        """
        super().__init__()
        self._ready: deque[asyncio.Handle]
        self._scheduled: list[Any]  # timer handles, with what typeshed does not know of them
        self._timer_cancelled_count: int
        self._stopping: bool
        self._thread_id: int | None
        self._now = START_S
        self._end_s = START_S + max_s
        self._max_at_once = max_at_once
        self._is_strict = is_strict
        self._refused: OutsideError | None = None
        self._torn: BaseException | None = None
        self._num_at_once = 0
        self._num_run = 0
        self._last: deque[asyncio.Handle] = deque()
        self._held: dict[Node, list[asyncio.Handle]] = {}
        self._tasks: dict[asyncio.Task[Any], Node | None] = {}
        self._prune_at = PRUNE_AT
        self._generators: dict[int, Context] = {}
        self._kept: list[object] = []  # of the dead
        self._signals: dict[tuple[Node | None, int], Callable[[], object]] = {}
        for name in OUTSIDE:
            setattr(self, name, self._refusal(name))
        self.create_server = create_server  # type: ignore[assignment, method-assign]
        self.create_connection = create_connection  # type: ignore[assignment, method-assign]

    @property
    def num_run(self) -> int:
        """Callbacks run so far."""
        return self._num_run

    def time(self) -> float:
        """Return the virtual time (s)."""
        return self._now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Call a function now, and return its result as a future."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, context: Context | None = None, **options: Any
    ) -> asyncio.Task[Any]:
        """Start a task, which belongs to the node in its context. After the end nothing starts: what is left is closed."""
        if self.is_closed():
            coro.close()
            future: Any = self.create_future()
            future.cancel()
            return future  # type: ignore[no-any-return]
        task = super().create_task(coro, context=context, **options)
        self._tasks[task] = NODE.get() if context is None else context.get(NODE)
        if len(self._tasks) > self._prune_at:
            self._tasks = {task: node for task, node in self._tasks.items() if not task.done()}
            self._prune_at = max(PRUNE_AT, 2 * len(self._tasks))
        return task

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        """Call soon; after the end, never."""
        if self.is_closed():
            return asyncio.Handle(callback, args, self, context)
        return super().call_soon(callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call at a time; after the end, never."""
        if self.is_closed():
            return asyncio.TimerHandle(when, callback, args, self, context)
        return super().call_at(when, callback, *args, context=context)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Call soon; in virtual time there is one thread."""
        if self._thread_id not in (None, threading.get_ident()):
            raise self.refuse(
                f"the thread {threading.current_thread().name} calls into virtual time; expected no threads"
            )
        return self.call_soon(callback, *args, context=context)

    def call_last(self, callback: Callable[..., object], *args: Any) -> None:
        """Call once nothing else is left to do at this instant (see `World.settled`)."""
        self._last.append(asyncio.Handle(callback, args, self, copy_context()))

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: Any) -> None:  # type: ignore[override]
        """Let `signal` call this for the node whose code this is."""
        context = copy_context()
        self._signals[NODE.get(), sig] = lambda: self.call_soon(callback, *args, context=context)

    def remove_signal_handler(self, sig: int) -> bool:
        """Let `signal` call nothing; return whether there was something."""
        return self._signals.pop((NODE.get(), sig), None) is not None

    def signal(self, node: Node, number: int) -> None:
        """Send a signal to a node's process.

        Raises:
            LookupError: it does not handle this one.
        """
        self._signals[node, number]()

    def close(self) -> None:
        """End the simulation: tasks that are left are destroyed without a sound."""
        if not self.is_closed():
            left = [task for task in self._tasks if not task.done()]
            super().close()
            with unheard(), _running(self):
                for task in left:
                    _bury(task)
            self._tasks.clear()
            self._held.clear()
            self._kept.clear()

    def cancel_all(self) -> None:
        """Kill all nodes; cancel the tasks of none, and wait for those that do not wait for a node's."""
        for node in dict.fromkeys(self._tasks.values()):
            if node is not None:
                node.is_dead = True
        self._num_at_once, self._refused, self._torn = 0, None, None
        tasks = [task for task, node in self._tasks.items() if node is None and not task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            with contextlib.suppress(VirtualLoopError, StuckError):
                self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    def _refusal(self, name: str) -> Callable[..., Never]:
        def refuse(*_: Any, **__: Any) -> Never:
            raise self.refuse(
                f"the program calls {name} of its event loop, and nothing outside of the process exists in virtual time; "
                "expected the memory network (discovery backend 'memory')"
            )

        return refuse

    def refuse(self, message: str) -> OutsideError:
        """Return an error to raise for what is not in virtual time; a strict simulation ends with it."""
        self._refused = OutsideError(message)
        return self._refused

    def tear(self, error: BaseException) -> BaseException:
        """Return an error to raise in what runs now; it ends the simulation after this callback, whoever catches it."""
        self._torn = error
        return error

    def _run_once(self) -> None:
        """Run what is ready, after a jump to the next timer if nothing is."""
        if self._refused is not None and self._is_strict:
            raise self._refused
        self._release()
        self._drop_cancelled()
        ready, scheduled = self._ready, self._scheduled
        if not ready and not self._stopping:
            if self._last and not (scheduled and scheduled[0].when() <= self._now):
                ready.append(self._last.popleft())
            else:
                self._jump()
        while scheduled and scheduled[0].when() <= self._now:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            ready.append(handle)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                self._run(handle)

    def _run(self, handle: Any) -> None:
        """Run a callback, unless its node is paused or dead."""
        node = handle._context.get(NODE)
        if node is not None and node.is_dead:
            self._kept.append(handle)
            return
        if node is not None and node.is_paused:
            self._held.setdefault(node, []).append(handle)
            return
        self._num_run += 1
        self._num_at_once += 1
        if self._num_at_once > self._max_at_once:
            self._ready.appendleft(handle)
            raise LivelockError(
                f"{self._max_at_once} callbacks have run at {self._now:.6f} s, and time does not pass; the next is "
                f"{described(handle._callback)}"
            )
        if self._num_run % COLLECT_EVERY == 0:
            gc.collect()
        handle._run()
        if self._torn is not None:  # the callback has caught it
            torn, self._torn = self._torn, None
            raise torn

    def _jump(self) -> None:
        """Let time pass until the next timer."""
        if not self._scheduled:
            raise DeadlockError(f"nothing is scheduled at {self._now:.6f} s, so these wait forever: {self._waiting()}")
        when = self._scheduled[0].when()
        if when > self._end_s:
            raise TooLongError(
                f"{self._end_s - START_S:g} s of virtual time have passed; these wait: {self._waiting()}"
            )
        if when > self._now:
            self._now = when
            self._num_at_once = 0

    def _release(self) -> None:
        """Let the callbacks of nodes that are not paused any more run."""
        for node in [node for node in self._held if not node.is_paused]:
            self._ready.extend(self._held.pop(node))

    def _drop_cancelled(self) -> None:
        """Forget cancelled timers: the next ones, and all of them once they are most."""
        scheduled = self._scheduled
        if self._timer_cancelled_count > 100 and 2 * self._timer_cancelled_count > len(scheduled):
            for handle in scheduled:
                handle._scheduled = not handle.cancelled()
            scheduled[:] = [handle for handle in scheduled if not handle.cancelled()]
            heapq.heapify(scheduled)
            self._timer_cancelled_count = 0
        while scheduled and scheduled[0].cancelled():
            self._timer_cancelled_count -= 1
            heapq.heappop(scheduled)._scheduled = False

    def _waiting(self) -> str:
        """Return the tasks that are not done, with the node and the line where each waits."""
        lines = []
        for task, node in self._tasks.items():
            if not task.done() and (node is None or not node.is_dead):
                whose = "" if node is None else f"{node.name}{' (paused)' if node.is_paused else ''}: "
                lines.append(whose + place_of(task))
        return "; ".join(lines[:20]) + (f"; and {len(lines) - 20} more" if len(lines) > 20 else "")

    def _write_to_self(self) -> None:
        """Nothing waits for file descriptors, so nothing must be woken."""

    def _process_events(self, event_list: Any) -> None:
        """There are none."""

    def _asyncgen_firstiter_hook(self, agen: Any) -> None:
        super()._asyncgen_firstiter_hook(agen)  # type: ignore[misc]
        self._generators[id(agen)] = copy_context()

    def _asyncgen_finalizer_hook(self, agen: Any) -> None:
        """Close a generator that nobody refers to any more, as its node; keep that of a dead one."""
        context = self._generators.pop(id(agen), None) or copy_context()
        node = context.get(NODE)
        if node is not None and node.is_dead:
            self._kept.append(agen)
        elif not self.is_closed():
            self.call_soon(lambda: self.create_task(agen.aclose()), context=context)


def run(
    main: Coroutine[Any, Any, Result],
    *,
    max_s: float = math.inf,
    max_at_once: int = 1_000_000,
    is_strict: bool = False,
) -> Result:
    """Run a coroutine on a virtual loop, and return its result; what is left at its end, is ended.

    The coroutine belongs to no node. At its end all nodes die; tasks of no node are cancelled.

    Args:
        main: the coroutine.
        max_s: the most virtual time that may pass (s).
        max_at_once: the most callbacks that may run without time passing.
        is_strict: whether it ends when a program wants something from outside, also if the program does not mind.

    Raises:
        VirtualLoopError: everything waits for good, spins, takes too long, or wants something from outside.
        StuckError: a callback computes without end.
    """
    loop = VirtualLoop(max_s=max_s, max_at_once=max_at_once, is_strict=is_strict)
    was_collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    gc.freeze()
    try:
        with watched(loop.time, loop.tear):
            return loop.run_until_complete(main)
    finally:
        try:
            loop.cancel_all()
        finally:
            loop.close()
            gc.unfreeze()
            with warnings.catch_warnings():  # of coroutines that the dead began and never awaited
                warnings.simplefilter("ignore")
                gc.collect()
            if was_collecting:
                gc.enable()


def _bury(task: asyncio.Task[Any]) -> None:
    """Destroy a task. Its `finally` blocks run, without a loop, and whatever they do wrong is ignored."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    coroutine = task.get_coro()
    assert inspect.iscoroutine(coroutine)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(MAX_CLOSINGS):
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED:
                break
            with contextlib.suppress(BaseException):
                coroutine.close()


@contextlib.contextmanager
def _running(loop: VirtualLoop) -> Iterator[None]:
    """Let code find its loop, so that it hands over what it begins, and nothing is begun that nobody ends."""
    before = asyncio._get_running_loop()
    asyncio._set_running_loop(loop)
    try:
        yield
    finally:
        asyncio._set_running_loop(before)


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Log nothing."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
