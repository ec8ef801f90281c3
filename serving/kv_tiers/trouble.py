"""Trouble that lasts is said once, and once when it is over."""

import logging
from time import monotonic

log = logging.getLogger(__name__)

QUIET_S = 60.0
"""Trouble that comes again so soon is not said again."""


class Trouble:
    """What is wrong with one thing now."""

    def __init__(self, what: str, over: str) -> None:
        """Nothing is.

        Args:
            what: to say when something is, with the reason behind it.
            over: what to say when it is over.
        """
        self.is_on = False
        self._what = what
        self._over = over
        self._is_said = False
        self._said_s = -QUIET_S

    def begin(self, why: str) -> None:
        """Say what is wrong, unless something is already or was a moment ago."""
        now = monotonic()
        if not self.is_on and now - self._said_s >= QUIET_S:
            self._said_s, self._is_said = now, True
            log.warning("%s: %s", self._what, why)
        self.is_on = True

    def end(self) -> None:
        """Say that nothing is any more, if it was said that something is."""
        if self.is_on and self._is_said:
            log.info("%s", self._over)
            self._is_said = False
        self.is_on = False
