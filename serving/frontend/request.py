"""From an HTTP request to the form for its model's engines: read the body, find the model, turn text into tokens."""

import asyncio
import contextlib
import re
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request

from foundation.text import one_line
from serving.frontend.api.errors import ApiError
from serving.frontend.api.kinds import KINDS, AnyRequest, KindName
from serving.frontend.api.long_prompt import cut_prompt
from serving.frontend.config import FrontendConfig
from serving.frontend.http.body import BodyBudget, Share, read_body
from serving.frontend.metrics import FrontendMetrics
from serving.frontend.prepared import Preprocessed
from serving.frontend.preparing.messages import Body, Elsewhere
from serving.frontend.preprocess import is_quick, preprocess
from serving.frontend.reading import OWN, Reading
from serving.frontend.served_model import SHOWN_CHARACTERS, ServedModel
from serving.model.card import ModelType

Result = TypeVar("Result")

INLINE_BYTES = 128 * 1024
"""Larger bodies are parsed by a preparer; parsing this much takes a millisecond."""

Complete = Callable[[Body, Callable[[int], None]], Body]
"""Adds to a body what it refers to; before that, it calls what it is given with the number of bytes to be added."""

GUESS_BYTES = 4096
MODEL = re.compile(rb'"model"\s*:\s*"([^"\\]{1,512})"')
STREAM = re.compile(rb'"stream"\s*:\s*true')


class KnownModels(Protocol):
    """The models that are served, or may be soon."""

    def get(self, name: str) -> ServedModel | None:
        """Return a model by its name."""
        ...

    def all(self) -> list[ServedModel]:
        """Return every model."""
        ...

    def adapters_of(self, model: ServedModel) -> list[ServedModel]:
        """Return a model with each of its LoRA adapters."""
        ...

    def is_expected(self, name: str) -> bool:
        """Return whether a model that is not served now may be soon."""
        ...

    def absence(self, name: str) -> str:
        """Return why an expected model cannot answer."""
        ...

    def absences(self) -> list[str]:
        """Return why models that have workers cannot answer, for each that cannot."""
        ...


class RequestReader:
    """Reads requests: quick ones at once, the others with their model's preparer."""

    def __init__(
        self, models: KnownModels, config: FrontendConfig, metrics: FrontendMetrics, reading: Reading = OWN
    ) -> None:
        self._models = models
        self._reading = reading
        self._metrics = metrics
        self._max_bytes = config.max_body_mb << 20
        self._bodies = BodyBudget(config.max_buffered_mb << 20)

    async def read(
        self, request: Request, kind: KindName, complete: Complete | None = None
    ) -> tuple[ServedModel, Preprocessed]:
        """Return a request's model, and the preprocessed request.

        Args:
            request: the request.
            kind: its kind.
            complete: adds to its body what it refers to.

        Raises:
            ApiError: it cannot be served.
            ClientDisconnect: its client has hung up.
        """
        with self._bodies.share() as share:
            body: Body = await read_body(request, share, self._max_bytes)
            if complete is not None:
                body = complete(body, partial(self._admit, share, len(body)))
            if len(body) > INLINE_BYTES:
                name = guess_model(body)
                known = self._models.get(name)
                guessed = (known, name) if known is not None else (self._any(), None)
                return await self._prepare(request, kind, body, *guessed)
            parsed, rest = self._parse(body, kind)
            model = self.find(parsed.model)
            if not is_quick(parsed, model.text):
                return await self._prepare(request, kind, body, model, parsed.model)
            try:
                return model, preprocess(
                    parsed, rest if model.card.model_type is ModelType.Backend else body, model.text
                )
            except ApiError:
                self._count_error(kind, body, model)
                raise

    def _parse(self, body: Body, kind: KindName) -> tuple[AnyRequest, Body]:
        """Return the request that a body is, and what remains to be checked of the body.

        Raises:
            ApiError: it is none.
        """
        if kind == "completion" and (cut := cut_prompt(body)) is not None:
            with contextlib.suppress(ApiError):  # which the whole body explains better
                parsed = self._reading.parse(cut.rest, kind)
                if cut.put_back(parsed):
                    return parsed, cut.rest
        return self._reading.parse(body, kind), body

    async def body_of(self, request: Request) -> bytearray:
        """Return the body of a request that is read again after a change: it has the same limits.

        Raises:
            ApiError: it is too large or too slow, or there is no room for it.
        """
        with self._bodies.share() as share:
            return await read_body(request, share, self._max_bytes)

    def find(self, name: str | None) -> ServedModel:
        """Return a model by its name; without a name, the only model.

        Raises:
            ApiError: there is no such model, or it is not available now.
        """
        if name is None:
            return self._only()
        model = self._models.get(name)
        if model is not None:
            return model
        if self._models.is_expected(name):
            raise ApiError(503, self._models.absence(name), param="model")
        message = f"model {one_line(name, SHOWN_CHARACTERS)!r} is not served here; served: {self._served()}"
        raise ApiError(404, message, code="model_not_found", param="model")

    def _admit(self, share: Share, num_bytes: int, num_more: int) -> None:
        """Hold what is added to a body against the same limits as the body.

        Raises:
            ApiError: it is too much.
        """
        if num_bytes + num_more > self._max_bytes:
            limit = f"{self._max_bytes >> 20} MiB (--max-body-mb)"
            message = f"previous_response_id: with the conversation that it continues, the request is over {limit}"
            raise ApiError(413, message, code="request_too_large", param="previous_response_id")
        share.grow(num_bytes + num_more)

    async def _prepare(
        self, request: Request, kind: KindName, body: Body, model: ServedModel, name: str | None
    ) -> tuple[ServedModel, Preprocessed]:
        """Have a request prepared for a model with this name; if it is for another, by that model's preparer."""
        while True:
            is_only = len(self._models.all()) == 1
            try:
                outcome = await unless_gone(request, model.preparer.prepare(kind, body, name=name, is_only=is_only))
            except ApiError:
                self._count_error(kind, body, model)
                raise
            if not isinstance(outcome, Elsewhere):
                return model, outcome
            name = outcome.model
            model = self.find(name)

    def _count_error(self, kind: KindName, body: Body, model: ServedModel) -> None:
        if endpoint := KINDS[kind].endpoint:
            type = "stream" if _at_ends(STREAM, body) else "unary"
            self._metrics.of(model.card.name).count("requests", endpoint, type, "error")

    def _any(self) -> ServedModel:
        for model in self._models.all():
            return model
        raise ApiError(503, "; ".join(self._models.absences()) or "no model is served at the moment; retry later")

    def _only(self) -> ServedModel:
        model = self._any()
        if len(self._models.all()) > 1:
            raise ApiError(400, f"name a model; served: {self._served()}", param="model")
        return model

    def _served(self) -> str:
        models = self._models.all()
        names = [model.card.name for model in models]
        names += [
            one.adapter.name for model in models for one in self._models.adapters_of(model) if one.adapter is not None
        ]
        return ", ".join(map(repr, names)) or "none"


def guess_model(body: Body) -> str:
    """Return the model that a body seems to ask for; only parsing would be sure."""
    match = _at_ends(MODEL, body)
    return match[1].decode(errors="replace") if match else ""


def _at_ends(pattern: re.Pattern[bytes], body: Body) -> re.Match[bytes] | None:
    """Look for a pattern at a body's start and end, where small fields usually are."""
    return pattern.search(body, 0, GUESS_BYTES) or pattern.search(body, max(len(body) - GUESS_BYTES, 0))


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Wait for work, unless the client hangs up before it is done; the request's body has been read."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
