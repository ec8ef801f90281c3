"""Settings of host memory in vLLM's `--kv-transfer-config`, translated into ours.

Supported are OffloadingConnector's entries of `kv_connector_extra_config`, and a MultiConnector of it and NIXL's.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from mocker.tiers.config import GIB

SIMULATED = "OffloadingConnector"
HANDS_OVER = "NixlConnector"
"""The connector from prefill to decode workers; the role of simulated workers implies it."""

ENTRIES = ("kv_connector", "kv_role", "kv_connector_extra_config", "kv_load_failure_policy")
SAME = ("blocks_per_chunk", "eviction_policy", "store_threshold", "offload_prompt_only", "sync_load_budget_bytes")
"""Entries of `kv_connector_extra_config` with the names of our settings."""
EXTRA = ("cpu_bytes_to_use", "block_size", *SAME, "self_describing_kv_events")
"""All its entries; events of simulated engines always describe themselves."""


def settings_of(given: str | Mapping[str, Any], *, block_size: int) -> dict[str, Any]:
    """Return the engine settings that a `kv_transfer_config` implies; `block_size` is that of the engine's KV blocks.

    Raises:
        ValueError: it has an entry that is not simulated; the message names it.
    """
    return _settings(_parsed(given), block_size)


def _parsed(given: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """Parse a text as JSON."""
    try:
        config = msgspec.json.decode(given) if isinstance(given, str) else given
    except ValueError:
        config = None
    if not isinstance(config, Mapping):
        raise ValueError(
            f'kv_transfer_config is {given!r}; expected JSON such as {{"kv_connector": "{SIMULATED}", ...}}'
        )
    return config


def _settings(config: Mapping[str, Any], block_size: int) -> dict[str, Any]:
    _refuse_unknown(config, ENTRIES, "kv_transfer_config")
    name, extra = config.get("kv_connector"), _mapping(config, "kv_connector_extra_config")
    policy = {key: config[key] for key in ("kv_load_failure_policy",) if key in config}
    if name == "MultiConnector":
        _refuse_unknown(extra, ("connectors",), "kv_connector_extra_config")
        return _one_of(extra.get("connectors"), block_size) | policy
    if name != SIMULATED:
        raise ValueError(
            f"kv_transfer_config.kv_connector is {name!r}; expected {SIMULATED}, the one that is simulated, or a MultiConnector "
            f"of it and {HANDS_OVER}"
        )
    if config.get("kv_role", "kv_both") != "kv_both":
        raise ValueError(f"kv_transfer_config.kv_role is {config['kv_role']!r}; expected 'kv_both' with {SIMULATED}")
    return _of_host_memory(extra, block_size) | policy


def _one_of(connectors: Any, block_size: int) -> dict[str, Any]:
    """Return the settings of the one connector that keeps KV."""
    if not isinstance(connectors, list) or not all(isinstance(each, Mapping) for each in connectors):
        raise ValueError(f"kv_transfer_config: connectors is {connectors!r}; expected a list of connectors")
    keeping = [each for each in connectors if each.get("kv_connector") != HANDS_OVER]
    if len(keeping) != 1:
        raise ValueError(f"kv_transfer_config has {len(keeping)} connectors that keep KV; expected one {SIMULATED}")
    return _settings(keeping[0], block_size)


def _of_host_memory(extra: Mapping[str, Any], block_size: int) -> dict[str, Any]:
    if "secondary_tiers" in extra:
        raise ValueError(
            "kv_connector_extra_config.secondary_tiers have no size in vLLM, and simulated ones need one; expected "
            "kv_disk_size, or kv_store_size for a deployment, instead"
        )
    _refuse_unknown(extra, EXTRA, "kv_connector_extra_config")
    num_bytes = extra.get("cpu_bytes_to_use")
    if not isinstance(num_bytes, int | float) or isinstance(num_bytes, bool) or num_bytes <= 0:
        raise ValueError(
            f"kv_connector_extra_config.cpu_bytes_to_use is {num_bytes!r}; expected a number of bytes greater than 0"
        )
    found = {"kv_offloading_size": num_bytes / GIB} | {name: extra[name] for name in SAME if name in extra}
    if "block_size" in extra:
        if "blocks_per_chunk" in extra:
            raise ValueError("kv_connector_extra_config has block_size and blocks_per_chunk; expected one of them")
        found["blocks_per_chunk"] = _blocks(extra["block_size"], block_size)
    return found


def _blocks(tokens: Any, block_size: int) -> int:
    """Return how many blocks a chunk of this many tokens has."""
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1 or tokens % block_size:
        raise ValueError(
            f"kv_connector_extra_config.block_size is {tokens!r}; expected a multiple of the {block_size} tokens in a KV block"
        )
    return tokens // block_size


def _mapping(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name, {})
    if not isinstance(found, Mapping):
        raise ValueError(f"kv_transfer_config.{name} is {found!r}; expected a mapping")
    return found


def _refuse_unknown(given: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"{where}.{name} is unknown to the simulation; expected some of {', '.join(known)}")
