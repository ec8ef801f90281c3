"""The folder of a kustomization on disk."""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from dynabench.deployment.description import Deployment
from dynabench.deployment.file import read
from dynabench.kubernetes.components import files_of
from dynabench.kubernetes.manifests import KUSTOMIZATION, manifests
from dynabench.kubernetes.settings import ClusterConfig
from foundation.errors import UserError
from foundation.files import replace_text

HEADER = (
    "# Written by dynabench kubernetes, which overwrites it when it runs again: put your changes in a kustomize "
    "overlay.\n"
)
LOOKS_DIFFERENT = re.compile(r"[-+]?[.\d].*|y|n|yes|no|on|off|true|false|null", re.IGNORECASE | re.DOTALL)
"""Text that some reader of YAML 1.1 or 1.2 takes for a number, a time, true, false or nothing."""

OF_THIS_HOST = ("ETCD_", "NATS_", "DYN_")
"""Beginnings of variables that would put this host's network into a cluster's manifests."""


def write(file: Path, config: ClusterConfig, out: Path, *, overwrite: bool) -> list[Path]:
    """Write the manifests of a deployment described in a file; return what was written.

    Raises:
        UserError: the deployment cannot be in a cluster, or the folder cannot be used.
    """
    with _without_environment():
        deployment = read(file)
        try:
            found = manifests(deployment, config, _contents(deployment))
        except ValueError as error:
            raise UserError(f"{file}: {error}") from error
    try:
        return _replace(out, {name: _text(objects) for name, objects in found.items()}, overwrite=overwrite)
    except OSError as error:
        raise UserError(f"{error.filename or out}: {error.strerror}") from error


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
    """Write files into a folder, the list of them last, and remove what we wrote there before and is no longer wanted."""
    strangers = [path for path in _inside(out) if not _is_ours(path)]
    if strangers and not overwrite:
        raise UserError(
            f"{out} holds {strangers[0].name}, which dynabench kubernetes did not write; expected an empty or new "
            "folder, or --overwrite"
        )
    out.mkdir(parents=True, exist_ok=True)
    stale = [path for path in _inside(out) if path.name not in texts and path not in strangers]
    written = [out / name for name in sorted(texts, key=lambda name: (name == KUSTOMIZATION, name))]
    for path in written:
        replace_text(path, texts[path.name])
    for path in stale:
        path.unlink()
    return written


def _inside(out: Path) -> list[Path]:
    if not out.exists():
        return []
    if not out.is_dir():
        raise UserError(f"{out} is a file; expected a folder")
    return sorted(out.iterdir())


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
    """Hide variables that settings take their defaults from: manifests are the same wherever they are written."""
    hidden = {name: value for name, value in os.environ.items() if name.startswith(OF_THIS_HOST)}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)
