"""What holds in every rehearsal, whatever goes wrong. Each has a name and a sentence; docs/rehearsal.md lists them."""

from typing import NamedTuple

INVARIANTS = {
    "ends-once": "a request ends exactly once: with its last token, with an error, or as its client leaves",
    "right-text": "an answer has the text that it has without faults; one that breaks off has the beginning of it",
    "unspoiled": "no KV is used whose bytes are not those that were written",
    "counted": "an answer has as many tokens as were asked for, and the usage states these and those of the prompt",
    "bounded": "a request ends within its time: that in which an engine that has it works, 4 s, and the patience of each fault "
    "that meets it (a read of KV: its timeout)",
    "no-loss": "a request fails only if more faults meet it than it may migrate, all workers of a pool are affected at once, "
    "or its frontend or router is",
    "shed": "a frontend never has more requests in progress than its limit, and refuses none before it has that many",
    "booked": "a router never has more requests booked in a pool than its frontend has in progress",
    "elsewhere": "a request that failed at a worker does not go there again while another is there",
    "limited": "no more workers work at a request than it may migrate, and one",
    "left": "a worker that was asked to end and has left discovery takes no more requests",
    "whole": "KV counts as read only if its worker was there until all of it had come",
    "sound": "without faults no KV fails to come, runs out of time or is wrong, and no store counts as away; without bit flips, no chunk of a store is wrong",
    "once": "no engine works twice at one request",
    "wanted": "while nothing is wrong, no engine works at a request that is over for its client",
    "unread": "no connection to a store waits for its next call while an answer is left on it",
    "released": "when all requests are over, none is booked, in progress, in an engine, or has blocks, no KV is held, and no "
    "store keeps room for chunks that do not come",
    "memory": "when all requests are over, no program keeps something for each of them",
    "forgotten": "when leases have run out, discovery and frontends know only workers that run",
    "reached": "when faults are over, discovery knows every worker that runs, and every frontend can route to it",
    "known": "when events have settled, each router knows the blocks that its engines have, and no others",
    "alive": "no program ends by an error or unasked, and none logs an error that is a defect of its own",
    "planned": "no pool has fewer or more workers than its planner may give it, all fit the GPU budget, and no decision "
    "changes a pool by more than the largest step",
    "drained": "a worker that is asked to end does so when its requests are over, or after its drain time",
    "settled": "while no requests come and nothing is wrong, no pool both grows and shrinks",
    "followed": "when faults are over, a planner plans; it knows the workers, and each pool has as many as it ordered, all ready",
    "serves-again": "when all faults are over, every frontend answers a request",
}


class Violation(NamedTuple):
    """An invariant that did not hold."""

    invariant: str
    what: str
    at_s: float | None = None
    """When it was seen (s after the first request could be sent); None: at the end."""

    def __str__(self) -> str:
        """Name it, and say what was found."""
        return f"{self.invariant}: {self.what}"
