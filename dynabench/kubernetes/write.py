"""Write the folder of a kustomization."""

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from dynabench.deployment.description import Deployment
from dynabench.deployment.file import read_deployment
from dynabench.kubernetes.components import files_of
from dynabench.kubernetes.manifests import KUSTOMIZATION, manifests
from dynabench.kubernetes.settings import ClusterConfig
from foundation.errors import UserError
from foundation.files import put_in_place

HEADER = (
    "# Written by dynabench kubernetes, which overwrites it when it runs again: put your changes in a kustomize "
    "overlay.\n"
)
LOOKS_DIFFERENT = re.compile(r"[-+]?[.\d].*|y|n|yes|no|on|off|true|false|null", re.IGNORECASE | re.DOTALL)
"""Text that some reader of YAML 1.1 or 1.2 takes for a number, a time, true, false or nothing."""

STAGING = ".dynabench-kubernetes"
"""The folder, inside the one that is written, of files that are not complete."""

ENTRY = re.compile(r"^ *- ([a-z0-9-]+\.yaml)$", re.MULTILINE)
"""A file in our list of them."""

OF_THIS_HOST = ("ETCD_", "NATS_", "DYN_")
"""Prefixes of variables that would put this host's network settings into a cluster's manifests."""


def write_manifests(file: Path, config: ClusterConfig, out: Path, *, overwrite: bool) -> list[Path]:
    """Write the manifests of a deployment described in a file; return what was written.

    Raises:
        UserError: the deployment cannot run in a cluster, or the folder cannot be used.
    """
    with _without_environment():
        deployment = read_deployment(file)
        try:
            found = manifests(deployment, config, _contents(deployment))
        except ValueError as error:
            raise UserError(f"{file}: {error}") from error
    try:
        return _replace(out, {name: _text(objects) for name, objects in found.items()}, overwrite=overwrite)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror})") from error


def _contents(deployment: Deployment) -> dict[str, bytes]:
    """Read the files that pools name."""
    found = {}
    for pool in deployment.pools:
        for path in files_of(pool):
            try:
                found[path] = Path(path).read_bytes()
            except OSError as error:
                raise ValueError(f"pools.{pool.name}: {path} cannot be read ({error.strerror})") from error
    return found


def _replace(out: Path, texts: Mapping[str, str], *, overwrite: bool) -> list[Path]:
    """Write files into a folder once there is room for all of them, and remove those that are no longer wanted."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; expected a folder")
    out.mkdir(parents=True, exist_ok=True)
    with _locked(out):
        _check_folder(out, texts, overwrite=overwrite)
        stale = [out / name for name in _listed(out) if name not in texts and _is_ours(out / name)]
        names = sorted(texts, key=lambda name: (name == KUSTOMIZATION, name))  # the list comes last
        with _staging(out) as staging:
            for name in names:
                (staging / name).write_text(texts[name], encoding="utf-8")
            for name in names:
                put_in_place(staging / name, out / name)
        for path in stale:
            path.unlink()
    return [out / name for name in names]


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Refuse a folder that another run writes to; if that is killed, its lock ends with it."""
    folder = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{out} is being written by another dynabench kubernetes; run this one after it") from None
        except OSError:
            pass  # NFS has no locks for folders
        yield
    finally:
        os.close(folder)


def _check_folder(out: Path, texts: Mapping[str, str], *, overwrite: bool) -> None:
    """Refuse a folder with files of others, or with a folder where a file is to be."""
    for path in sorted(out.iterdir()):
        if path.name in texts and path.is_dir():
            raise UserError(f"{path} is a folder; remove it, or write to another folder")
        if not overwrite and path.name != STAGING and not _is_ours(path):
            raise UserError(
                f"{out} holds {path.name}, which dynabench kubernetes did not write; expected an empty or new "
                "folder, or --overwrite"
            )


def _listed(out: Path) -> list[str]:
    """Return the names of the files that the last run wrote: a copy of one is not among them."""
    path = out / KUSTOMIZATION
    if not _is_ours(path):
        return []
    return ENTRY.findall(path.read_text(errors="replace"))


@contextlib.contextmanager
def _staging(out: Path) -> Iterator[Path]:
    """Make a folder for files that are not complete, without what a run that was killed left in it."""
    staging = out / STAGING
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _is_ours(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(HEADER)) == HEADER.encode()


def _text(objects: list[Any]) -> str:
    return HEADER + yaml.dump_all(
        objects, Dumper=_Dumper, sort_keys=False, width=4096, allow_unicode=True, explicit_start=True
    )


class _Dumper(yaml.SafeDumper):
    """Writes lists below their key, every value in full, and quotes around text that looks like something else."""

    def represent_scalar(self, tag: str, value: str, style: str | None = None) -> yaml.ScalarNode:
        if tag == "tag:yaml.org,2002:str" and LOOKS_DIFFERENT.fullmatch(value):
            style = "'"
        return super().represent_scalar(tag, value, style)

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


@contextlib.contextmanager
def _without_environment() -> Iterator[None]:
    """Hide variables that are defaults of settings, so that manifests are the same on every host."""
    hidden = {name: value for name, value in os.environ.items() if name.startswith(OF_THIS_HOST)}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)
