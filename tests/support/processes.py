"""What is known of other processes."""

from pathlib import Path

from serving.engines.processes import descendants
from tests.support import warm


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(process):
    """Return the processes that one started and that run, with their words, oldest first of each kind: fresh, forked."""
    fresh = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return {int(pid): Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in fresh} | warm.children(
        process.pid
    )


def below(process):
    """Return all processes that run because of one: what it started, and what those started."""
    forked = warm.children(process.pid)
    return {pid for start in (process.pid, *forked) for pid in descendants(start)} | {*forked}
