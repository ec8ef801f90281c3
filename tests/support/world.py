"""A folder for a test, and the processes that it starts."""

import contextlib
import signal
import tempfile
from pathlib import Path


class World:
    """What is in it ends with the test."""

    def __init__(self, folder):
        self.folder = folder
        self.processes = []

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.communicate()


@contextlib.contextmanager
def new_world(kind):
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:  # short: sockets' names are
        world = kind(Path(folder))
        try:
            yield world
        finally:
            world.close()
