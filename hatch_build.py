"""Build hook: with DYNABENCH_COMPILE=1 in the environment, compile the cores with mypyc (needs a C compiler).

The sources stay what they are, plain Python; a compiled build is two to three times as fast in virtual time.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CORES = (
    "mocker/**/*.py", "serving/router/**/*.py", "serving/life/**/*.py", "foundation/galloping.py", "dynabench/kv_use.py",
    "workloads/pacer.py",
    *(f"dynabench/virtual/{name}.py" for name in (
        "arrivals", "clock", "cluster", "flights", "grouping", "prompts", "rank", "rank_effects", "routing", "stamps",
        "transfers",
    )),
)  # fmt: skip
"""The modules that are compiled."""
# Settings, whose help the command lines read from their source; what reads files before an engine is built; numpy's work.
INTERPRETED = (
    "__init__.py", "config.py", "lease.py", "catalog.py", "choose.py", "class_defaults.py", "files.py", "flipped.py",
    "hashing.py",
)  # fmt: skip
SETUP = """
import sys
from mypyc.build import mypycify
from setuptools import setup
setup(name="cores", packages=[], ext_modules=mypycify(["--ignore-missing-imports", "--follow-imports=silent", *sys.argv.pop().split(",")], opt_level="3"))
"""


class CompileHook(BuildHookInterface[Any]):
    """Adds compiled modules beside the Python ones."""

    def dependencies(self) -> list[str]:
        """Ask for the compiler, and for what types settings and columns, only where they are used."""
        return ["msgspec>=0.20", "mypy>=1.14", "numpy>=2", "setuptools"] if _is_asked_for() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile into a temporary folder and include what came out."""
        if not _is_asked_for():
            return
        if version == "editable":
            raise RuntimeError(
                "DYNABENCH_COMPILE=1 needs an installation that is not editable: compiled code would hide edits"
            )
        self._folder = Path(tempfile.mkdtemp(prefix="dynabench-build-"))
        try:
            self._compile(build_data)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def _compile(self, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        for package in ("foundation", "mocker", "serving", "dynabench", "workloads", "reports"):
            shutil.copytree(root / package, self._folder / package, ignore=shutil.ignore_patterns("__pycache__"))
        files = [
            str(path.relative_to(self._folder))
            for core in CORES
            for path in sorted(self._folder.glob(core))
            if path.name not in INTERPRETED
        ]
        command = [sys.executable, "-c", SETUP, "build_ext", "--inplace", ",".join(files)]
        subprocess.run(command, cwd=self._folder, check=True)  # noqa: S603 (our own words)
        for path in self._folder.rglob("*.so"):
            place = path.relative_to(self._folder)
            if place.parts[0] != "build":
                build_data["force_include"][str(path)] = str(place)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary folder."""
        if _is_asked_for():
            shutil.rmtree(self._folder, ignore_errors=True)


def _is_asked_for() -> bool:
    return os.environ.get("DYNABENCH_COMPILE") == "1"
