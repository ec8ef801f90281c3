"""KV beyond one GPU, as vLLM's arguments describe it: handed to other instances, or kept in host memory."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from mocker.vllm.kv_transfer_config import settings_of
from serving.engines.mock.kv.nixl_peer import KvHandoverConfig
from serving.engines.vllm.tiers import EXTRA, MULTI, NAME, OF_ALL, children
from serving.life.lease import LeaseConfig

NIXL = ("NixlConnector", "NixlPullConnector")
OFFLOADING = "OffloadingConnector"
HOST, PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
DESCRIBING = "self_describing_kv_events"
BIDIRECTIONAL = "bidirectional_kv_xfer"
GIB = 1 << 30


class KvSettings(NamedTuple):
    """What is made of the arguments."""

    engine: Mapping[str, Any]
    """Settings of the engine."""
    handover: KvHandoverConfig | None
    lease: LeaseConfig


def kv_of(given: Mapping[str, Any], environment: Mapping[str, str], *, block_size: int) -> KvSettings:
    """Return how KV is handed over and kept.

    Raises:
        ValueError: the arguments ask for what is not simulated, or for what vLLM would quietly drop.
    """
    config, size = given.get("kv_transfer_config"), given.get("kv_offloading_size")
    nixl = next((each for each in children(config) if each.get(NAME) in NIXL), None)
    if nixl is not None and size is not None:
        raise ValueError(
            f"--kv-offloading-size {size:g}: vLLM would drop {nixl[NAME]} for it; expected a MultiConnector of "
            f"{nixl[NAME]} and {OFFLOADING}"
        )
    engine = _of_host_memory(config, size, block_size)
    if nixl is None:
        return KvSettings(engine, None, LeaseConfig())
    assert config is not None
    if (nixl.get(EXTRA) or {}).get(BIDIRECTIONAL):
        raise ValueError(
            f"--kv-transfer-config.{EXTRA}.{BIDIRECTIONAL} true: an instance that computes prompts reads no KV here; leave it out"
        )
    role = nixl.get("kv_role") or config.get("kv_role")
    if role is None:
        raise ValueError("--kv-transfer-config.kv_role: expected one of kv_producer, kv_consumer, kv_both")
    if role != "kv_both":
        engine["kv_role"] = role
    return KvSettings(engine, _handover(role, config, environment), _lease(nixl))


def describes_chunks(given: Mapping[str, Any]) -> bool:
    """Return whether KV events of host memory have the tokens of its chunks."""
    config = given.get("kv_transfer_config")
    if given.get("kv_offloading_size") is not None:
        return bool(_extra(config).get(DESCRIBING))
    return any(bool((each.get(EXTRA) or {}).get(DESCRIBING)) for each in children(config))


def _of_host_memory(config: Mapping[str, Any] | None, size: float | None, block_size: int) -> dict[str, Any]:
    """Return the engine's settings of host memory, and of loads that fail."""
    keeping = [each for each in children(config) if each.get(NAME) not in NIXL]
    policy = {name: config[name] for name in ("kv_load_failure_policy",) if config is not None and name in config}
    if size is not None:
        keeping = [{NAME: OFFLOADING, EXTRA: _extra(config) | {"cpu_bytes_to_use": size * GIB}}]
    if not keeping:
        return policy
    if len(keeping) > 1:
        raise ValueError(f"--kv-transfer-config has {len(keeping)} connectors that keep KV; expected one {OFFLOADING}")
    if (name := keeping[0].get(NAME)) != OFFLOADING:
        raise ValueError(
            f"--kv-transfer-config.kv_connector {name}: expected {NIXL[0]}, which hands KV to other instances, {OFFLOADING}, "
            f"which keeps it in host memory, or {MULTI} of both"
        )
    entries = {key: value for key, value in keeping[0].items() if key not in OF_ALL}
    try:
        return settings_of({"kv_role": "kv_both"} | entries, block_size=block_size) | policy
    except ValueError as error:
        raise ValueError(f"--kv-transfer-config: {error}") from None


def _extra(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what is said of host memory beside its size."""
    return {} if config is None or config.get(NAME) == MULTI else dict(config.get(EXTRA) or {})


def _handover(role: Any, config: Mapping[str, Any], environment: Mapping[str, str]) -> KvHandoverConfig:
    port = environment.get(PORT, "5600")
    if not port.isdigit():
        raise ValueError(f"{PORT}={port}: expected a port")
    try:
        return KvHandoverConfig(
            role=role,
            engine_id=config.get("engine_id"),
            side_channel_host=environment.get(HOST, "localhost"),
            side_channel_port=int(port),
        )
    except ValueError as error:
        raise ValueError(f"--kv-transfer-config: {error}") from None


def _lease(nixl: Mapping[str, Any]) -> LeaseConfig:
    duration = (nixl.get(EXTRA) or {}).get("kv_lease_duration")
    return LeaseConfig() if duration is None else LeaseConfig(kv_lease_duration_s=float(duration))
