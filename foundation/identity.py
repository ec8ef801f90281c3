"""What results depend on: settings, the contents of files and our own code, so that old results never pass for new ones.

made = Identity.of({"seed": 0, "shape": config}, files=[Path("trace.jsonl")], packages=["mocker"])
earlier = Identity.read(folder / "sweep.id")
if earlier != made:
    print(made.difference(earlier))  # my_mode.py has changed; seed was 0 and is 1
"""

import ast
import dataclasses
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from foundation.files import replace_text
from foundation.own_code import file_of, is_own

LARGE_BYTES = 1 << 28
"""The weights of a model: reading them would take longer than what their time of change may miss."""
SAID = 3
"""As many differences are named; the others are counted."""
FILE, CODE = "file ", "code "


@dataclass(frozen=True)
class Identity:
    """Facts by name; results with the same facts are the same."""

    facts: Mapping[str, str]

    @classmethod
    def of(cls, settings: Mapping[str, Any], *, files: Iterable[Path] = (), packages: Iterable[str] = ()) -> "Identity":
        """Return the identity of results.

        Args:
            settings: values, settings and nested mappings; the files that they name count too.
            files: more files.
            packages: our packages whose code makes the results.
        """
        facts = dict(_flat(settings))
        facts |= {f"{CODE}{name}": _code(name) for name in packages}
        facts |= {f"{FILE}{path}": _content(path) for path in (*files, *files_named(settings))}
        return cls(facts)

    @classmethod
    def read(cls, path: Path) -> "Identity | None":
        """Return the identity that a file holds; None if another version wrote something else there.

        Raises:
            OSError: it cannot be read.
        """
        try:
            facts = json.loads(path.read_text())
        except ValueError:
            return None
        return cls(facts) if isinstance(facts, dict) else None

    def write(self, path: Path) -> None:
        """Write it to a file.

        Raises:
            OSError: it cannot be written.
        """
        replace_text(path, json.dumps(self.facts, indent=1) + "\n")

    @property
    def key(self) -> str:
        """A short name for it."""
        return hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def of_files(self) -> "Identity":
        """The part of it that files determine."""
        return Identity({name: text for name, text in self.facts.items() if name.startswith(FILE)})

    def difference(self, earlier: "Identity | None") -> str:
        """Say in a line in what it differs from an earlier one."""
        if earlier is None:
            return "another version of dynabench made it"
        before, now = earlier.facts, self.facts
        names = [name for name in {**now, **before} if before.get(name) != now.get(name)]
        said = list(dict.fromkeys(_told(name, before.get(name), now.get(name)) for name in sorted(names, key=_order)))
        more = [f"and {len(said) - SAID} more"] if len(said) > SAID else []
        return "; ".join(said[:SAID] + more)


def files_named(value: Any) -> Iterator[Path]:
    """Yield every file that settings name: classes of the user's own with what they import, files, and models' folders."""
    for text in map(os.path.expanduser, _texts(value)):
        base = text.partition("+")[0]
        if is_own(base):
            yield from _files_of_own_code(base)
        elif os.path.isfile(os.path.join(text, "config.json")):  # noqa: PTH113, PTH118 (a text may be no path at all)
            yield Path(text)
        elif os.path.isfile(text):  # noqa: PTH113
            yield Path(text)
            beside = Path(text).with_name("hf_quant_config.json")  # read with the config.json that it stands beside
            yield from [beside] * beside.is_file()


def _files_of_own_code(name: str) -> list[Path]:
    """Return the file of a class of the user's own, and the modules beside it that it imports, itself or through one another."""
    found: dict[Path, None] = {}
    waiting = [Path(file_of(name))]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found[file] = None
            waiting += _imported_beside(file)
    return list(found)


def _imported_beside(file: Path) -> Iterator[Path]:
    """Yield the modules and packages in the folder of a file that it imports."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # whoever runs it says so
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        for name in [node.module] if isinstance(node, ast.ImportFrom) and node.module else names:
            beside = file.parent / name.partition(".")[0]
            yield from [part for part in [beside.with_suffix(".py"), *sorted(beside.rglob("*.py"))] if part.is_file()]


def _texts(value: Any) -> Iterator[str]:
    match value:
        case str() | Path():
            yield str(value)
        case Mapping():
            yield from _texts(list(value.values()))
        case list() | tuple():
            for part in value:
                yield from _texts(part)
        case _ if dataclasses.is_dataclass(value):
            yield from _texts([getattr(value, part.name) for part in dataclasses.fields(value)])


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield settings by their paths, as text; those that hold secrets are left out."""
    if dataclasses.is_dataclass(value):
        value = {part.name: getattr(value, part.name) for part in dataclasses.fields(value) if part.repr}
    if isinstance(value, Mapping):
        for part, its in value.items():
            yield from _flat(its, f"{name}.{part}" if name else part)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        yield name, ", ".join(map(str, value)) or "none"
    else:
        yield name, "none" if value is None else str(value)


def _order(name: str) -> int:
    return 0 if name.startswith(FILE) else 1 if name.startswith(CODE) else 2


def _told(name: str, before: str | None, now: str | None) -> str:
    if name.startswith(FILE):
        return f"{name.removeprefix(FILE)} {'has changed' if before and now else 'is new' if now else 'is not used'}"
    if name.startswith(CODE):
        versions = [str(text).partition(" ")[0] for text in (before, now)]
        changed = f"was {versions[0]} and is {versions[1]}" if versions[0] != versions[1] else "has other code"
        return f"dynabench {changed}"
    return f"{name} was {before or 'not a setting'} and is {now or 'not a setting'}"


def _content(path: Path) -> str:
    """Return a digest of a file, or of the files in a folder."""
    if path.is_dir():
        inside = sorted(child for child in path.iterdir() if child.is_file())
        return _digest(f"{child.name} {_content(child)}\n".encode() for child in inside)
    try:
        status = path.stat()
        if status.st_size > LARGE_BYTES:
            return f"{status.st_size} bytes of {status.st_mtime_ns}"
        return _digest([path.read_bytes()])
    except OSError:
        return "missing"  # whoever reads it says so


def _code(package: str) -> str:
    """Return a digest of a package's files after its version: while it is developed, it changes within one."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    files = [file for root in spec.submodule_search_locations for file in sorted(Path(root).rglob("*"))]
    kept = (file.read_bytes() for file in files if file.is_file() and "__pycache__" not in file.parts)
    return f"{metadata.version('dynabench')} {_digest(kept)}"


def _digest(parts: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()[:16]
