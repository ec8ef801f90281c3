"""What reinforcement learning asks of the weights: a stand-in has none, only the name of their version."""

from starlette.requests import Request
from starlette.responses import Response

from serving.frontend.model_info import json_response
from serving.stand_in.vllm.answers.errors import RefusedError
from serving.stand_in.vllm.paths.bodies import fields_of, invalid

UNCONFIGURED = "weight transfer is not configured, and there are no weights to transfer"
CHECKER_ACTIONS = ("checksum", "reset", "compare")


class Weights:
    """The handlers."""

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
