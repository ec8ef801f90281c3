"""A mocker as a peer of others in vLLM's way: who it is to them, and what is passed between them.

A client, mostly a proxy, asks one instance to compute a prompt, gets `kv_transfer_params` with its answer, and sends them to
another with the same prompt. They have the names and types that vLLM's NixlConnector returns.
"""

import os
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from foundation.settings import check_settings
from serving.engines.kv.params import RequestPart, WantedKv
from serving.engines.side_channel import is_loopback
from serving.runtime.world import world
from serving.worker.protocol import PreprocessedRequest

SECRET = "DYNABENCH_KV_SECRET"  # noqa: S105 (the name of a variable)
MIN_SECRET_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class KvHandoverConfig:
    """How KV is handed to other instances, as in vLLM's --kv-transfer-config with NixlConnector."""

    role: Literal["kv_producer", "kv_consumer", "kv_both"] = "kv_both"
    """Whether other instances read KV from this one, it reads from them, or both."""

    engine_id: str | None = None
    """Name of this instance in kv_transfer_params (none: drawn at start)."""

    side_channel_host: str = "localhost"
    """Address at which others find this instance. Environment: VLLM_NIXL_SIDE_CHANNEL_HOST."""

    side_channel_port: Annotated[int, Meta(ge=0, le=65535)] = 5600
    """Port at which they do; rank N adds N (0: any free one). Environment: VLLM_NIXL_SIDE_CHANNEL_PORT."""

    def __post_init__(self) -> None:
        """Reject invalid values."""
        check_settings(self)
        secret_of(self.side_channel_host)


def secret_of(host: str) -> str:
    """Return what instances that hand KV to each other across hosts all know, from the environment.

    Raises:
        ValueError: there is none, or too short a one, and other hosts reach this one.
    """
    secret = os.environ.get(SECRET, "")
    num_bytes = len(secret.encode())
    if secret and num_bytes < MIN_SECRET_BYTES:
        raise ValueError(f"{SECRET} has {num_bytes} bytes; expected at least {MIN_SECRET_BYTES}")
    if not secret and not is_loopback(host):
        raise ValueError(
            f"VLLM_NIXL_SIDE_CHANNEL_HOST is {host}, which other hosts may reach; expected {SECRET}, the same text of at "
            f"least {MIN_SECRET_BYTES} bytes at all instances, or a loopback address"
        )
    return secret


class NixlPeer(NamedTuple):
    """What one rank is to its peers."""

    role: Literal["kv_producer", "kv_consumer", "kv_both"]
    engine_id: str
    host: str
    port: int
    secret: str
    tp_size: int = 1


def peers_of(config: KvHandoverConfig, *, num_ranks: int, first: int, size: int, tp_size: int) -> list[NixlPeer]:
    """Return what each rank here is to its peers; vLLM adds the number of a rank to the name if there are several."""
    id, secret = config.engine_id or str(world().uuid()), secret_of(config.side_channel_host)
    return [
        NixlPeer(
            config.role,
            f"{id}_dp{rank}" if size > 1 else id,
            config.side_channel_host,
            config.side_channel_port and config.side_channel_port + rank,
            secret,
            tp_size,
        )
        for rank in range(first, first + num_ranks)
    ]


def part_of(request: PreprocessedRequest) -> RequestPart | None:
    """Return which part of a request is done here, None if all of it.

    Raises:
        ValueError: its parameters cannot be honoured. (vLLM trusts them: its engine waits forever, or ends.)
    """
    params = request.kv_transfer_params or {}
    is_read, is_prefill = bool(params.get("do_remote_prefill")), bool(params.get("do_remote_decode"))
    if is_read and is_prefill:
        raise ValueError("kv_transfer_params ask for both do_remote_decode and do_remote_prefill; expected one of them")
    if is_prefill and params.get("remote_block_ids"):
        raise ValueError(
            "kv_transfer_params ask for do_remote_decode and have remote_block_ids; expected none: an instance that computes "
            "prompts reads no KV, as bidirectional_kv_xfer is not simulated"
        )
    if is_prefill:
        return RequestPart(True, is_answered=True, name=request.request_id)
    if not is_read:
        return None
    try:
        return RequestPart(False, wanted=msgspec.convert(params, WantedKv))
    except msgspec.ValidationError as error:
        raise ValueError(f"kv_transfer_params: {error}") from error


def answer_of(
    peer: NixlPeer, name: str, blocks: list[int], *, num_prompt: int, num_output: int, num_cached: int
) -> dict[str, Any]:
    """Return the parameters with which an instance answers: where another finds the KV.

    The last token of the answer has no KV. As in vLLM, cached tokens are only there if the answer has one token.
    """
    params: dict[str, Any] = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [blocks],
        "remote_engine_id": peer.engine_id,
        "remote_request_id": name,
        "remote_host": peer.host,
        "remote_port": peer.port,
        "tp_size": peer.tp_size,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": num_prompt + num_output - 1,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
    }
    return params | ({"remote_prefill_cached_tokens": num_cached} if num_output == 1 else {})
