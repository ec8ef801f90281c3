"""Paths of vLLM that a stand-in has and does not model: each says why."""

from starlette.requests import Request
from starlette.responses import Response

from serving.stand_in.vllm.answers.errors import RefusedError

NOT_MODELLED = {
    "/v1/systemone": "it scores the answers that a model gives to decisions, and there is no model",
    "/generative_scoring": "it compares probabilities of a model's tokens, and there is no model",
    "/v1/chat/completions/batch": "send the conversations one by one",
    "/start_profile": "there are no kernels to profile",
    "/stop_profile": "there are no kernels to profile",
}

SCALE_OUT = (
    "/v1/chat/completions/render",
    "/v1/messages/render",
    "/v1/completions/render",
    "/v1/responses/render",
    "/v1/chat/completions/derender",
    "/v1/completions/derender",
    "/inference/v1/generate",
    "/inference/v1/abort_requests",
)
"""Paths of tokens in and out, which vLLM answers only with --enable-scale-out; a stand-in does not accept that flag."""

PROFILING = ("/start_profile", "/stop_profile")
"""Those that are there only with --profiler-config."""


async def disabled(request: Request) -> Response:
    """Refuse as vLLM does at the paths of `SCALE_OUT`."""
    raise RefusedError(403, "PermissionDeniedError", "Scale-out endpoints are disabled: they need --enable-scale-out.")


async def no_response(request: Request) -> Response:
    """Refuse as vLLM does where it keeps no responses, which is its default."""
    id = request.path_params["response_id"]
    message = f"Response with id '{id}' not found."
    raise RefusedError(404, "invalid_request_error", message, "response_id")
