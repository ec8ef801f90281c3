"""What a worker does with requests."""

from typing import Literal

Role = Literal["aggregated", "prefill", "decode"]
"""The whole request, only its prompt, or only its answer."""

KV_ROLES: dict[Role, Literal["kv_producer", "kv_consumer"] | None] = {
    "aggregated": None,
    "prefill": "kv_producer",
    "decode": "kv_consumer",
}
"""What vLLM calls the role of an instance that hands over KV, or gets it."""
