"""What an endpoint is asked before it is measured: its models, and in which form it takes prompts."""

import asyncio
import re
import secrets
from dataclasses import replace
from typing import NamedTuple

import aiohttp
import uvloop

from dynabench.apis import Prompts, Way, endpoint_of
from dynabench.arm import ClientConfig
from dynabench.live.bodies import MeasuredServer
from dynabench.live.clients import Order, send_all
from dynabench.live.models import ReportedModel, reported_models
from dynabench.live.run import server_at
from dynabench.live.tls import check_reachable
from foundation.errors import UserError
from foundation.text import listed
from reports.record.records import Requests
from serving.runtime.config import masked
from workloads import Workload
from workloads.pacing import LoadConfig
from workloads.workload import select

MAX_OFF = 0.05
"""How far the length of prompts may be from what was asked for before it is said, as a share."""
PROBES = 3
"""Requests before the first load, one after the other: the last ones say how long one takes alone."""
ROUNDS = 3
"""How often a form of prompts is asked so, until two requests were answered."""
REFUSED = re.compile("HTTP 4(?!08|29)|timeout")
"""Errors that asking again does not mend."""
FORMS: tuple[Prompts, ...] = ("tokens", "text", "chat")
"""Forms of prompts that are tried if none is asked for, the most exact first."""


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
        return masked(endpoint_of(self.url).base).partition("://")[2]


def find(url: str, models: tuple[str, ...], client: ClientConfig, workload: Workload) -> list[Endpoint]:
    """Return the models to measure at an endpoint, each asked a few times.

    Raises:
        UserError: nobody answers there, it has none or several models, or it refuses requests.
    """
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
        why = str(error) or "no answer"
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
    is_open = client.prompts is None and client.way.api is None
    ways = [replace(client, prompts=form) for form in FORMS] if is_open else [client]
    refusals = []
    first = select(workload.requests, range(min(PROBES, len(workload))))
    few = Workload(workload.name, workload.block_size, first.replace(delay_s=[0.0] * len(first)))
    for asked in ways:
        requests = await _probed(few, server_at(url, model.id, asked), client.timeout_s)
        answered, errors = requests[requests.succeeded], [*filter(None, requests.error)]
        if len(answered):
            took = answered.done_s - answered.sent_s
            said = f"{masked(url)}, model {model.id}" + f" ({model.owned_by})" * bool(model.owned_by)
            said += f", {_named(asked.way)}{_other_lengths(answered)}"
            if errors:
                said += (
                    f"; {len(errors)} of {len(requests)} requests failed before the first load, one with: {errors[0]}"
                )
            return Endpoint(url, model.id, asked, said, float(took[-2:].mean()))
        refusals.append(f"{_named(asked.way)}: {errors[0]}")
    raise UserError(
        f"{masked(url)} does not answer {model.id} in any form of prompts that was tried. {'; '.join(refusals)}"
    )


async def _probed(few: Workload, server: MeasuredServer, timeout_s: float) -> Requests:
    """Send a few requests, again if they failed in a way that may pass."""
    rounds: list[Requests] = []
    while len(rounds) < ROUNDS:
        order = Order(few, server, LoadConfig(concurrency=1), secrets.token_hex(8), timeout_s)
        rounds.append((await send_all(order, num_clients=1, stop=asyncio.Event())).requests)
        num_answered = sum(int(requests.succeeded.sum()) for requests in rounds)
        if num_answered >= min(2, len(few)) or any(map(REFUSED.match, rounds[-1].error)):
            break
    return Requests.concatenate(rounds)


def _named(way: Way) -> str:
    """Say what is sent."""
    what = "prompts as token ids" if way.prompts == "tokens" else "prompts as text"
    return f"{what} to {way.api}" if way.api else what


def _other_lengths(requests: Requests) -> str:
    """Say how many tokens prompts and answers have, if that is another number than asked for."""
    found = []
    for what, counted, planned in (
        ("prompts", requests.isl, requests.planned_isl),
        ("answers", requests.osl, requests.planned_osl),
    ):
        mean, wanted = float(counted.mean()), float(planned.mean())
        if mean and abs(mean - wanted) > MAX_OFF * wanted:
            found.append(f"{what} have {mean:.0f} tokens, not {wanted:.0f}")
    return f" ({', '.join(found)}, as the server counts them)" if found else ""
