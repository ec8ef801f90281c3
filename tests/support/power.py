"""What a power cut would leave: what was synced to the disk, and nothing else."""

import os
from pathlib import Path


class PowerCut:
    """Watches what is synced and renamed from now on; both really happen."""

    def __init__(self, monkeypatch):
        self.unsynced_when_renamed = []
        """Files that got their names, or whose folders did, before their contents were on the disk."""
        self._synced = {}  # (device, inode) -> (time of the last change, names within) when it was synced
        sync, replace, rename = os.fsync, os.replace, os.rename

        def fsync(handle):
            sync(handle)
            place = handle if isinstance(handle, int) else handle.fileno()
            self._synced[_identity(os.fstat(place))] = _state(Path(f"/proc/self/fd/{place}").resolve())

        def moved(move):
            def wrapped(source, target, **options):
                if not options:
                    files = [Path(source), *Path(source).rglob("*")]
                    self.unsynced_when_renamed += [path for path in files if not self.has_content(path)]
                move(source, target, **options)

            return wrapped

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "replace", moved(replace))
        monkeypatch.setattr(os, "rename", moved(rename))

    def is_kept(self, path):
        """Return whether a file is there after a power cut, with its content and its name."""
        return self.has_content(path) and self.has_content(path.parent)

    def has_content(self, path):
        """Return whether a file, if it is there after a power cut, has its content."""
        if path.is_symlink():
            return True
        return self._synced.get(_identity(path.stat())) == _state(path)


def _identity(facts):
    return facts.st_dev, facts.st_ino


def _state(path):
    return path.stat().st_mtime_ns, sorted(entry.name for entry in path.iterdir()) if path.is_dir() else None
