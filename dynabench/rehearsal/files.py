"""Files that replay a rehearsal: what is written of one that failed, and how it is read again."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from dynabench.deployment.description import Deployment
from dynabench.deployment.file import as_plain, from_plain
from dynabench.rehearsal.picture import write_picture
from dynabench.rehearsal.run import Outcome, Rehearsal
from dynabench.rehearsal.stage.story import Story
from foundation.errors import UserError
from foundation.files import replace_text
from foundation.own_code import base_and_additions, file_of, is_own

SCHEMA = "dynabench.rehearsal/1"


def write(out: Path, deployment: Deployment, rehearsal: Rehearsal, outcome: Outcome, story: Story) -> Path:
    """Write a rehearsal that failed, and its picture, into a folder; return the file."""
    file = out / f"seed-{rehearsal.seed}.json"
    out.mkdir(parents=True, exist_ok=True)
    kind, _, own = rehearsal.own_engine.partition(":")
    engine = f"{kind}:{os.path.relpath(Path(own).expanduser(), out)}" if own else ""
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "violations": [str(violation) for violation in outcome.violations],
        "deployment": _renamed(as_plain(deployment), lambda name: os.path.relpath(name, out)),
        "rehearsal": msgspec.to_builtins(msgspec.structs.replace(rehearsal, own_engine=engine)),
    }
    replace_text(file, msgspec.json.format(msgspec.json.encode(content)).decode() + "\n")
    write_picture(file, deployment, outcome, story)
    return file


def read(file: Path) -> tuple[Deployment, Rehearsal]:
    """Read a rehearsal that was written; the files of the user's that it names are relative to its folder.

    Raises:
        UserError: it is something else, or a file that it names is not there.
    """
    try:
        content = msgspec.json.decode(file.read_bytes())
        if not isinstance(content, dict) or "schema" not in content:
            raise ValueError("expected an object with a schema, as `dynabench rehearse` writes it")
        if content["schema"] != SCHEMA:
            raise ValueError(f"its schema is {content['schema']!r}; expected {SCHEMA!r}")
        plain = _renamed(content["deployment"], lambda name: _found(name, file))
        rehearsal = msgspec.convert(content["rehearsal"], Rehearsal)
        kind, _, own = rehearsal.own_engine.partition(":")
        if own:
            rehearsal = msgspec.structs.replace(rehearsal, own_engine=f"{kind}:{_found(own, file)}")
        return from_plain(plain), rehearsal
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except KeyError as error:
        raise UserError(f"{file} is no rehearsal: it has no {error}") from error
    except (msgspec.DecodeError, msgspec.ValidationError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"{file} is no rehearsal: {error}") from error


def _found(name: str, file: Path) -> str:
    """Return a file of the user's that a rehearsal names, as it is from here.

    Raises:
        UserError: it is not there.
    """
    path = file.parent / file_of(name)
    if not path.is_file():
        raise UserError(f"{file} needs {file_of(name)}, and there is no {path}; put it there, or beside where it was")
    return os.path.relpath(path) + name[len(file_of(name)) :]


def _renamed(plain: Any, rename: Callable[[str], str]) -> Any:
    """Rename the files of the user's in a plain deployment."""
    match plain:
        case dict():
            return {name: _renamed(value, rename) for name, value in plain.items()}
        case list() | tuple():
            return [_renamed(value, rename) for value in plain]
        case str():
            base, _ = base_and_additions(plain)
            return rename(base) + plain[len(base) :] if is_own(base) else plain
    return plain
