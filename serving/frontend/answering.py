"""Requests for answers and embeddings, answered by the engines of a model."""

from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from foundation.ordered_set import OrderedSet
from serving.frontend import nvext
from serving.frontend.answers.accepted import AcceptedRequest
from serving.frontend.answers.sending import CompletionResponse
from serving.frontend.api.errors import ApiError
from serving.frontend.api.kinds import KINDS, KindName
from serving.frontend.config import FrontendConfig
from serving.frontend.dialect import OPENAI, Dialect
from serving.frontend.embeddings import embed
from serving.frontend.generation.start import start_choices, until_placed
from serving.frontend.kept_responses import KeptResponses, ResponseTurn
from serving.frontend.metrics import FrontendMetrics, ModelMetrics
from serving.frontend.passthrough import hand_through
from serving.frontend.prepared import Embeddable, HandedThrough, Prepared
from serving.frontend.request import KnownModels, RequestReader, unless_gone
from serving.runtime.connection import ReplyStream
from serving.runtime.world import world

Handler = Callable[[Request], Awaitable[Response]]


class Answering:
    """The handlers, and the requests that are in progress."""

    def __init__(self, models: KnownModels, config: FrontendConfig, dialect: Dialect = OPENAI) -> None:
        """Prepare to answer.

        Args:
            models: what is served.
            config: our settings.
            dialect: how answers and errors are worded.
        """
        self.is_draining = False
        self.num_open = 0
        """Requests in progress, of any kind."""
        self.dialect = dialect
        self.metrics = FrontendMetrics()
        self.reader = RequestReader(models, config, self.metrics, dialect.reading)
        self.kept = KeptResponses(config)
        self._config = config
        self._responses: OrderedSet[CompletionResponse] = OrderedSet()
        self._handed_through: OrderedSet[ReplyStream] = OrderedSet()

    @property
    def num_answering(self) -> int:
        """Answers in progress."""
        return len(self._responses)

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(request, "completion")

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(request, "chat")

    async def respond(self, request: Request) -> Response:
        """POST /v1/responses."""
        return await self._answer(request, "response")

    async def message(self, request: Request) -> Response:
        """POST /v1/messages."""
        return await self._answer(request, "message")

    async def embed(self, request: Request) -> Response:
        """POST /v1/embeddings."""
        return await self._embed(request, "embedding")

    async def score(self, request: Request) -> Response:
        """POST /v1/score."""
        return await self._embed(request, "score")

    async def rerank(self, request: Request) -> Response:
        """POST /v1/rerank."""
        return await self._embed(request, "rerank")

    def end_all(self) -> None:
        """End all answers with an error: the process exits before they are done."""
        message = "the server shut down before the answer was complete"
        for response in list(self._responses):
            response.fail(ApiError(503, message))
        for stream in list(self._handed_through):
            stream.abort(message, "draining")

    async def _embed(self, request: Request, kind: KindName) -> Response:
        model, asked = await self.reader.read(request, kind)
        assert isinstance(asked, Embeddable)
        metrics, endpoint = self.metrics.of(model.card.name), KINDS[kind].endpoint
        metrics.count("input_tokens", by=sum(len(prompt.tokens) for prompt in asked.prompts))
        metrics.inflight += 1
        status = "error"
        try:
            response = await unless_gone(request, embed(model, asked, self.dialect.received(request, None)))
            status = "success"
        except ApiError as error:
            if error.status in (429, 503):
                metrics.count("model_rejection", endpoint)
            raise
        except ClientDisconnect:
            status = "cancelled"
            raise
        finally:
            metrics.inflight -= 1
            metrics.count("requests", endpoint, "unary", status)
        return response

    async def _answer(self, request: Request, kind: KindName) -> Response:
        started = world().now()
        turn = ResponseTurn(self.kept) if kind == "response" else None
        model, prepared = await self.reader.read(request, kind, turn.complete if turn is not None else None)
        metrics = self.metrics.of(model.card.name)
        if isinstance(prepared, HandedThrough):
            return hand_through(model, prepared, self._handed_through, endpoint=KINDS[kind].endpoint, metrics=metrics)
        assert isinstance(prepared, Prepared)
        _count_prompts(prepared, metrics)
        request_id = self.dialect.received(request, prepared)
        try:
            if "query_instance_id" in (prepared.extension.annotations or ()):
                return nvext.instance_query(model, prepared.prompts[0], request_id)
            choices = await start_choices(prepared, model, self._config, request_id)
            if not all(choice.attempts.is_placed for choice in choices):
                await unless_gone(request, until_placed(choices))
        except ApiError as error:
            metrics.count("requests", prepared.endpoint, "stream" if prepared.options.stream else "unary", "error")
            if error.status in (429, 503):
                metrics.count("model_rejection", prepared.endpoint)
            raise
        for choice in choices:
            metrics.observe("router_overlap_share", choice.num_overlap_tokens / choice.num_prompt)
            metrics.count("router_decisions", f"{choice.attempts.prompt_placement.rank.instance_id:x}")
        accepted = AcceptedRequest(prepared=prepared, id=request_id, choices=choices, metrics=metrics, started=started)
        return CompletionResponse(
            accepted,
            self.dialect.answer(accepted, turn),
            self._responses,
            self.dialect.headers(accepted),
            begins_at_once=self.dialect.begins_at_once,
        )


def _count_prompts(prepared: Prepared, metrics: ModelMetrics) -> None:
    metrics.count("input_tokens", by=sum(len(prompt.tokens) for prompt in prepared.prompts))
    for prompt in prepared.prompts:
        metrics.observe("input_sequence_tokens", len(prompt.tokens))
