"""vLLM as a prefill or decode worker: what its KV connector is told, and what the two sides pass to each other.

prefill worker                                      decode worker
computes the prompt, holds its KV under a lease
answers kv_transfer_params  ----- frontend ----->   renews the lease, allocates blocks
its side channel            <--------------------   asks once where the memory is
its memory                  <--------------------   reads the blocks, says so
frees them                                          computes the prompt's last token, answers
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from foundation.settings import Count, Whole
from serving.engines.side_channel import LOOPBACK, Name, Port, PortReservation, defaults, ucx_at
from serving.engines.vllm.tiers import OF_ALL, Connector, beside, children, is_tier
from serving.role import KV_ROLES, Role
from serving.runtime.messages import CallError
from serving.runtime.world import world
from serving.worker.engine import KvTransfers

CONNECTOR = "NixlConnector"
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}

HOST, PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"

OF_ANSWERS = ("logprobs", "prompt_logprobs", "guided_decoding")
"""Sampling options of no use to a worker whose one token nobody sees."""

LEASE_S = 30.0
"""vLLM's default."""

LEASE_END = "lease_end"
"""Our addition to vLLM's `kv_transfer_params`: when the lease ends unless a decode worker renews it (s since 1970)."""

SAFE_SHARE = 1 / 3
"""Share of a lease that must remain when a decode worker gets a request: it renews all its leases together, every sixth of a lease."""


class NixlKv(msgspec.Struct):
    """Where the KV of a prompt is, in the form that a decode worker's NIXL connector reads; it trusts the types."""

    remote_engine_id: Name
    remote_request_id: Name
    remote_host: Name
    remote_port: Port
    remote_block_ids: list[list[Whole]]
    remote_num_tokens: Whole | None = None
    tp_size: Count = 1
    dcp_size: Count = 1
    pp_size: Count = 1
    lease_end: float | None = None


def transfer_config(role: Role, given: Mapping[str, Any] | None, tier: Connector | None = None) -> Connector | None:
    """Return vLLM's `kv_transfer_config` for a role, together with a tier; the user's settings take precedence."""
    config = None if given is None else dict(given)
    if role == "aggregated":
        return beside(config, tier)
    # A decode worker that cannot read the KV computes the prompt itself; vLLM's default is to fail the request.
    ours = {"kv_connector": CONNECTOR, "kv_role": KV_ROLES[role], "kv_load_failure_policy": "recompute"}
    if config is not None and is_tier(config):
        policy = {name: config.pop(name) for name in OF_ALL if name in config}
        return beside(beside(ours | policy, config), tier)
    return beside(ours | (config or {}), tier)


def uses_nixl(config: Mapping[str, Any] | None) -> bool:
    """Whether vLLM's NIXL connector moves the KV."""
    return _nixl(config) is not None


def _nixl(config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    return next((each for each in children(config) if each.get("kv_connector") == CONNECTOR), None)


@contextlib.contextmanager
def side_channel(num_ranks: int) -> Iterator[None]:
    """Let vLLM start with its own side channel on the loopback interface, where peers ask how to reach its KV.

    `VLLM_NIXL_SIDE_CHANNEL_HOST` and `VLLM_NIXL_SIDE_CHANNEL_PORT` set another address.
    """
    host = os.environ.get(HOST, LOOPBACK)
    with (
        PortReservation(host, num_ranks) as ports,
        defaults({HOST: host, PORT: str(ports.first)} | ucx_at(host)),
    ):
        yield


def lease_duration_s(config: Mapping[str, Any]) -> float | None:
    """Return how long KV is held for a silent decode worker, None if the connector has no leases."""
    nixl = _nixl(config)
    if nixl is None:
        return None
    return float((nixl.get("kv_connector_extra_config") or {}).get("kv_lease_duration", LEASE_S))


def hand_off(params: dict[str, Any] | None, lease_s: float | None) -> dict[str, Any]:
    """Return a prefill worker's answer, made from what vLLM returned at the end of a request.

    Raises:
        CallError: it returned nothing.
    """
    if params is None:
        raise CallError(
            "it does not say where the KV is: either it aborted the prompt, or it was started without --kv-transfer-config",
            "engine",
        )
    return params if lease_s is None else params | {LEASE_END: world().wall_s() + lease_s}


def connector_params(params: dict[str, Any] | None, role: Role, lease_s: float | None) -> dict[str, Any] | None:
    """Return a request's parameters for vLLM's connector; none if the KV may be gone before vLLM renews its lease.

    vLLM would then read whatever is there. Without these parameters it computes the prompt itself.
    """
    if role == "prefill":
        return params or PREFILL
    if params is None:
        return None
    end = params.get(LEASE_END)
    if lease_s is not None and isinstance(end, int | float) and end - world().wall_s() < lease_s * SAFE_SHARE:
        return None
    return {name: value for name, value in params.items() if name != LEASE_END}


def check_types(params: dict[str, Any]) -> None:
    """Refuse parameters that vLLM's NIXL connector would trip over.

    Raises:
        CallError: they are not a prefill worker's answer.
    """
    if params.get("do_remote_prefill"):
        try:
            msgspec.convert(params, NixlKv)
        except msgspec.ValidationError as error:
            raise CallError(f"kv_transfer_params: {error}", "invalid") from error


def counted(before: KvTransfers, stats: Any) -> KvTransfers:
    """Add what the NIXL connector did in a step of vLLM's scheduler to what was moved before."""
    found, stages = stats.kv_connector_stats or {}, stats.num_kv_fetch_reqs_by_stage
    # A MultiConnector lists figures by each connector's class name, which is not the name in NIXL's configuration.
    found = next((each for name, each in found.items() if name.startswith("Nixl")), found)

    def number(*names: str) -> int:
        return sum(len(found.get(name, ())) for name in names)

    return before._replace(
        num_waiting=stages.get("waiting_to_start", 0),
        num_loading=stages.get("in_progress", 0),
        num_read=before.num_read + number("transfer_duration"),
        num_failed=before.num_failed + number("num_failed_transfers", "num_failed_handshakes"),
        num_expired=before.num_expired + number("num_kv_expired_reqs"),
        num_bytes=before.num_bytes + int(sum(found.get("bytes_transferred", ()))),
        seconds=before.seconds + sum(found.get("transfer_duration", ())),
    )


def prompt_only(request: dict[str, Any]) -> dict[str, Any]:
    """Return a request for which a prefill worker computes only the prompt."""
    conditions = request["stop_conditions"] | {"max_tokens": 1, "min_tokens": 0, "ignore_eos": True}
    options = {name: value for name, value in request["sampling_options"].items() if name not in OF_ANSWERS}
    return request | {"stop_conditions": conditions, "sampling_options": options}


def stage_times(stats: Any, *, is_decode: bool) -> dict[str, float]:
    """Return when each thing happened (s since vLLM's scheduler got the request); it does not report transfers."""
    if stats is None:
        return {}
    begun, computed = stats.scheduled_ts - stats.queued_ts, stats.first_token_ts - stats.queued_ts
    return {"decode_start": begun} if is_decode else {"admitted": begun, "prefill_end": computed}
