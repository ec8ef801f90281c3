"""What is there only in development: facts about the server, and calls to its workers."""

import os
import platform
import sys
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from serving.engines.mock.engine import Mocker
from serving.frontend.model_info import json_response
from serving.stand_in.config import StandInConfig
from serving.stand_in.vllm.answers.errors import RefusedError
from serving.stand_in.vllm.flags.arguments import version
from serving.stand_in.vllm.metrics.cache_config import num_gpu_blocks
from serving.stand_in.vllm.paths.bodies import choice, flag, object_of

FORMATS = ("text", "json")


class Development:
    """The handlers."""

    def __init__(self, config: StandInConfig, engine: Mocker) -> None:
        self._config = config
        self._engine = engine

    async def on_server_info(self, request: Request) -> Response:
        """GET /server_info: the settings that a stand-in has, as text or by the parts of vLLM's configuration."""
        found = self._settings()
        if choice(request, "config_format", FORMATS, "text") == "text":
            flat = {name: value for part in found.values() for name, value in part.items()}
            settings: Any = ", ".join(f"{name}={value!r}" for name, value in flat.items())
        else:
            settings = found
        return json_response({"vllm_config": settings, "vllm_env": _environment(), "system_env": _system()})

    async def on_world_size(self, request: Request) -> Response:
        """GET /get_world_size: GPUs, of all data-parallel ranks or of one."""
        ranks = self._config.ranks.size if flag(request, "include_dp", True) else 1
        return json_response({"world_size": ranks * self._of_one_rank})

    async def on_collective_rpc(self, request: Request) -> Response:
        """POST /collective_rpc: there are no workers to call."""
        asked = await object_of(request)
        if asked.get("method") is None:
            raise RefusedError(400, "Bad Request", "Missing 'method' in request body")
        message = f"method={str(asked['method'])[:100]!r}: this stand-in has no workers, whose methods could be called"
        raise RefusedError(501, "NotImplementedError", message)

    @property
    def _of_one_rank(self) -> int:
        given = self._config.given
        return int(given.get("tensor_parallel_size") or 1) * int(given.get("pipeline_parallel_size") or 1)

    def _settings(self) -> dict[str, dict[str, Any]]:
        config, engine = self._config, self._engine.ranks[0].config
        given = config.given
        return {
            "model_config": {
                "model": config.model,
                "served_model_name": list(config.served_model_names),
                "max_model_len": self._engine.traits.context_length,
                "quantization": given.get("quantization"),
                "seed": config.seed,
                "enable_sleep_mode": given.get("enable_sleep_mode", False),
            },
            "cache_config": {
                "block_size": engine.block_size,
                "num_gpu_blocks": num_gpu_blocks(self._engine.ranks[0]),
                "cache_dtype": given.get("kv_cache_dtype", "auto"),
                "gpu_memory_utilization": given.get("gpu_memory_utilization"),
                "enable_prefix_caching": engine.enable_prefix_caching,
            },
            "parallel_config": {
                "tensor_parallel_size": given.get("tensor_parallel_size", 1),
                "pipeline_parallel_size": given.get("pipeline_parallel_size", 1),
                "data_parallel_size": config.ranks.size,
            },
            "scheduler_config": {
                "max_num_seqs": engine.max_num_seqs,
                "max_num_batched_tokens": engine.max_num_batched_tokens,
                "enable_chunked_prefill": engine.enable_chunked_prefill,
                "async_scheduling": engine.is_async,
                "policy": engine.scheduling_policy,
            },
            "lora_config": {} if config.lora is None else {"max_loras": config.lora.max_loras},
            "given": dict(given),
        }


def _environment() -> dict[str, str]:
    """Return the variables of vLLM that are set, without keys."""
    return {name: value for name, value in os.environ.items() if name.startswith("VLLM_") and "KEY" not in name}


def _system() -> dict[str, str]:
    return {
        "vllm_version": version(),
        "python_version": sys.version,
        "python_platform": platform.platform(),
        "os": platform.system(),
    }
