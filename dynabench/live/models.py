"""What an endpoint reports about its models."""

from typing import Annotated

import aiohttp
import msgspec
from msgspec import Meta

from dynabench.live.bodies import MeasuredServer

PATIENCE_S = 10.0
MAX_BYTES = 1 << 20


class ReportedModel(msgspec.Struct):
    """A model of an endpoint; vLLM and SGLang report its context length."""

    id: str = ""
    owned_by: str = ""
    """Such as vllm, sglang or the name of a company."""
    max_model_len: Annotated[int, Meta(ge=1)] | None = None


class ReportedModels(msgspec.Struct):
    """The answer to GET /v1/models."""

    data: list[ReportedModel] = []


async def reported_context(target: MeasuredServer) -> int | None:
    """Return the most tokens that the measured model supports in a request, None if the endpoint does not say."""
    try:
        models = await reported_models(target)
    except (aiohttp.ClientError, OSError, ValueError):
        return None
    return next((model.max_model_len for model in models if model.id == target.model), None)


async def reported_models(target: MeasuredServer) -> list[ReportedModel]:
    """Return the models that the endpoint lists.

    Raises:
        aiohttp.ClientError, OSError, ValueError: it does not answer, or not with a list of models.
    """
    return msgspec.json.decode(await _listed(target), type=ReportedModels).data


async def _listed(target: MeasuredServer) -> bytes:
    """Return the list of models, within a size and time limit."""
    tls = target.tls
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as session,
        session.get(
            f"{target.url}/v1/models",
            headers=target.headers,
            ssl=True if tls is None else tls,
            proxy=target.proxy,
            allow_redirects=False,  # another server must not see the headers
        ) as response,
    ):
        if response.status != 200:
            raise ValueError(f"HTTP {response.status}")
        return await body_of(response, MAX_BYTES)


async def body_of(response: aiohttp.ClientResponse, most: int) -> bytes:
    """Return the body of a response, or nothing if it is longer than the limit."""
    body = b""
    async for part in response.content.iter_any():
        body += part
        if len(body) > most:
            return b""
    return body
