"""Values over a sliding window of time."""

from collections import deque


class Recent:
    """The values of the last `window_s` seconds."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, float]] = deque()

    def add(self, now: float, value: float) -> None:
        """Note a value, and drop those that are too old."""
        self._seen.append((now, value))
        while self._seen[0][0] < now - self._window_s:
            self._seen.popleft()

    @property
    def most(self) -> float:
        """The largest value."""
        return max(value for _, value in self._seen)

    @property
    def mean(self) -> float:
        """The mean value."""
        return sum(value for _, value in self._seen) / len(self._seen)

    def clear(self) -> None:
        """Forget all values."""
        self._seen.clear()
