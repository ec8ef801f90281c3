"""Points of sweeps and plans, each saved in its own file when done, so that an interrupted run can be resumed."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from dynabench.arm import Arm, Settings
from dynabench.deployment.file import as_plain
from dynabench.experiment.settings import ExperimentConfig
from dynabench.experiment.source import Given, digest_of
from foundation.errors import UserError
from foundation.files import replace_text
from foundation.identity import Identity, files_named
from foundation.own_code import shown
from reports.sweep.points import AnyPoint
from workloads import Workload
from workloads.source import files_of

IDENTIFYING = ("seed", "repeats", "trace_block_size", "format", "columns", "router_mode", "vary")
"""The settings of an experiment that points depend on, besides the limits."""
PACKAGES = ("dynabench", "serving", "mocker", "workloads", "reports", "foundation")
"""The packages whose code makes points."""


class PointStore:
    """The points in a results folder."""

    def __init__(self, out: Path, identity: Identity, kind: str) -> None:
        """Make the folder, or resume an existing one.

        Args:
            out: the folder.
            identity: everything that its points depend on, except the varied settings.
            kind: the kind of folder, such as `sweep`.

        Raises:
            UserError: it contains something else, or cannot be written.
        """
        self.out = out
        """The folder."""
        self._kind, self._made = kind, identity.of_files
        self._points, self._mark = out / "points", (mark := out / f"{kind}.id")
        try:
            if out.exists() and not mark.exists():
                raise UserError(
                    f"{out} exists and is not a {kind}; choose another results folder with --out, or remove it"
                )
            if mark.exists() and (earlier := Identity.read(mark)) != identity:
                raise UserError(
                    f"{out} contains another {kind}: {identity.difference(earlier)}; choose another results folder with "
                    "--out, or remove it"
                )
            self._points.mkdir(parents=True, exist_ok=True)
            if not mark.exists():
                identity.write(mark)
        except OSError as error:
            raise UserError(f"{out}: cannot be written ({os.strerror(error.errno or 0)})") from error

    def known(self, arm: Arm) -> AnyPoint | None:
        """Return a point that was simulated before.

        Raises:
            UserError: its file contains something else.
        """
        file = self._file(arm)
        return _read(file) if file.exists() else None

    def keep(self, arm: Arm, point: AnyPoint) -> None:
        """Save a point atomically.

        Raises:
            UserError: it cannot be written.
        """
        try:
            replace_text(self._file(arm), msgspec.json.encode(point).decode())
        except OSError as error:
            raise UserError(
                f"{self._points}: cannot be written ({os.strerror(error.errno or 0)}); the points so far are saved: free some space "
                "and run the same command again"
            ) from error

    def check_unchanged(self, now: Identity) -> None:
        """Refuse points during whose simulation a file changed, now and later: nobody knows which file they are of.

        Raises:
            UserError: a file has changed.
        """
        if now.of_files != self._made:
            self._mark.unlink(missing_ok=True)
            raise UserError(
                f"{now.of_files.difference(self._made)} while the {self._kind} ran, so its points may be of either version; "
                f"remove {self.out} and run the same command again"
            )

    def all(self) -> list[AnyPoint]:
        """Return every point in the folder."""
        return [_read(file) for file in sorted(self._points.glob("*.json"))]

    def _file(self, arm: Arm) -> Path:
        return self._points / f"{key_of(arm)}.json"


def key_of(arm: Arm) -> str:
    """Return what distinguishes the point of an arm from the others of a folder: its changes."""
    changes = json.dumps({name: shown(str(value)) for name, value in arm.changes.items()}, sort_keys=True)
    return hashlib.sha256(changes.encode()).hexdigest()[:16]


def _read(file: Path) -> AnyPoint:
    try:
        point: AnyPoint = msgspec.json.decode(file.read_bytes(), type=AnyPoint)
    except (msgspec.DecodeError, ValueError) as error:
        raise UserError(f"{file}: not a point of a sweep ({error}); remove the file to make it again") from error
    return point


def identity_of(workload: Given, experiment: ExperimentConfig, settings: Settings, more: Mapping[str, Any]) -> Identity:
    """Identify everything that points depend on: the workload, the settings and files, and our code."""
    given = {f"--{name.replace('_', '-')}": getattr(experiment, name) for name in IDENTIFYING}
    parts = {
        **given,
        "limits": experiment.limits,
        "shape": settings.shape,
        "load": settings.load,
        "client": settings.client.shown if settings.client else {},
        **as_plain(settings.deployment),
        **more,
    }
    varied = [part for text in experiment.vary for part in re.split("[=,]", text)]
    files = list(files_named(varied))
    if isinstance(workload, Workload):
        parts["workload"] = digest_of(workload)
    else:
        files = [*files_of(workload), *files]
    return Identity.of(parts, files=files, packages=PACKAGES)
