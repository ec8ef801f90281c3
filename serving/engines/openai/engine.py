"""An OpenAI server, typically `vllm serve`, as a worker: aggregated, or with `kv_transfer_params` as prefill or decode worker.

Prompts go to `/v1/completions` as token ids. vLLM answers with token ids because we ask for them (`return_token_ids`); if a
server does not, its text is passed on. Answers are streamed, except when a prompt is only prefilled: vLLM's streams do not
say where the KV is. Each request has its own connection; closing it aborts the request.

We do not start the server, and when it stops answering, this worker ends.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import Any

import aiohttp
import msgspec
from aiohttp.http_exceptions import HttpProcessingError

from foundation.text import one_line
from serving.engines.guided import guide
from serving.engines.openai.answers import (
    MAX_BYTES,
    Problem,
    ServerAnswer,
    ServerChoice,
    ServerModel,
    ServerModels,
    ServerUsage,
    body,
    decode_answer,
    events,
    failure,
    log_probabilities,
)
from serving.engines.openai.url import KEY, root
from serving.engines.vllm.roles import connector_params, hand_off, prompt_only
from serving.life.lease import LeaseConfig
from serving.model.constraints import CONSTRAINTS
from serving.model.files import ModelFiles
from serving.model.tokenizer import Tokenizer, load_tokenizer
from serving.runtime.messages import CallError
from serving.runtime.server import GeneratorService
from serving.runtime.threads import in_thread
from serving.worker.config import ModelRunConfig, WorkerConfig, refuse_nodes, required_model
from serving.worker.engine import EngineCall, EngineError, EngineLoad, EngineTraits
from serving.worker.kv_events import KvEventPublisher
from serving.worker.protocol import end_tokens, engine_id, finish_reason, sampling
from serving.worker.protocol import log_probabilities as of_places

log = logging.getLogger(__name__)

CONNECT_S = 10.0
CHECK_S = 2.0
CHECK_TIMEOUT_S = 10.0
MAX_FAILURES = 3
"""After this many consecutive checks without an answer, a server counts as gone."""

LAST_S = 2.0
"""How long to wait for what follows the end of an answer, and for the reason of a failure."""

TOKEN_BYTES = 16
PLACE_BYTES = 256
"""Most bytes in an answer for one token of the prompt, or for one likely token in its place."""


class OpenAiServer:
    """See `serving.worker.engine.Engine`."""

    def __init__(
        self,
        url: str,
        worker: WorkerConfig,
        run: ModelRunConfig,
        arguments: dict[str, Any],
        *,
        lease: LeaseConfig = LeaseConfig(),  # noqa: B008 (frozen)
    ) -> None:
        """Prepare to use a server.

        Args:
            url: where it is.
            worker: what is served, and which part of each request.
            run: its KV block size, and more fields of each request.
            arguments: the same.
            lease: how long its KV connector is configured to keep KV.

        Raises:
            ValueError: a setting has no meaning for a server.
        """
        self._root = root(url)
        refuse_nodes(url, run, "set it on the server")
        if not lease.kv_lease_renewal:
            raise ValueError(f"out={url} has no use for --no-kv-lease-renewal: set it on the server")
        self._lease_s = lease.kv_lease_duration_s
        required_model(worker, url)
        self._role = worker.role
        self._names = (worker.model_name, worker.model_path)
        self._more = run.extra() | arguments
        self.calls = (EngineCall(f"POST {self._root}/v1/completions", self._more),)
        self.traits = EngineTraits(block_size=run.kv_cache_block_size or EngineTraits.block_size)
        self.service = GeneratorService(self.generate)
        self._open = contextlib.AsyncExitStack()
        self._session: aiohttp.ClientSession
        self._files: ModelFiles
        self._tokenizer: Tokenizer | None = None
        self._model: ServerModel

    async def start(self, files: ModelFiles) -> None:
        """See `Engine`."""
        self._files = files
        key = os.environ.get(KEY)
        session = aiohttp.ClientSession(
            # No connection is reused, so the server cannot close one just as a request is sent.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {}),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        self._session = await self._open.enter_async_context(session)
        try:
            with self._naming_the_server():
                self._model = self._choose(await self._models())
        except CallError as error:
            raise EngineError(f"{error}; expected an OpenAI server there") from error
        self.traits = EngineTraits(
            block_size=self.traits.block_size,
            context_length=self._model.max_model_len or None,
            # Others ignore vLLM's field instead of refusing it.
            guided_decoding=CONSTRAINTS if self._model.owned_by == "vllm" else (),
        )

    def publish_to(self, publishers: Sequence[KvEventPublisher]) -> None:
        """See `Engine`; the server reports no KV events here."""

    async def generate(self, request: dict[str, Any]) -> AsyncIterator[Any]:
        """Answer a request in token ids; leaving early closes the connection, which aborts the request."""
        if self._session.closed:
            raise CallError(f"{self._root} is gone", "draining")
        with self._naming_the_server():
            if self._role == "prefill":
                yield self._prefilled(await self._whole(request))
            elif request["sampling_options"].get("prompt_logprobs") is not None:
                answer = await self._whole(request)
                yield _counted(await self._item(request, answer.choices[0]), answer.usage)
            else:
                async with contextlib.aclosing(self._stream(request)) as items:
                    async for item in items:
                        yield item

    def load(self, rank: int) -> EngineLoad:
        """See `Engine`."""
        return EngineLoad(num_running=self.service.num_running)

    async def failed(self) -> None:
        """See `Engine`."""
        num_failures, problem = 0, ""
        while num_failures < MAX_FAILURES:
            await asyncio.sleep(CHECK_S)
            problem = await self._problem()
            num_failures = num_failures + 1 if problem else 0
        raise EngineError(f"{self._root} no longer answers: {problem}")

    async def close(self) -> None:
        """See `Engine`."""
        await self._open.aclose()

    async def _models(self) -> list[ServerModel]:
        async with asyncio.timeout(CHECK_TIMEOUT_S), self._asking("GET", "/v1/models") as response:
            return decode_answer(await body(response, MAX_BYTES), ServerModels).data

    def _choose(self, models: list[ServerModel]) -> ServerModel:
        """Return the server's model with our name, or its only model."""
        for name in self._names:
            for model in models:
                if model.id == name:
                    return model
        own = [model for model in models if model.parent is None]
        if len(own) != 1:
            names = one_line(", ".join(model.id for model in own) or "none")
            raise EngineError(f"{self._root} serves several models or none ({names}): choose one with --model-name")
        return own[0]

    async def _problem(self) -> str:
        """Return why the server seems to be gone, or an empty string."""
        try:
            async with (
                asyncio.timeout(CHECK_TIMEOUT_S),
                self._session.get(f"{self._root}/health", allow_redirects=False) as response,
            ):
                return f"HTTP {response.status}" if response.status >= 500 else ""  # other servers may not have /health
        except TimeoutError:
            return f"no answer within {CHECK_TIMEOUT_S:g} s"
        except (aiohttp.ClientError, HttpProcessingError, OSError) as error:
            return one_line(error)

    async def _whole(self, request: dict[str, Any]) -> ServerAnswer:
        """Ask for an answer in one piece."""
        async with self._asking("POST", "/v1/completions", self._body(request, is_stream=False)) as response:
            said = await body(response, _limit(request))
            answer = decode_answer(said, ServerAnswer)
            self._check(request, answer, said)
        if not answer.choices:
            raise CallError("the answer has no choices", "engine")
        return answer

    async def _stream(self, request: dict[str, Any]) -> AsyncGenerator[Any, None]:
        async with self._asking("POST", "/v1/completions", self._body(request, is_stream=True)) as response:
            if response.content_type != "text/event-stream":
                kind = one_line(response.content_type, 100)
                raise CallError(f"expected an answer of type text/event-stream, not {kind}", "engine")
            async with contextlib.aclosing(self._answers(response, request)) as answers:
                async for answer in answers:
                    for choice in answer.choices[:1]:
                        item = await self._item(request, choice)
                        if choice.finish_reason is not None:
                            yield _counted(item, answer.usage or await _usage(answers))
                            return
                        yield item if item.keys() > {"token_ids"} else item["token_ids"]
        raise CallError("the answer broke off", "lost")

    async def _answers(
        self, response: aiohttp.ClientResponse, request: dict[str, Any]
    ) -> AsyncGenerator[ServerAnswer, None]:
        """Yield the events of a stream, up to its end or an error."""
        async with contextlib.aclosing(events(response, _limit(request))) as found:
            async for event in found:
                answer = decode_answer(event, ServerAnswer)
                self._check(request, answer, event)
                yield answer

    def _check(self, request: dict[str, Any], answer: ServerAnswer, said: bytes) -> None:
        """Raise an error that came as an answer."""
        if answer.error is not None:
            code = answer.error.code if isinstance(answer.error, Problem) else None
            raise self._failed(request, failure(code if isinstance(code, int) else 500, said))

    @contextlib.asynccontextmanager
    async def _asking(
        self, method: str, path: str, data: dict[str, Any] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request, and yield its response if it succeeds."""
        sent: dict[str, Any] = {}
        if data is not None:
            sent = {"data": msgspec.json.encode(data), "headers": {"Content-Type": "application/json"}}
        async with self._session.request(method, self._root + path, allow_redirects=False, **sent) as response:
            if response.status != 200:
                raise self._failed(data or {}, await _refusal(response))
            yield response

    def _failed(self, asked: dict[str, Any], error: CallError) -> CallError:
        """Classify an error: an engine's error may mean that the KV of a request did not arrive from elsewhere."""
        is_lost = error.kind == "engine" and self._role == "decode" and asked.get("kv_transfer_params")
        return CallError(f"{error}; perhaps the KV of its prompt did not arrive", "lost") if is_lost else error

    @contextlib.contextmanager
    def _naming_the_server(self) -> Iterator[None]:
        """Turn any failure into an error that names the server."""
        try:
            yield
        except CallError as error:
            raise CallError(f"{self._root}: {error}", error.kind) from error
        except aiohttp.ClientConnectorError as error:  # it never received the request
            raise CallError(f"{self._root} cannot be reached: {one_line(error)}", "draining") from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
            raise CallError(f"{self._root}: the connection broke: {one_line(error)}", "lost") from error
        except (aiohttp.ClientError, HttpProcessingError) as error:
            raise CallError(f"{self._root} does not speak HTTP: {one_line(error)}", "engine") from error

    def _body(self, request: dict[str, Any], *, is_stream: bool) -> dict[str, Any]:
        params = connector_params(request.get("kv_transfer_params"), self._role, self._lease_s)
        if self._role == "prefill":
            request = prompt_only(request)
        conditions, options, tokens = request["stop_conditions"], request["sampling_options"], request["token_ids"]
        made = sampling(options, "seed", "logit_bias", "prompt_logprobs")
        made |= {
            "model": self._model.id,
            "prompt": tokens,
            "max_tokens": conditions["max_tokens"] or max((self.traits.context_length or 0) - len(tokens), 1),
            "min_tokens": conditions["min_tokens"],
            "ignore_eos": conditions["ignore_eos"],
            "stop_token_ids": end_tokens(request),
            "stream": is_stream,
            "return_token_ids": self._role != "prefill",
            "request_id": engine_id(request),
        }
        if options.get("logprobs") is not None:
            made |= {"logprobs": options["logprobs"], "return_tokens_as_token_ids": True}
        if is_stream:
            made["stream_options"] = {"include_usage": True}
        if (wanted := guide(request, self.traits.guided_decoding, self._root)) is not None:
            made["structured_outputs"] = {wanted.kind: wanted.value}
        if params is not None:
            made["kv_transfer_params"] = params
        return made | self._more

    def _prefilled(self, answer: ServerAnswer) -> dict[str, Any]:
        """Return the last item of a prefill worker; the decode worker sends its one token."""
        params = hand_off(answer.kv_transfer_params, self._lease_s)
        item = {"token_ids": [], "finish_reason": _reason(answer.choices[0]), "kv_transfer_params": params}
        return _counted(item, answer.usage)

    async def _item(self, request: dict[str, Any], choice: ServerChoice) -> dict[str, Any]:
        tokens = choice.token_ids
        item: dict[str, Any] = {"token_ids": tokens}
        if tokens is None:
            item = {"token_ids": await self._tokens(choice.text), "text": choice.text}
        if choice.logprobs is not None and choice.logprobs.token_logprobs:
            item |= log_probabilities(choice.logprobs, tokens)
        if choice.prompt_logprobs:
            try:
                found = of_places(request["token_ids"][1:], [place or {} for place in choice.prompt_logprobs[1:]])
            except KeyError as error:
                raise CallError(
                    f"the answer has no log-probability for the prompt's token {error}", "engine"
                ) from error
            item |= {f"prompt_{name}": [None, *values] for name, values in found.items()}
        if choice.finish_reason is not None:
            item["finish_reason"] = _reason(choice)
        return item

    async def _tokens(self, text: str) -> list[int]:
        """Return the tokens of a text, in case the answer continues on another worker."""
        if self._tokenizer is None:
            log.warning(
                "%s returns no token ids (return_token_ids is vLLM's): its text is passed on unchanged. It may not support "
                "min_tokens, ignore_eos and stop_token_ids.",
                self._root,
            )
            self._tokenizer = await in_thread(lambda: load_tokenizer(self._files))
        return [int(token) for token in self._tokenizer.encode(text, special=False)] if text else []


async def _refusal(response: aiohttp.ClientResponse) -> CallError:
    """Return the error that a status other than 200 stands for."""
    if 300 <= response.status < 400:
        place = one_line(response.headers.get("Location", ""))
        return CallError(f"HTTP {response.status}: a redirect to {place!r}; redirects are not followed", "engine")
    said = b""
    with contextlib.suppress(TimeoutError, CallError):
        async with asyncio.timeout(LAST_S):
            said = await body(response, MAX_BYTES)
    return failure(response.status, said)


async def _usage(answers: AsyncIterator[ServerAnswer]) -> ServerUsage | None:
    """Return the usage that follows the end of an answer, if it comes soon."""
    with contextlib.suppress(TimeoutError, CallError, aiohttp.ClientError):  # the answer is complete in any case
        async with asyncio.timeout(LAST_S):
            async for answer in answers:
                if answer.usage is not None:
                    return answer.usage
    return None


def _counted(item: dict[str, Any], usage: ServerUsage | None) -> dict[str, Any]:
    """Return the last item with the server's counts; vLLM counts cached tokens with --enable-prompt-tokens-details."""
    if usage is not None and usage.prompt_tokens_details is not None:
        item["cached_tokens"] = usage.prompt_tokens_details.cached_tokens or 0
    if usage is not None and usage.completion_tokens is not None and "text" in item:
        item["completion_tokens"] = usage.completion_tokens
    return item


def _reason(choice: ServerChoice) -> str:
    """Return why an answer ended.

    Raises:
        CallError: the server aborted it.
    """
    theirs = choice.finish_reason or "stop"
    if theirs in ("abort", "error"):
        raise CallError(f"the server aborted the request ({theirs})", "lost")
    return finish_reason(theirs)


def _limit(request: dict[str, Any]) -> int:
    """Return how long an event of an answer may be: vLLM's first event has the prompt."""
    wanted = request["sampling_options"].get("prompt_logprobs")
    per_token = TOKEN_BYTES + (0 if wanted is None else (wanted + 1) * PLACE_BYTES)
    return MAX_BYTES + per_token * len(request["token_ids"])
