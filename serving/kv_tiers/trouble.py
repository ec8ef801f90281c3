"""Lasting trouble is logged once, and once more when it is over."""

import logging

from serving.runtime.world import world

log = logging.getLogger(__name__)

QUIET_S = 60.0
"""Trouble that returns within this time is not logged again."""


class Trouble:
    """The current trouble with one thing."""

    def __init__(self, what: str, over: str) -> None:
        """Start without trouble.

        Args:
            what: message when it begins; the reason is appended.
            over: message when it is over.
        """
        self.is_on = False
        self._what = what
        self._over = over
        self._is_said = False
        self._said_s = -QUIET_S

    def begin(self, why: str) -> None:
        """Log what is wrong, unless there already is trouble or was a moment ago."""
        now = world().now()
        if not self.is_on and now - self._said_s >= QUIET_S:
            self._said_s, self._is_said = now, True
            log.warning("%s: %s", self._what, why)
        self.is_on = True

    def end(self) -> None:
        """Log that the trouble is over, if it was logged."""
        if self.is_on and self._is_said:
            log.info("%s", self._over)
            self._is_said = False
        self.is_on = False
