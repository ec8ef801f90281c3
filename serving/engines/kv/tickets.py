"""Tickets: what a prefill worker's memory says about the KV that it keeps for others.

    ticket:   number | digest of the prompt's block keys

A number is never used twice, and a ticket is wiped with its KV. So whoever reads it knows whether that KV is still kept.
"""

import heapq
import struct
from collections.abc import Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

TICKET = struct.Struct("<QQ")
MAX_TICKETS = 1 << 16
NUM_LANDINGS = 256
"""Places for tickets that are being read."""

NUM_BYTES = (MAX_TICKETS + NUM_LANDINGS) * TICKET.size
"""Memory of an agent with both; pages that are never written cost nothing."""


class Ticket(NamedTuple):
    """A ticket, and the place where it is."""

    place: int
    number: int
    digest: int


def digest_of(keys: Sequence[int]) -> int:
    """Return the digest of a prompt's block keys."""
    return xxh3_64_intdigest(struct.pack(f"<{len(keys)}Q", *keys))


class Tickets:
    """The tickets of one worker."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._free = list(range(MAX_TICKETS))  # a heap: low ones first, so that memory is reused
        self._num_issued = 0

    @property
    def num_free(self) -> int:
        """How many more may be issued."""
        return len(self._free)

    def issue(self, keys: Sequence[int]) -> Ticket:
        """Write a ticket for a prompt."""
        self._num_issued += 1
        ticket = Ticket(heapq.heappop(self._free), self._num_issued, digest_of(keys))
        TICKET.pack_into(self._memory, ticket.place * TICKET.size, ticket.number, ticket.digest)
        return ticket

    def wipe(self, ticket: Ticket) -> None:
        """Wipe a ticket: its KV is not kept any more."""
        start = ticket.place * TICKET.size
        self._memory[start : start + TICKET.size] = bytes(TICKET.size)
        heapq.heappush(self._free, ticket.place)


def find_fault(found: memoryview, number: int, digest: int) -> str:
    """Return what is wrong with a ticket that was read, "" if it is the one that was promised for this prompt."""
    found_number, found_digest = TICKET.unpack(found)
    if not found_number:
        return "it is not there any more"
    if found_number != number:
        return "that of another prompt has taken its place"
    return "" if found_digest == digest else "it is that of another prompt"
