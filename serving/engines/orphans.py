"""A plugin that vLLM loads in each of its processes: those of a worker of ours end when the worker is gone.

vLLM's engine process does not notice that whoever started it was killed, and would keep its memory for ever.
"""

import os
import threading
import time

WORKER = "DYNABENCH_WORKER_PID"
POLL_S = 0.5


def end_with_worker() -> None:
    """In a child process of the worker that the environment names: end once that is gone."""
    if os.environ.get(WORKER) == str(os.getppid()):
        threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os._exit(1)
