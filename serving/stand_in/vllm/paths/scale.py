"""Elastic expert parallelism: the number of ranks of a stand-in does not change."""

from starlette.requests import Request
from starlette.responses import Response

from serving.frontend.model_info import json_response
from serving.stand_in.vllm.answers.errors import RefusedError
from serving.stand_in.vllm.paths.bodies import check_is_json, object_of


class Scale:
    """The handlers."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks

    async def on_scale(self, request: Request) -> Response:
        """POST /scale_elastic_ep: as vLLM without --enable-elastic-ep, only to the number that there is."""
        check_is_json(request)
        asked = await object_of(request, "Invalid JSON format")
        wanted, timeout = asked.get("new_data_parallel_size"), asked.get("drain_timeout", 120)
        if wanted is None:
            raise RefusedError(400, "Bad Request", "new_data_parallel_size is required")
        for name, value in (("new_data_parallel_size", wanted), ("drain_timeout", timeout)):
            if not isinstance(value, int) or value <= 0:
                raise RefusedError(400, "Bad Request", f"{name} must be a positive integer")
        if wanted != self._num_ranks:
            message = f"Scale failed: this stand-in has {self._num_ranks} data-parallel ranks for as long as it runs"
            raise RefusedError(500, "Internal Server Error", message)
        return json_response({"message": f"Scaled to {wanted} data parallel engines"})

    async def on_is_scaling(self, request: Request) -> Response:
        """POST /is_scaling_elastic_ep."""
        return json_response({"is_scaling_elastic_ep": False})
