"""The logs of a rehearsal on stderr: each line with its virtual time, as in the picture, and the program whose it is."""

import asyncio
import logging

from dynabench.rehearsal.stage.stage import UP_S
from dynabench.rehearsal.virtual_time.loop import START_S
from serving.runtime.memory.node import NODE


def show_logs() -> None:
    """Print what programs log from now on."""
    handler = logging.StreamHandler()
    handler.setFormatter(_OnVirtualTime("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class _OnVirtualTime(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        try:
            at_s = asyncio.get_running_loop().time() - START_S - UP_S
        except RuntimeError:  # nothing is rehearsed now
            return super().format(record)
        node = NODE.get()
        return f"{at_s:.3f} s {'' if node is None else node.name + ' '}{super().format(record)}"
