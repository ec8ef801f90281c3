"""How many requests a rank runs at once, learned from its load reports, and so how many more may wait there."""

KV_FULL = 0.9
"""From this share of KV blocks in use, a queue is blamed on them."""

SHORT_S = 0.25
"""A queue that is served in this time is never too long, however short the requests are."""


class RankCapacity:
    """What one rank runs at once: `max_num_seqs`, unless KV blocks or the token budget allow fewer.

    | a report shows | so | `num_running` becomes |
    |---|---|---|
    | nothing runs, nothing waits | the learned value may be out of date | `max_num_seqs` |
    | nothing waits | all requests fit, and more may | twice itself, at most `max_num_seqs` |
    | requests wait | the batch may still be filling | the running requests, if more |
    | requests wait, and a whole batch has ended meanwhile or KV blocks are short | it is full | the most that ran |
    """

    __slots__ = ("_has_queue", "_most", "_num_ended", "_since_s", "ended_per_s", "num_running")

    def __init__(self) -> None:
        self.num_running = 0
        """0 if the rank does not report it."""
        self.ended_per_s = 0.0
        """Requests it ended per second while others waited; 0 if unknown."""
        self._has_queue = False
        self._most = 0
        self._num_ended = 0
        self._since_s = 0.0

    def on_report(self, num_running: int, num_waiting: int, max_num_seqs: int, *, kv_usage: float, now: float) -> None:
        """Record a load report."""
        if not num_waiting:
            self._has_queue = False
            if num_running and self.num_running:
                self.num_running = min(2 * max(self.num_running, num_running), max_num_seqs)
            else:
                self.num_running, self.ended_per_s = max_num_seqs, 0.0
            return
        self.num_running = min(max(self.num_running or max_num_seqs, num_running), max_num_seqs)
        if not self._has_queue:
            self._begin(num_running, now)
            return
        self._most = max(self._most, num_running)
        if now > self._since_s and (self._num_ended >= self._most or kv_usage > KV_FULL):
            self.num_running = min(self._most, max_num_seqs)
            self.ended_per_s = self._num_ended / (now - self._since_s)
            self._begin(num_running, now)

    def _begin(self, num_running: int, now: float) -> None:
        """Start watching the batch while there is a queue."""
        self._has_queue, self._most, self._num_ended, self._since_s = True, max(num_running, 1), 0, now

    def on_end(self) -> None:
        """Record that a request ended which had had its first token."""
        self._num_ended += 1

    def is_full(self, num_requests: int, max_queue_depth: float) -> bool:
        """Return whether the rank has all the requests that may run or wait there.

        By Little's law, as many requests as run at once wait about as long as one request takes. Of very short
        requests more may wait.
        """
        num_running = self.num_running
        longest = max_queue_depth * max(num_running, self.ended_per_s * SHORT_S)
        return num_running > 0 and num_requests >= num_running + longest
