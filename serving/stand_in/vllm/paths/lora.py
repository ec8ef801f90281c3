"""LoRA adapters: names under which the model is served, with a cache of their own.

An adapter has no weights here. Its path is checked as far as a stand-in can: a path must be a folder that exists, and what
looks like a Hugging Face id is taken at its word, because those who test a router rarely have adapters on their disk.
"""

import json
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from serving.frontend.served_model import ServedModel
from serving.model.adapter import Adapter
from serving.stand_in.config import LoraConfig
from serving.stand_in.served import OneModel
from serving.stand_in.vllm.answers.errors import RefusedError
from serving.stand_in.vllm.paths.bodies import fields_of, invalid

MAX_DESCRIPTION_BYTES = 1 << 20
"""Longest adapter_config.json; real ones have a few hundred bytes."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?\Z")


class Adapters:
    """The adapters that are loaded, and the handlers that change them."""

    def __init__(self, config: LoraConfig, models: OneModel) -> None:
        """Load the adapters that are served from the start.

        Raises:
            ValueError: one of them cannot be loaded.
        """
        self._max_rank = config.max_lora_rank
        self._models = models
        self._num_loaded = 0
        for module in config.modules:
            try:
                self.load(module.name, module.path, base=module.base_model_name)
            except RefusedError as refused:
                raise ValueError(f"--lora-modules {module.name}={module.path}: {refused}") from None

    def load(self, name: str, path: str, *, in_place: bool = False, base: str | None = None) -> None:
        """Load an adapter; in place, it may replace one of the same name.

        Raises:
            RefusedError: it cannot be loaded.
        """
        models = self._models
        if not name or not path:
            raise RefusedError(400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided.")
        if name in models.names:
            raise RefusedError(400, "InvalidUserInput", f"The lora adapter {name!r} has the name of the model itself.")
        if name in models.adapters and not in_place:
            message = f"The lora adapter {name!r} is loaded already; to replace it, set 'load_inplace' to true."
            raise RefusedError(400, "InvalidUserInput", message)
        _check_path(name, path, self._max_rank)
        model = models.model
        previous = models.adapters.get(name)
        if previous is None:
            self._num_loaded += 1
            id = self._num_loaded
        else:
            assert previous.adapter is not None
            id = previous.adapter.id
        served = ServedModel(model.text, model.stages, model.preparer, Adapter(id, name, path))
        models.adapters[name] = served
        models.parents[name] = base if base in models.names else models.names[0]

    def unload(self, name: str) -> None:
        """Forget an adapter; requests in progress keep it.

        Raises:
            RefusedError: it is not loaded.
        """
        if not name:
            raise RefusedError(400, "InvalidUserInput", "'lora_name' needs to be provided to unload a LoRA adapter.")
        if self._models.adapters.pop(name, None) is None:
            raise RefusedError(404, "NotFoundError", f"The lora adapter '{name}' cannot be found.")
        del self._models.parents[name]

    async def on_load(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter."""
        asked = await fields_of(request, lora_name=str, lora_path=str)
        in_place = asked.get("load_inplace", False)
        if not isinstance(in_place, bool):
            raise invalid("body", "load_inplace", "expected true or false")
        self.load(asked["lora_name"], asked["lora_path"], in_place=in_place)
        return Response(f"Success: LoRA adapter '{asked['lora_name']}' added successfully.")

    async def on_unload(self, request: Request) -> Response:
        """POST /v1/unload_lora_adapter."""
        asked = await fields_of(request, lora_name=str)
        self.unload(asked["lora_name"])
        return Response(f"Success: LoRA adapter '{asked['lora_name']}' removed successfully.")

    async def on_register(self, request: Request) -> Response:
        """POST /adapters, as SageMaker loads one."""
        asked = await fields_of(request, name=str, src=str)
        self.load(asked["name"], asked["src"])
        return Response(f"Adapter {asked['name']} registered")

    async def on_unregister(self, request: Request) -> Response:
        """DELETE /adapters/{adapter_name}, as SageMaker unloads one."""
        name = request.path_params["adapter_name"]
        self.unload(name)
        return Response(f"Adapter {name} unregistered")


def _check_path(name: str, path: str, max_rank: int) -> None:
    """Check that there may be an adapter at a path.

    Raises:
        RefusedError: there is none, or one of too high a rank.
    """
    try:
        description = _description(path)
    except (OSError, RuntimeError, ValueError) as error:  # not ours to read, too long, of no such user, not a path
        message = f"Loading lora {name} failed: No adapter found for {path[:1000]}"
        raise RefusedError(404, "NotFoundError", message) from error
    if description is None:
        return
    try:
        if len(description) > MAX_DESCRIPTION_BYTES:
            raise ValueError("too long")
        rank = json.loads(description).get("r")
    except (ValueError, AttributeError, RecursionError) as error:
        message = f"Loading lora {name} failed: adapter_config.json is not an object in JSON"
        raise RefusedError(500, "InternalServerError", message) from error
    if isinstance(rank, int) and rank > max_rank:
        message = f"LoRA rank {rank} is greater than max_lora_rank {max_rank}."
        raise RefusedError(500, "InternalServerError", message)


def _description(path: str) -> bytes | None:
    """Return the start of an adapter's description, None if it has none.

    Raises:
        OSError, RuntimeError, ValueError: there is no adapter, or it cannot be read.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        if HUB_ID.match(path) is None:
            raise FileNotFoundError(path)
        return None
    described = folder / "adapter_config.json"
    if not described.is_file():
        return None
    with described.open("rb") as file:
        return file.read(MAX_DESCRIPTION_BYTES + 1)
