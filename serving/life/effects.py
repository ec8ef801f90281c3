"""What a flight asks of the driver that carries it out: on a clock, or on sockets.

Those without fields of their own say all: the driver finds the rest in the flight's legs.
"""

from dataclasses import dataclass
from typing import Literal

Stage = Literal["prefill", "decode"]
State = Literal["sought", "chosen", "sent", "kept", "expired", "gone", "over"]


class Leg:
    """A request's stay at one worker.

    sought --placed--> chosen --send--> sent --ended--> over
                                         |
                                         +--its KV waits to be read--> kept --> expired, gone or over (it was read)
    """

    __slots__ = ("call", "has_begun", "has_blocks", "is_moved", "only", "progress", "reads_kv", "slot", "state")

    def __init__(self, only: int | None = None, *, reads_kv: bool = False, is_moved: bool = False) -> None:
        """Look for a worker.

        Args:
            only: the worker that it has to be, if that is settled.
            reads_kv: whether the KV of its prompt comes from another worker.
            is_moved: whether that is a decode worker which leaves, and had begun the answer.
        """
        self.only = only
        self.reads_kv = reads_kv
        self.is_moved = is_moved
        self.state: State = "sought"
        self.slot = -1
        """The worker, by the number that its router knows; -1 until one is chosen."""
        self.has_blocks = False
        """Whether it has blocks for that KV and waits for it."""
        self.has_begun = False
        """Whether it has produced a token."""
        self.progress = (0, 0)
        """Tokens that are computed and blocks that are sent, where a prompt is sent chunk by chunk."""
        self.call: object = None
        """What the driver has there: an engine's sequence, or an open call."""


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
    """Take the request from a worker; if it waits for KV there, that will not come."""

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
class Pause:
    """After this long, say `to_decode`."""

    leg: Leg
    after_s: float


@dataclass(frozen=True, slots=True)
class Begin:
    """Say `begin` again: now, or in the next turn after whatever else happens at this instant."""

    is_next: bool = True


@dataclass(frozen=True, slots=True)
class Wait:
    """Say `wake` when a worker has come, or `patience_over` at that time. Who cannot see workers come may look often."""

    until_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer is complete."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The request has failed; `kind` is that of a `CallError`."""

    message: str
    kind: str


Effect = (
    Place | Send | Release | Abort | Keep | LetGo | Transfer | Extend | Drop | Miss | Deliver | Lease | Pause | Begin
    | Wait | Answer | Fail
)  # fmt: skip
Effects = tuple[Effect, ...]
