"""Processes that do not outlive their parents, and how many cores there are for them."""

import ctypes
import math
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Have Linux kill this process when its parent (of this process id) ends in any way; elsewhere do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before we asked
            os._exit(1)


def num_cores() -> int:
    """Return how many cores this process may use: those of its affinity, within its control group's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, _quota(Path("/sys/fs/cgroup/cpu.max")) or allowed)


def _quota(file: Path) -> int | None:
    """Return how many cores a control group's `QUOTA PERIOD` comes to, if it has one."""
    try:
        quota, period = file.read_text().split()
        return max(math.ceil(int(quota) / int(period)), 1)
    except (OSError, ValueError):  # no such file outside a group, and "max" where there is no quota
        return None
