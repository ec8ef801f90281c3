"""From an HTTP request to what its model's engines are sent: its body read, its model found, its text turned into tokens."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from serving.frontend import openai
from serving.frontend.body import BodyBudget, read
from serving.frontend.config import FrontendConfig
from serving.frontend.models import Models, ServedModel
from serving.frontend.openai import ApiError
from serving.frontend.preparer import KINDS, Body, Elsewhere, Kind, guess_model
from serving.frontend.preprocess import Taken, is_quick, take

Result = TypeVar("Result")

INLINE_BYTES = 128 * 1024
"""Larger bodies are parsed by a preparer; this much takes a millisecond."""

SHOWN_CHARACTERS = 128
"""Characters of a requested name that errors show."""


class Intake:
    """Takes requests in."""

    def __init__(self, models: Models, config: FrontendConfig) -> None:
        self._models = models
        self._max_bytes = config.max_body_mb << 20
        self._bodies = BodyBudget(config.max_buffered_mb << 20)

    async def take(self, request: Request, kind: Kind) -> tuple[ServedModel, Taken]:
        """Return a request's model, and what was made of it.

        Raises:
            ApiError: it cannot be served.
            ClientDisconnect: its client has hung up.
        """
        with self._bodies.share() as share:
            body = await read(request, share, self._max_bytes)
            return await self._prepare(kind, body, request)

    def find(self, name: str | None) -> ServedModel:
        """Return a model by its name; without one, the only one.

        Raises:
            ApiError: there is no such model, or not at the moment.
        """
        if name is None:
            return self._only()
        model = self._models.get(name)
        if model is not None:
            return model
        shown = name if len(name) <= SHOWN_CHARACTERS else name[:SHOWN_CHARACTERS] + "..."
        if self._models.is_expected(name):
            raise ApiError(503, f"no instance serves model {shown!r} at the moment; retry later", param="model")
        message = f"model {shown!r} is not served here; served: {self._served()}"
        raise ApiError(404, message, code="model_not_found", param="model")

    async def _prepare(self, kind: Kind, body: Body, request: Request) -> tuple[ServedModel, Taken]:
        """Prepare a request at once if that is quick, else in its model's preparer."""
        if len(body) <= INLINE_BYTES:
            asked = openai.parse(body, KINDS[kind])
            model = self.find(asked.model)
            if is_quick(asked, model.text):
                return model, take(asked, body, model.text)
        else:
            model = self._models.get(guess_model(body)) or self._any()
        while True:
            is_only = len(self._models.all()) == 1
            taken = await _unless_gone(request, model.preparer.prepare(kind, body, is_only=is_only))
            if not isinstance(taken, Elsewhere):
                return model, taken
            model = self.find(taken.model)

    def _any(self) -> ServedModel:
        for model in self._models.all():
            return model
        raise ApiError(503, "no model is served at the moment; retry later")

    def _only(self) -> ServedModel:
        model = self._any()
        if len(self._models.all()) > 1:
            raise ApiError(400, f"name a model; served: {self._served()}", param="model")
        return model

    def _served(self) -> str:
        return ", ".join(repr(model.card.name) for model in self._models.all()) or "none"


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Wait for work, unless the client hangs up before it is done; its body has been read."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
