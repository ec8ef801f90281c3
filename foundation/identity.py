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
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from foundation.extras import DISTRIBUTION
from foundation.files import replace_text
from foundation.own_code import base_and_additions, file_of, is_own

LARGE_BYTES = 1 << 28
"""The weights of a model: reading them would take longer than what their time of change may miss."""
SAID = 3
"""As many differences are named; the others are counted."""
FILE, CODE = "file ", "code "
CONTENT = "a file"
"""What a setting is that names a file: the content counts, not the path."""


@dataclass(frozen=True)
class Identity:
    """Facts by name; results with the same facts are the same."""

    facts: Mapping[str, str]
    paths: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Where the files are, by the names of their facts: for messages only."""

    @classmethod
    def of(cls, settings: Mapping[str, Any], *, files: Iterable[Path] = (), packages: Iterable[str] = ()) -> "Identity":
        """Return the identity of results.

        Args:
            settings: values, settings and nested mappings. A file that one names counts by its content, wherever it is;
                in a list, by its path too.
            files: more files, in an order that matters.
            packages: our packages whose code makes the results.
        """
        held = dict(_flat(settings))
        facts = {name: _text(value) for name, value in held.items()}
        facts |= {f"{CODE}{name}": _code(name) for name in packages}
        found = {f"{FILE}{number}": path for number, path in enumerate(files)}
        found |= {f"{FILE}{name} {part}": path for name, value in held.items() for part, path in _files_by_part(value)}
        facts |= {name: _content(path) for name, path in found.items()}
        return cls(facts, {name: str(path) for name, path in found.items()})

    @classmethod
    def read(cls, path: Path) -> "Identity | None":
        """Return the identity that a file holds; None if another version wrote something else there.

        Raises:
            OSError: it cannot be read.
        """
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except ValueError:  # also text that is not UTF-8
            return None

    def write(self, path: Path) -> None:
        """Write it to a file.

        Raises:
            OSError: it cannot be written.
        """
        replace_text(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @property
    def key(self) -> str:
        """A short name for it."""
        return hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def of_files(self) -> "Identity":
        """The part of it that files determine."""
        return Identity({name: text for name, text in self.facts.items() if name.startswith(FILE)}, self.paths)

    def difference(self, earlier: "Identity | None") -> str:
        """Say in a line in what it differs from an earlier one."""
        if earlier is None:
            return "another version of dynabench made it"
        before, now = earlier.facts, self.facts
        names = [name for name in {**now, **before} if before.get(name) != now.get(name)]
        others = sorted(
            (name for name in names if not name.startswith(FILE)), key=lambda name: not name.startswith(CODE)
        )
        said = _told_of_files(earlier, self) if len(others) < len(names) else []
        said += dict.fromkeys(_told(name, before.get(name), now.get(name)) for name in others)
        more = [f"and {len(said) - SAID} more"] if len(said) > SAID else []
        return "; ".join(said[:SAID] + more)


def files_named(value: Any) -> Iterator[Path]:
    """Yield every file that settings name: classes of the user's own with what they import, files, and models' folders."""
    for text in map(os.path.expanduser, _texts(value)):
        if is_own(base := base_and_additions(text)[0]):
            yield from _files_of_own_code(Path(file_of(base)))
        elif os.path.isfile(os.path.join(text, "config.json")):  # noqa: PTH113, PTH118 (a text may be no path at all)
            yield Path(text)
        elif os.path.isfile(text):  # noqa: PTH113
            yield Path(text)
            beside = Path(text).with_name("hf_quant_config.json")  # read together with the config.json in its folder
            yield from [beside] * beside.is_file()


def _files_of_own_code(first: Path) -> list[Path]:
    """Return the file of a class of the user's own, and the modules beside it that it imports, itself or through one another."""
    found: dict[Path, Path] = {}
    waiting = [first]
    while waiting:
        file = waiting.pop()
        if file.resolve() not in found:
            found[file.resolve()] = file
            folders = dict.fromkeys(one.parent for one in (file.resolve(), first.resolve(), file, first))
            waiting += [part for name in _imports(file) for folder in folders for part in _modules(folder / name)]
    return list(found.values())


def _imports(file: Path) -> Iterator[str]:
    """Yield the modules that a file imports, as paths without suffix from a folder where it may find them."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # whoever runs it says so
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        up = "../" * (node.level - 1) if isinstance(node, ast.ImportFrom) else ""
        for name in [node.module] if isinstance(node, ast.ImportFrom) and node.module else names:
            yield up + name.partition(".")[0]


def _modules(module: Path) -> Iterator[Path]:
    """Yield the files of a module or a package."""
    yield from [
        part for part in [module.with_name(f"{module.name}.py"), *sorted(module.rglob("*.py"))] if part.is_file()
    ]


def _files_by_part(value: Any) -> Iterator[tuple[str, Path]]:
    """Yield the files that a setting names, each with its place in it: that of the text, and that beside its first file."""
    for number, text in enumerate(_texts(value)):
        found = list(files_named(text))
        for path in found:
            beside = os.path.relpath(path.resolve(), found[0].resolve().parent) if path != found[0] else ""
            yield f"{number} {beside}".strip(), path


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


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings by their names; those that hold secrets are left out."""
    if dataclasses.is_dataclass(value):
        value = {part.name: getattr(value, part.name) for part in dataclasses.fields(value) if part.repr}
    if isinstance(value, Mapping):
        for part, its in value.items():
            yield from _flat(its, f"{name}.{part}" if name else part)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        yield name, tuple(value)
    else:
        yield name, value


def _text(value: Any) -> str:
    """Return a setting as text, without the path of its file."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    text, file = "none" if value is None else str(value), next(files_named(value), None)
    if file is None or not file.exists() or not (os.sep in text or Path(text).suffix):
        return text  # a word such as kv stays a word where a file happens to have that name
    base = base_and_additions(text)[0]
    return text.replace(file_of(base), CONTENT, 1) if is_own(base) else CONTENT


def _told_of_files(earlier: Identity, made: Identity) -> list[str]:
    """Say which files differ: by their paths, but one that only moved does not."""
    before, now = ({path: side.facts.get(name) for name, path in side.paths.items()} for side in (earlier, made))
    changed = [f"{path} has changed" for path in now if path in before and now[path] != before[path]]
    new = [f"{path} is new" for path in now if path not in before and now[path] not in before.values()]
    gone = [f"{path} is not used" for path in before if path not in now and before[path] not in now.values()]
    return [*changed, *new, *gone] or [f"{', '.join(now) or 'a file'}: the same content was used otherwise"]


def _told(name: str, before: str | None, now: str | None) -> str:
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
        return _digest([path.read_bytes()]) + path.suffix  # readers go by it
    except OSError:
        return "missing"  # whoever reads it says so


def _code(package: str) -> str:
    """Return a digest of a package's files after its version: while it is developed, it changes within one."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    files = [file for root in spec.submodule_search_locations for file in sorted(Path(root).rglob("*"))]
    kept = (file.read_bytes() for file in files if file.is_file() and "__pycache__" not in file.parts)
    return f"{metadata.version(DISTRIBUTION)} {_digest(kept)}"


def _digest(parts: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()[:16]
