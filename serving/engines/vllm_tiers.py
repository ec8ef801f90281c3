"""vLLM with KV beyond the GPU: which connectors it needs, one beside the other.

    kv_transfer_config   kv_offloading_size   role         vLLM's connectors
    -                    8                    aggregated   OffloadingConnector
    -                    8                    prefill      MultiConnector: NixlConnector, OffloadingConnector
    LMCacheMPConnector   -                    decode       MultiConnector: NixlConnector, LMCacheMPConnector

vLLM has room for one connector, and lets `kv_offloading_size` replace the one that is given without a word.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

Connector = dict[str, Any]
"""A `kv_transfer_config`, or one of those that a MultiConnector holds."""

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
        "DynamoConnector",  # of KVBM
    }
)
"""Connectors that keep KV to find it again, where others hand it to another engine."""

STORAGE = ("fs", "obj")
"""Secondary tiers of the OffloadingConnector that have KV events."""

NAME, EXTRA = "kv_connector", "kv_connector_extra_config"
OF_ALL = ("kv_load_failure_policy", "engine_id")
"""Entries that vLLM reads of a MultiConnector, not of those in it."""

GIB = 1 << 30


def is_tier(connector: Mapping[str, Any]) -> bool:
    """Whether a connector keeps KV; LMCache with a role of its own hands it over."""
    return connector.get(NAME) in TIERS and connector.get("kv_role", "kv_both") == "kv_both"


def children(config: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    """Return the connectors of a `kv_transfer_config`."""
    if config is None:
        return ()
    return config.get(EXTRA, {}).get("connectors", ()) if config.get(NAME) == MULTI else (config,)


def take_offloading(arguments: dict[str, Any]) -> Connector | None:
    """Take `kv_offloading_size` and its backend out of vLLM's arguments, and return the connector that vLLM makes of them.

    Raises:
        ValueError: that is no size.
    """
    size, backend = arguments.pop("kv_offloading_size", None), arguments.pop("kv_offloading_backend", "native")
    if size is None:
        return None
    if not isinstance(size, int | float) or isinstance(size, bool) or size <= 0:
        raise ValueError(f"kv_offloading_size is {size!r}; expected a number of GiB greater than 0")
    if backend == "lmcache":  # its server is started with a size of its own
        return {NAME: "LMCacheMPConnector", "kv_role": "kv_both"}
    is_simple = os.environ.get("VLLM_USE_SIMPLE_KV_OFFLOAD", "0") == "1"
    name = "SimpleCPUOffloadConnector" if is_simple else "OffloadingConnector"
    return {NAME: name, "kv_role": "kv_both", EXTRA: {"cpu_bytes_to_use": int(size * GIB)}}


def beside(config: Connector | None, tier: Connector | None) -> Connector | None:
    """Return a `kv_transfer_config` with a tier behind the connectors that it has; of the tier it has already, with its size."""
    if config is None or tier is None:
        return config if tier is None else tier
    if config.get(NAME) in (None, tier[NAME]):
        return config | tier | {EXTRA: config.get(EXTRA, {}) | tier.get(EXTRA, {})}
    outer = {name: config[name] for name in OF_ALL if name in config}
    inner = {name: value for name, value in config.items() if name not in OF_ALL}
    connectors = [*children(inner), {"kv_role": "kv_both"} | tier]
    return {NAME: MULTI, "kv_role": "kv_both", EXTRA: {"connectors": connectors}} | outer


def telling(config: Connector | None) -> Connector | None:
    """Return a `kv_transfer_config` whose KV events say what is in host memory, down to the tokens."""
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
        case "LMCacheMPConnector":  # vLLM's copy of it has no events, LMCache's own has
            return {"kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector"} | config
    return config


def _telling_of_storage(tier: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"enable_kv_events": True} | dict(tier) if tier.get("type") in STORAGE else tier
