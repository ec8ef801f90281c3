"""What an endpoint is asked before it is measured: its models, and in which form it takes prompts."""

import asyncio
from dataclasses import replace
from typing import Literal, NamedTuple

import aiohttp
import uvloop

from dynabench.arm import ClientConfig
from dynabench.live.clients import Order, send_all
from dynabench.live.models import ReportedModel, reported_models
from dynabench.live.run import server_at
from dynabench.live.tls import check_reachable
from foundation.errors import UserError
from foundation.text import listed
from serving.runtime.config import masked
from workloads import Workload
from workloads.pacing import LoadConfig
from workloads.workload import select

PROBES = 3
"""Requests before the first load, one after the other: the last ones say how long one takes alone."""
Form = Literal["tokens", "text", "chat"]
FORMS: dict[Form, str] = {"tokens": "token ids", "text": "text", "chat": "chats"}
"""Forms of prompts, the most exact first."""


class Endpoint(NamedTuple):
    """A model at an endpoint."""

    url: str
    model: str
    client: ClientConfig
    """How it is asked, in a form of prompts that it takes."""
    said: str
    """What it says of itself."""
    e2e_s: float
    """How long a request takes alone (s)."""

    @property
    def name(self) -> str:
        """Its host and port, and the path if it has one."""
        return masked(self.url).partition("://")[2].rstrip("/").removesuffix("/v1")


def find(url: str, models: tuple[str, ...], client: ClientConfig, workload: Workload) -> list[Endpoint]:
    """Return the models to measure at an endpoint, each asked a few times.

    Raises:
        UserError: nobody answers there, it has none or several models, or it refuses requests.
    """
    client = replace(client, url=url)
    check_reachable(url, client)
    return uvloop.run(_find(url, models, client, workload))


async def _find(url: str, models: tuple[str, ...], client: ClientConfig, workload: Workload) -> list[Endpoint]:
    known = await _listed(url, models, client)
    return [await _asked(url, model, client, workload) for model in known]


async def _listed(url: str, models: tuple[str, ...], client: ClientConfig) -> list[ReportedModel]:
    """Return the models that are wanted, or the only one that the endpoint lists."""
    shown = masked(url)
    try:
        found = [model for model in await reported_models(server_at(url, "", client)) if model.id]
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
        if models:  # it may serve them without a list
            return [ReportedModel(model) for model in models]
        why = f"HTTP {error.status}" if isinstance(error, aiohttp.ClientResponseError) else str(error) or "no answer"
        raise UserError(f"{shown}/v1/models does not list models ({why}); name the model with --model") from error
    names = [model.id for model in found]
    if not models:
        if len(found) == 1:
            return found
        have = f"{len(names)} models ({listed(names[:5])}{', ...' * (len(names) > 5)})" if names else "no models"
        raise UserError(f"{shown} lists {have}; choose with --model")
    if missing := [model for model in models if model not in names]:
        raise UserError(f"{shown} does not list {missing[0]}; it lists {listed(names) or 'no models'}")
    return [model for model in found if model.id in models]


async def _asked(url: str, model: ReportedModel, client: ClientConfig, workload: Workload) -> Endpoint:
    """Ask a model a few times, in the first form of prompts that it takes."""
    forms: tuple[Form, ...] = tuple(FORMS) if client.prompts == "tokens" else (client.prompts,)
    refusals = []
    few = Workload(
        workload.name, workload.block_size, select(workload.requests, list(range(min(PROBES, len(workload)))))
    )
    for form in forms:
        asked = replace(client, prompts=form)
        order = Order(few, server_at(url, model.id, asked), LoadConfig(concurrency=1), form, client.timeout_s)
        requests = (await send_all(order, num_clients=1, stop=asyncio.Event())).requests
        if not any(requests.error):
            took = requests.last_token_s - requests.sent_s
            said = f"{masked(url)}, model {model.id}" + f" ({model.owned_by})" * bool(model.owned_by)
            said += f", prompts as {FORMS[form]}"
            return Endpoint(url, model.id, asked, said, float(took[-2:].mean()))
        refusals.append(f"{FORMS[form]}: {next(filter(None, requests.error))}")
    raise UserError(
        f"{masked(url)} does not answer {model.id} in any form of prompts that was tried. {'; '.join(refusals)}"
    )
