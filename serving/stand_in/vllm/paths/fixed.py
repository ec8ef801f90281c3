"""What a stand-in cannot change: its number of ranks, and weights, of which it has none, only the name of their version."""

from starlette.requests import Request
from starlette.responses import Response

from serving.frontend.model_info import json_response
from serving.stand_in.vllm.answers.errors import RefusedError
from serving.stand_in.vllm.paths.bodies import check_is_json, fields_of, invalid, object_of

UNCONFIGURED = "weight transfer is not configured, and there are no weights to transfer"
CHECKER_ACTIONS = ("checksum", "reset", "compare")


class Scale:
    """Elastic expert parallelism."""

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


class Weights:
    """What reinforcement learning asks of the weights."""

    def __init__(self) -> None:
        self._version = "default"

    async def on_info(self, request: Request) -> Response:
        """GET /weight_info."""
        return json_response({"weight_version": self._version})

    async def on_new_version(self, request: Request) -> Response:
        """POST /update_weight_version."""
        self._version = (await fields_of(request, new_version=str))["new_version"]
        return json_response({"success": True, "new_version": self._version})

    async def on_check(self, request: Request) -> Response:
        """POST /weight_checker."""
        action = (await fields_of(request, action=str))["action"]
        if action not in CHECKER_ACTIONS:
            raise invalid("body", "action", f"expected {' or '.join(map(repr, CHECKER_ACTIONS))}, not {action[:100]!r}")
        if action != "reset":
            raise RefusedError(501, "NotImplementedError", f"action={action}: this stand-in has no weights to checksum")
        return json_response({"status": "reset"})

    async def on_transfer(self, request: Request) -> Response:
        """POST /init_weight_transfer_engine and those that follow it: as vLLM without --weight-transfer-config."""
        message = f"Call to collective_rpc method failed: {UNCONFIGURED}"
        raise RefusedError(500, "InternalServerError", message)
