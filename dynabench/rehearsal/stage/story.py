"""What happened in a rehearsal, as its picture shows it: which programs ran when, and which requests they had."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dynabench.rehearsal.clients.client import Answer
from serving.runtime.messages import End
from serving.runtime.server import AnswerStream, Audience


@dataclass(slots=True)
class Stretch:
    """Something that lasts; times are those of the loop (s)."""

    what: str
    """A program that runs, the id of a request that is at one, or the label of a fault."""
    where: tuple[str, ...]
    """The programs."""
    began_s: float
    ended_s: float | None = None
    """None: it has not ended."""

    def end(self, at_s: float) -> None:
        """It ends, unless it has ended."""
        if self.ended_s is None:
            self.ended_s = at_s


@dataclass(slots=True)
class Story:
    """See the module."""

    began_s: float = 0.0
    """When requests could be sent, by the loop's clock (s)."""
    checked_s: float = 0.0
    """When it was checked that everything is at rest, or what goes on was given up (s)."""
    lives: list[Stretch] = field(default_factory=list)
    """Of programs, each from a start to an end."""
    stays: list[Stretch] = field(default_factory=list)
    """Of requests at workers."""
    troubles: list[Stretch] = field(default_factory=list)
    """Faults that happened."""
    answers: list[Answer] = field(default_factory=list)

    @contextlib.contextmanager
    def to_its_end(self) -> Iterator[None]:
        """Note the time if what goes on is given up."""
        try:
            yield
        finally:
            self.checked_s = self.checked_s or asyncio.get_running_loop().time()

    def live(self, name: str) -> Stretch:
        """A program starts; return its life."""
        return _begun(self.lives, name, name)

    def trouble(self, label: str, *programs: str) -> Stretch:
        """A fault begins; return it."""
        return _begun(self.troubles, label, *programs)

    def stay(self, request: str, program: str) -> Stretch:
        """A request arrives at a worker; return its stay."""
        return _begun(self.stays, request, program)


def _begun(stretches: list[Stretch], what: str, *where: str) -> Stretch:
    stretches.append(Stretch(what, where, _now()))
    return stretches[-1]


class NotedService:
    """A worker's service; what it serves is noted."""

    def __init__(self, service: Any, name: str, story: Story) -> None:
        """Wrap the service of a worker."""
        self._service, self._name, self._story = service, name, story
        self.here = set[str]()
        """The requests that it has."""

    def __getattr__(self, name: str) -> Any:
        """Return what the service has."""
        return getattr(self._service, name)

    def __call__(self, request: msgspec.Raw, stream: AnswerStream) -> None:
        """Serve a request."""
        asked = _ASKED.decode(request)
        id = asked.request_id or asked.user
        stay = self._story.stay(id, self._name)
        self.here.add(id)

        def end() -> None:
            stay.end(_now())
            self.here.discard(id)

        stream._audience = _Hearing(stream._audience, end)
        self._service(request, stream)
        if (cancel := stream.on_cancel) is not None:

            def leave() -> None:
                end()
                cancel()

            stream.on_cancel = leave


class _Asked(msgspec.Struct):
    """What is noted of a request."""

    request_id: str = ""
    user: str = ""
    """Of a whole chat request, which has no id: what its client calls itself."""


_ASKED = msgspec.msgpack.Decoder(_Asked)


class _Hearing(Audience):
    """Passes an answer on, and notes its end."""

    def __init__(self, audience: Audience, on_end: Callable[[], None]) -> None:
        self._audience, self._on_end = audience, on_end

    @property
    def is_full(self) -> bool:
        return self._audience.is_full

    def push(self, id: int, item: Any) -> None:
        self._audience.push(id, item)

    def finish(self, id: int, end: End) -> None:
        self._on_end()
        self._audience.finish(id, end)


def _now() -> float:
    return asyncio.get_running_loop().time()
