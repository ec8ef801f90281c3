"""Trouble that lasts is logged once, again if it changes, and once more when it is over."""

from logging import Logger


class Alarm:
    """The trouble with one thing."""

    def __init__(self, log: Logger, over: str) -> None:
        """Start without trouble; `over` is the message when trouble is over."""
        self._log = log
        self._over = over
        self._trouble = ""

    def update(self, trouble: str) -> None:
        """Log what is wrong now, or that nothing is any more (""), if that is news."""
        if trouble == self._trouble:
            return
        self._trouble = trouble
        if trouble:
            self._log.warning("%s", trouble)
        else:
            self._log.info("%s", self._over)
