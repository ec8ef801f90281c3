"""SGLang as a prefill or decode worker: both are called at once and meet in a room at the prefill worker's bootstrap server.

prefill worker                              decode worker
waits in the room             <----------   allocates blocks, says where they are
computes the prompt           ---------->   receives KV and token 1
ends: all was sent                          sends token 1, and the rest
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from serving.engines.side_channel import LOOPBACK, Name, Port
from serving.model.card import Role
from serving.runtime.messages import CallError

PORT = "disaggregation_bootstrap_port"
WILDCARDS = ("0.0.0.0", "::")  # noqa: S104


class RoomMeeting(msgspec.Struct):
    """Where the two workers of a request meet; the names are SGLang's."""

    bootstrap_host: Name
    bootstrap_port: Port
    bootstrap_room: Annotated[int, Meta(ge=0, le=2**63 - 1)]


def role_arguments(role: Role) -> dict[str, Any]:
    """Return the SGLang arguments for a role."""
    if role == "aggregated":
        return {}
    return {"disaggregation_mode": role, "disaggregation_transfer_backend": "nixl"}


def meeting_host(arguments: Mapping[str, Any]) -> str:
    """Return where a prefill worker's bootstrap server listens: with several nodes, on the first.

    Raises:
        ValueError: others cannot use that address.
    """
    leader = str(arguments.get("dist_init_addr") or "").rpartition(":")[0]
    host = str(arguments.get("host") or leader or LOOPBACK)
    if host in WILDCARDS:
        raise ValueError(f"out=sglang --role: workers of the other role cannot call {host}: set this host's address")
    return host


def room(request: Mapping[str, Any], role: Role) -> dict[str, Any]:
    """Return where a request's workers meet, as arguments for `async_generate`.

    Raises:
        CallError: the request does not say where; SGLang's workers can only serve it together.
    """
    if role == "aggregated":
        return {}
    other = "decode" if role == "prefill" else "prefill"
    params = request.get("kv_transfer_params") or {}
    if "bootstrap_room" not in params:
        raise CallError(f"SGLang's {role} workers cannot serve a request without a {other} worker", "unavailable")
    try:
        return msgspec.to_builtins(msgspec.convert(params, RoomMeeting))  # type: ignore[no-any-return]
    except msgspec.ValidationError as error:
        raise CallError(f"kv_transfer_params: {error}", "invalid") from error
