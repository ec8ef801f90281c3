"""vLLM with KV beyond the GPU: which connectors it needs, and how to combine them.

    kv_transfer_config   kv_offloading_size   role         vLLM's connectors
    -                    8                    aggregated   OffloadingConnector
    -                    8                    prefill      MultiConnector: NixlConnector, OffloadingConnector
    LMCacheMPConnector   -                    decode       MultiConnector: NixlConnector, LMCacheMPConnector

vLLM accepts one connector, and `kv_offloading_size` silently replaces the one that is given.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

Connector = dict[str, Any]
"""A `kv_transfer_config`, or one of those in a MultiConnector."""

MULTI = "MultiConnector"
TIERS = frozenset(
    {
        "OffloadingConnector",
        "SimpleCPUOffloadConnector",
        "LMCacheConnectorV1",
        "LMCacheMPConnector",
        "MooncakeStoreConnector",
        "FlexKVConnectorV1",
        "HF3FSKVConnector",
        "DynamoConnector",  # KVBM's
    }
)
"""Connectors that keep KV for later use; the others pass it to another engine."""

STORAGE = ("fs", "obj")
"""Secondary tiers of the OffloadingConnector that have KV events."""

NAME, EXTRA = "kv_connector", "kv_connector_extra_config"
OF_ALL = ("kv_load_failure_policy", "engine_id")
"""Entries that vLLM reads from a MultiConnector, not from the connectors in it."""

GIB = 1 << 30


def is_tier(connector: Mapping[str, Any]) -> bool:
    """Whether a connector keeps KV; LMCache with its own role passes it on."""
    return connector.get(NAME) in TIERS and connector.get("kv_role", "kv_both") == "kv_both"


def children(config: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    """Return the connectors of a `kv_transfer_config`."""
    if config is None:
        return ()
    return config.get(EXTRA, {}).get("connectors", ()) if config.get(NAME) == MULTI else (config,)


def take_offloading(arguments: dict[str, Any]) -> Connector | None:
    """Take `kv_offloading_size` and its backend out of vLLM's arguments, and return the connector that vLLM makes of them.

    Raises:
        ValueError: the size is not valid.
    """
    size, backend = arguments.pop("kv_offloading_size", None), arguments.pop("kv_offloading_backend", "native")
    if size is None:
        return None
    if not isinstance(size, int | float) or isinstance(size, bool) or size <= 0:
        raise ValueError(f"kv_offloading_size is {size!r}; expected a number of GiB greater than 0")
    if backend == "lmcache":  # its server is started with its own size
        return {NAME: "LMCacheMPConnector", "kv_role": "kv_both"}
    is_simple = os.environ.get("VLLM_USE_SIMPLE_KV_OFFLOAD", "0") == "1"
    name = "SimpleCPUOffloadConnector" if is_simple else "OffloadingConnector"
    return {NAME: name, "kv_role": "kv_both", EXTRA: {"cpu_bytes_to_use": int(size * GIB)}}


def beside(config: Connector | None, tier: Connector | None) -> Connector | None:
    """Return a `kv_transfer_config` with a tier after its connectors; if it already has that tier, set its size."""
    if config is None or tier is None:
        return config if tier is None else tier
    if config.get(NAME) in (None, tier[NAME]):
        return config | tier | {EXTRA: config.get(EXTRA, {}) | tier.get(EXTRA, {})}
    outer = {name: config[name] for name in OF_ALL if name in config}
    inner = {name: value for name, value in config.items() if name not in OF_ALL}
    connectors = [*children(inner), {"kv_role": "kv_both"} | tier]
    return {NAME: MULTI, "kv_role": "kv_both", EXTRA: {"connectors": connectors}} | outer


def telling(config: Connector | None) -> Connector | None:
    """Return a `kv_transfer_config` whose KV events report what is in host memory, including the tokens."""
    if config is None:
        return None
    if config.get(NAME) == MULTI:
        return config | {EXTRA: config[EXTRA] | {"connectors": [telling(dict(each)) for each in children(config)]}}
    match config.get(NAME):
        case "OffloadingConnector":
            extra = {"self_describing_kv_events": True} | config.get(EXTRA, {})
            if "secondary_tiers" in extra:
                extra["secondary_tiers"] = [_telling_of_storage(each) for each in extra["secondary_tiers"]]
            return config | {EXTRA: extra}
        case "LMCacheMPConnector":  # vLLM's copy of it has no events, but LMCache's own does
            return {"kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector"} | config
    return config


def _telling_of_storage(tier: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"enable_kv_events": True} | dict(tier) if tier.get("type") in STORAGE else tier
