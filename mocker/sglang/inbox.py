"""Requests that were sent and that the scheduler has not seen, because it looks for new ones only now and then.

Source: SGLang 0.5.23, `srt/managers/scheduler_components/recv_skipper.py` (`SchedulerRecvSkipper.handle`), and its weights in
`srt/environ.py` (`SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_*`). No recording has an interval of more than 1.
"""

from typing import Final

from mocker.sglang.request import Request
from mocker.sglang.rows import Rows

AT_ONCE: Final = 1000
"""What an iteration with prompts counts; one without counts 1."""


class Inbox:
    """Opened when `scheduler_recv_interval` iterations were counted; then the count begins again."""

    __slots__ = ("_count", "_interval", "has_prompts_elsewhere", "requests")

    def __init__(self, interval: int) -> None:
        self.requests: list[Request] = []
        self.has_prompts_elsewhere = False
        """Whether another rank of attention DP computed prompts in the iteration before, which counts for all."""
        self._interval = interval
        self._count = 0

    @property
    def is_direct(self) -> bool:
        """Whether every iteration looks for new requests."""
        return self._interval == 1

    @property
    def num_until_open(self) -> int:
        """Iterations, the next one included, until it is opened, if all decode."""
        return self._interval - self._count

    def open(self, last: Rows | None) -> list[Request]:
        """Count an iteration, after a given one, and return the requests that it sees."""
        is_decode = last is None or last.kind == "decode"
        self._count += 1 if is_decode and not self.has_prompts_elsewhere else AT_ONCE
        if self._count < self._interval:
            return []
        self._count = 0
        taken, self.requests = self.requests, []
        return taken

    def pass_by(self, num_iterations: int) -> None:
        """Count iterations that decode, in which nothing is sent."""
        self._count = (self._count + num_iterations) % self._interval
