"""The serving stack: frontend, router, workers, runtime, engines.

This module exports the names that your own engine needs, as in Dynamo's guide. Each is loaded when first used.
"""

from importlib import import_module
from typing import Any

_PLACES = {
    "Client": "serving.runtime.client",
    "Component": "serving.runtime.distributed",
    "Context": "serving.runtime.server",
    "DistributedRuntime": "serving.runtime.distributed",
    "Endpoint": "serving.runtime.distributed",
    "KvEventPublisher": "serving.worker.kv_events",
    "ModelType": "serving.model.card",
    "Namespace": "serving.runtime.distributed",
    "RuntimeConfig": "serving.runtime.config",
    "dynamo_worker": "serving.runtime.distributed",
    "register_llm": "serving.worker.registration",
}

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    """Load a name of the public interface."""
    if name not in _PLACES:
        raise AttributeError(f"serving has no {name!r}; it has {', '.join(sorted(_PLACES))}")
    return getattr(import_module(_PLACES[name]), name)
