"""What a flight asks of the driver that carries it out: on a clock, or on sockets.

An effect without fields needs none: the driver finds the rest in the flight's legs.
"""

from dataclasses import dataclass
from typing import Final

from serving.life.leg import Leg, Stage


@dataclass(frozen=True, slots=True)
class Place:
    """Choose a worker and book it; then say `placed`, or `nobody`. Between the two the request may wait at the router."""

    stage: Stage


@dataclass(frozen=True, slots=True)
class Send:
    """Send the request to the worker that was chosen."""

    stage: Stage


@dataclass(frozen=True, slots=True)
class Release:
    """Release what is booked at a router, or stop waiting there; do nothing if there is nothing to release."""

    stage: Stage


@dataclass(frozen=True, slots=True)
class Abort:
    """Take the request from a worker. If it is waiting for KV there, none will arrive."""

    leg: Leg


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep the KV at a worker that leaves until `LetGo`."""

    leg: Leg


@dataclass(frozen=True, slots=True)
class LetGo:
    """Free the KV that a worker keeps."""

    leg: Leg


@dataclass(frozen=True, slots=True)
class Transfer:
    """Start to read KV, into the blocks of the decode worker; say `kv_arrived` at the end."""

    num_blocks: int | None = None
    """How many blocks, if they are not all those that the decode worker lacks."""
    is_last: bool = True
    """Whether that is all; otherwise `Extend` follows."""


@dataclass(frozen=True, slots=True)
class Extend:
    """Read more blocks in the transfer that has begun."""

    num_blocks: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class Drop:
    """End the transfer early."""


@dataclass(frozen=True, slots=True)
class Miss:
    """The KV that was to be read is gone: say `kv_missed` once the decode worker can hear it."""

    leg: Leg


@dataclass(frozen=True, slots=True)
class Deliver:
    """Report to a decode worker that all of the KV it waits for has arrived, or only some blocks."""

    leg: Leg
    num_valid_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """At that time, say `lease_over`, unless the decode worker renews the lease."""

    leg: Leg
    until_s: float


@dataclass(frozen=True, slots=True)
class DecodeLater:
    """After this long, say `to_decode`."""

    leg: Leg
    after_s: float


@dataclass(frozen=True, slots=True)
class Begin:
    """Say `begin` again: now, or in the next turn after whatever else happens at this instant."""

    is_next: bool = True


@dataclass(frozen=True, slots=True)
class Wait:
    """Say `wake` when a worker has come, or `patience_over` at that time.

    A driver that is not notified of new workers may poll.
    """

    until_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer is complete."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The request has failed; `kind` is that of a `CallError`, and the leg is where it failed, if that was at a worker."""

    message: str
    kind: str
    leg: Leg | None = None


Effect = (
    Place | Send | Release | Abort | Keep | LetGo | Transfer | Extend | Drop | Miss | Deliver | Lease | DecodeLater | Begin
    | Wait | Answer | Fail
)  # fmt: skip
Effects = tuple[Effect, ...]

NOTHING: Final[Effects] = ()
PLACE_PREFILL: Effects = (Place("prefill"),)
PLACE_DECODE: Effects = (Place("decode"),)
SEND_PREFILL: Effects = (Send("prefill"),)
SEND_DECODE: Effects = (Send("decode"),)
SEND_BOTH: Effects = (Send("decode"), Send("prefill"))
RELEASE_PREFILL: Effects = (Release("prefill"),)
RELEASE_BOTH: Effects = (Release("prefill"), Release("decode"))
BEGIN: Effects = (Begin(),)
TRANSFER: Effects = (Transfer(),)
ANSWER: Effects = (Release("decode"), Answer("stop"))
