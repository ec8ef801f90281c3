"""GET /v1/models: the model under each of its names, and its adapters."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from serving.frontend.model_info import json_response
from serving.runtime.world import world
from serving.stand_in.served import OneModel


class ModelPaths:
    """The handler."""

    def __init__(self, models: OneModel, root: str) -> None:
        """Prepare to list models; the model itself comes from `root`."""
        self._models = models
        self._root = root

    async def on_list(self, request: Request) -> Response:
        """GET /v1/models."""
        models, length = self._models, self._models.model.card.context_length
        cards = [_card(name, self._root, None, length) for name in models.names]
        cards += [
            _card(name, served.adapter.path, models.parents[name], None)
            for name, served in models.adapters.items()
            if served.adapter is not None
        ]
        return json_response({"object": "list", "data": cards})


def _card(name: str, root: str, parent: str | None, max_model_len: int | None) -> dict[str, Any]:
    now = int(world().wall_s())  # vLLM makes each card when it is asked for it
    return {
        "id": name,
        "object": "model",
        "created": now,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [
            {
                "id": f"modelperm-{world().token_hex(8)}",
                "object": "model_permission",
                "created": now,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": True,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
    }
