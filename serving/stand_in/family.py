"""What is particular to the server that a stand-in stands in for: how it reads, answers, counts and tells of KV.

The engine, the socket in front of it, replicas and faults are the same for all.
"""

from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager
from pkgutil import resolve_name
from typing import Protocol

from starlette.types import ASGIApp

from serving.engines.mock.engine import Mocker
from serving.engines.mock.events import EventSink
from serving.frontend.answering import Answering
from serving.frontend.reading import ReadingElsewhere
from serving.stand_in.config import StandInConfig
from serving.stand_in.faults.state import Faults
from serving.stand_in.local import LocalCalls
from serving.stand_in.served import OneModel

FAMILIES = {"vllm": "serving.stand_in.vllm.family:Vllm"}


class FamilyServer(Protocol):
    """What answers for an engine; it is made before the engine runs."""

    app: ASGIApp

    @property
    def engine(self) -> Mocker:
        """The engine behind it."""
        ...

    @property
    def answering(self) -> Answering:
        """What requests for the engine are answered with."""
        ...

    def follow(self) -> None:
        """Follow the engine, which runs now."""
        ...

    def close(self) -> None:
        """Follow it no longer."""
        ...


class Family(Protocol):
    """See the module."""

    answers: Collection[str]
    """Paths whose POST requests are for the engine."""

    def reading(self, config: StandInConfig) -> ReadingElsewhere:
        """Return how requests are read."""
        ...

    def sinks(self, config: StandInConfig, faults: Faults | None) -> AbstractAsyncContextManager[Sequence[EventSink]]:
        """Publish the KV events of every rank that runs here, if they are wanted; yield a sink for each.

        Raises:
            PortError: an address cannot be used.
        """
        ...

    def server(self, config: StandInConfig, engine: Mocker, models: OneModel, calls: LocalCalls) -> FamilyServer:
        """Build what answers.

        Raises:
            ValueError: an adapter that is served from the start cannot be loaded.
        """
        ...


def family_of(config: StandInConfig) -> Family:
    """Return what is particular to the server that a stand-in stands in for."""
    made: Family = resolve_name(FAMILIES[config.family])()
    return made
