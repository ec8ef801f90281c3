"""Stop strings, including those that span tokens."""


class StopMatcher:
    """Lets text through up to a stop string; holds back what may be the start of one."""

    def __init__(self, stops: list[str], *, shows_stop: bool = False) -> None:
        self.matched = ""
        """The stop string that has stopped it."""
        self._stops = stops
        self._shows_stop = shows_stop
        self._held = ""

    @property
    def has_stopped(self) -> bool:
        """Whether a stop string has come."""
        return bool(self.matched)

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Add text; return what can be let through now. A stop string, unless it is shown, and the text after it are dropped.

        A stop string counts if its end is in text that may stop, as in vLLM.
        """
        if self.has_stopped:
            return ""
        old = len(self._held)
        text = self._held + text
        starts = {stop: text.find(stop, max(old - len(stop) + 1, 0)) for stop in self._stops} if may_stop else {}
        starts = {stop: start for stop, start in starts.items() if start >= 0}
        if starts:
            self.matched = min(starts, key=starts.__getitem__)
            self._held = ""
            end = starts[self.matched]
            return text[: end + len(self.matched) if self._shows_stop else end]
        held = max(_overlap(text, stop) for stop in self._stops)
        cut = len(text) - held
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Return what was held back: the answer ended without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of the text that starts a stop string."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
