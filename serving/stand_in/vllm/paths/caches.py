"""The caches, which can be emptied."""

from starlette.requests import Request
from starlette.responses import Response

from serving.engines.mock.engine import Mocker
from serving.frontend.model_info import json_response
from serving.stand_in.vllm.answers.errors import RefusedError
from serving.stand_in.vllm.paths.bodies import done, flag


class CachePaths:
    """The handlers."""

    def __init__(self, engine: Mocker) -> None:
        self._engine = engine

    async def reset_prefix(self, request: Request) -> Response:
        """POST /reset_prefix_cache: whether it is empty now; it is not while requests hold blocks."""
        preempts_running = flag(request, "reset_running_requests", False)
        if flag(request, "reset_external", False) and self._engine.ranks[0].has_host_memory:
            message = "reset_external: the KV in tiers beyond the GPU cannot be reset in this stand-in; leave it out"
            raise RefusedError(501, "NotImplementedError", message)
        if preempts_running and self._engine.ranks[0].has_host_memory:
            message = "reset_running_requests is not simulated with KV in host memory; leave it out"
            raise RefusedError(501, "NotImplementedError", message)
        try:
            results = [
                await rank.control.reset_prefix_cache(preempts_running=preempts_running) for rank in self._engine.ranks
            ]
        except RuntimeError as error:
            message = f"Call to reset_prefix_cache method failed: {error}"
            raise RefusedError(500, "InternalServerError", message) from error
        return json_response({"success": all(results)})

    async def reset_other(self, request: Request) -> Response:
        """POST /reset_mm_cache and /reset_encoder_cache: a model of text has neither."""
        return done()
