"""The content of `kv_transfer_params`: who computes a prompt, where its KV is, and in which room both workers meet.

Names are vLLM's where they mean the same.
"""

from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from serving.worker.protocol import PreprocessedRequest

ROOM = "bootstrap_room"
AGENT = "bootstrap_agent"

Name = Annotated[str, Meta(min_length=1, max_length=1024)]
Id = Annotated[str, Meta(min_length=1, max_length=64)]
Whole = Annotated[int, Meta(ge=0)]
RoomNumber = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class RemoteKv(msgspec.Struct, kw_only=True, frozen=True):
    """Where the KV of a prompt is, from the answer of its prefill worker."""

    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    remote_engine_id: Id
    remote_request_id: Id
    remote_block_ids: Annotated[list[Whole], Meta(min_length=1, max_length=1)]
    """What is read from the memory of the agent: the place of a ticket (`tickets.py`) ..."""
    remote_ticket_number: Whole
    """... and the number on it."""
    remote_num_tokens: Whole
    remote_num_blocks: Whole
    remote_prefill_cached_tokens: Whole
    remote_block_bytes: Annotated[float, Meta(ge=0)]
    remote_num_gpus: Annotated[int, Meta(ge=1)]
    """How many GPUs of that worker send."""
    remote_lease_s: Annotated[float, Meta(gt=0, le=1e9)] | None
    """The lease's duration, if it can be renewed."""
    remote_agent: dict[str, Any]

    def check(self, *, num_tokens: int, num_blocks: int, block_bytes: float) -> None:
        """Check that this is the KV of a prompt.

        Raises:
            ValueError: it is the KV of another prompt.
        """
        if self.remote_num_tokens != num_tokens:
            raise ValueError(f"KV of {self.remote_num_tokens} tokens for a prompt of {num_tokens}")
        if self.remote_num_blocks != num_blocks:
            raise ValueError(f"KV in {self.remote_num_blocks} blocks for a prompt of {num_blocks}")
        if self.remote_block_bytes != block_bytes:
            raise ValueError(
                f"KV blocks of {self.remote_block_bytes:g} bytes, but this worker's have {block_bytes:g}: are --model, "
                "--kv-bytes-per-token and --block-size the same?"
            )


class Meeting(msgspec.Struct, kw_only=True, frozen=True):
    """Where the two workers of a request meet if both are called at once."""

    bootstrap_room: RoomNumber
    bootstrap_agent: dict[str, Any] = {}
    """The prefill worker's."""


class WantedKv(msgspec.Struct, frozen=True):
    """The KV of a prompt as a client names it that sends requests from one mocker to another, in vLLM's parameters."""

    remote_engine_id: Name
    remote_request_id: Name
    remote_host: Annotated[str, Meta(min_length=1, max_length=255)]
    remote_port: Annotated[int, Meta(ge=1, le=65535)]
    remote_block_ids: Annotated[list[Any], Meta(min_length=1)]
    remote_prefill_cached_tokens: Any = None

    @property
    def num_cached_tokens(self) -> int | None:
        """How many tokens of the prompt the other instance found in its cache, if it is known."""
        found = self.remote_prefill_cached_tokens
        return found if isinstance(found, int) else None


class RequestPart(NamedTuple):
    """The part of a request that one of two workers does: prompt or answer."""

    is_prefill: bool
    meeting: Meeting | None = None
    kv: RemoteKv | None = None
    wanted: WantedKv | None = None
    """KV whose place is to be asked for."""
    is_answered: bool = False
    """Whether its client reads the answer of the one who computes the prompt."""
    name: str = ""
    """The start of the name by which others will ask for its KV."""


def part_of(request: PreprocessedRequest) -> RequestPart | None:
    """Return which part of a request a worker does, None if all of it.

    Raises:
        ValueError: its parameters make no sense.
    """
    return parse(request.kv_transfer_params)


def parse(params: dict[str, Any] | None) -> RequestPart | None:
    """Return which part of a request its parameters ask for, None if one worker does all of it.

    Raises:
        ValueError: they make no sense.
    """
    if not params:
        return None
    is_prefill, is_decode = params.get("do_remote_decode") is True, params.get("do_remote_prefill") is True
    if is_prefill and is_decode:
        raise ValueError("kv_transfer_params ask for both do_remote_decode and do_remote_prefill; expected one of them")
    if not (is_prefill or is_decode):
        return None
    try:
        if params.get(ROOM) is not None:
            return RequestPart(is_prefill, meeting=msgspec.convert(params, Meeting))
        return RequestPart(is_prefill, kv=None if is_prefill else msgspec.convert(params, RemoteKv))
    except msgspec.ValidationError as error:
        raise ValueError(f"kv_transfer_params: {error}") from error
