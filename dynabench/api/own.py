"""Objects of the user's own among settings: a router mode, a planner's policy, step times or an engine as a class or function.

Settings are values that travel to processes as text, so an object becomes a file with its pickle, and its setting the name
of that file, which every process reads like a mode that the user has written as a file (`foundation.own_code`).

    my_mode --cloudpickle--> /tmp/dynabench-own-.../3f.../my_mode.py --as --router-mode FILE--> simulation, router, frontend

What can be imported is pickled by reference, anything else by value, as joblib does it. Files stay on this host: they are
readable by the user alone, and are removed when the process ends.
"""

import atexit
import functools
import hashlib
import inspect
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from foundation.errors import UserError
from foundation.files import replace_text
from foundation.own_code import GIVEN
from foundation.text import one_line


class Kind(NamedTuple):
    """What an object can be for a setting."""

    what: str
    method: str
    """The method that a function is for, with its parameters."""
    base: str = ""
    """The class that it derives from, as module and name; any class or instance with the method will do if empty."""


KINDS = {
    "router_mode": Kind("router mode", "costs(candidates)", "serving.router Policy"),
    "planner": Kind("planner", "propose(seen)", "serving.planner.policies.policy Policy"),
    "timing_file": Kind(
        "timing model", "step_s(prefill_tokens, num_decodes, num_kv_tokens)", "mocker.timing.own StepTimes"
    ),
    "engine_file": Kind("engine", "generate(request)"),
}
"""By setting; a pool's path may come before its name."""
PLACES = {"timing": "timing_file", "engine": "engine_file"}
"""Settings that name a kind of something, and where an object of the user's own goes instead."""

FILE = '''"""{name}, an object that a Python program of this host gave to dynabench as a {what}."""

import pickle
import sys

sys.path += [folder for folder in {folders!r} if folder not in sys.path]
_given = pickle.loads({pickled!r})


'''
CLASS = '''class {name}(_given):
    """The same class, at home in this file."""
'''
FUNCTION = '''from {module} import {base} as Base


class {name}(Base):
    """Calls the function that was given."""

    default_interval_s = 5.0

    def {method}(self, {parameters}):
        """Ask it."""
        return _given({parameters})
'''
ENGINE = """_engine = _given() if isinstance(_given, type) else _given
generate = getattr(_engine, "generate", _engine)
"""


def is_own_object(value: Any) -> bool:
    """Return whether a value is an object of the user's own, not one that a setting can have."""
    return callable(value) or hasattr(value, "generate")


def placed(setting: str, values: Iterable[Any]) -> str:
    """Return the setting to which these values belong: `timing_file` instead of `timing`, if they are objects."""
    parts = setting.rpartition(".")
    is_own = any(map(is_own_object, values))
    return f"{parts[0]}{parts[1]}{PLACES[parts[2]]}" if is_own and parts[2] in PLACES else setting


def named(value: Any, setting: str) -> Any:
    """Return the name under which every process of this host finds an object; any other value as it is.

    Raises:
        UserError: the setting takes no object, or this one cannot travel to a process.
    """
    if not is_own_object(value):
        return value
    kind = KINDS.get(setting.rpartition(".")[2])
    if kind is None:
        raise UserError(
            f"{setting} is {value!r}; an object can only be a {' or a '.join(each.what for each in KINDS.values())}"
        )
    name = _name_of(value)
    text = _file(value, name, kind)
    place = _folder() / hashlib.sha256(text.encode()).hexdigest()[:12] / f"{name}.py"
    if not place.exists():
        place.parent.mkdir(exist_ok=True)
        replace_text(place, text)  # another thread may give the same object
    GIVEN[str(place)] = name
    return str(place)


def _file(value: Any, name: str, kind: Kind) -> str:
    if not kind.base:
        _check_engine(value, name)
    elif isinstance(value, type):
        _check_class(value, name, kind)
    folders = [each for each in sys.path if each]
    head = FILE.format(name=name, what=kind.what, folders=folders, pickled=_pickled(value, name, kind))
    if not kind.base:
        return head + ENGINE
    if isinstance(value, type):
        return head + CLASS.format(name=name)
    module, _, base = kind.base.partition(" ")
    method, _, parameters = kind.method.rstrip(")").partition("(")
    return head + FUNCTION.format(name=name, module=module, base=base, method=method, parameters=parameters)


def _check_engine(value: Any, name: str) -> None:
    """Refuse what is no engine, before any process has it."""
    if not inspect.isasyncgenfunction(getattr(value, "generate", value)):
        raise UserError(
            f"{name} cannot be an engine: expected `async def generate(request)` with a yield, or an object that has one"
        )


def _check_class(value: type, name: str, kind: Kind) -> None:
    module, _, base = kind.base.partition(" ")
    parent = getattr(sys.modules.get(module) or __import__(module, fromlist=[base]), base)
    if not issubclass(value, parent):
        raise UserError(
            f"{name} cannot be a {kind.what}: expected a class that derives from {module.partition('.policies')[0]}.{base}, or a "
            f"function for its method {kind.method}"
        )


def _pickled(value: Any, name: str, kind: Kind) -> bytes:
    """Return an object as bytes.

    Raises:
        UserError: it holds something that belongs to this process, such as a lock or an open file.
    """
    import cloudpickle

    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise UserError(
            f"{kind.what} {name} cannot be sent to the processes that use it ({one_line(error)}); leave out of it what belongs to "
            "this process alone, such as locks, open files and connections"
        ) from error
    return data


def _name_of(value: Any) -> str:
    name = getattr(value, "__name__", None) or type(value).__name__
    return name if name.isidentifier() else "own"


@functools.cache
def _folder() -> Path:
    """Return the folder of this process's files, which only its user can read."""
    folder = Path(tempfile.mkdtemp(prefix="dynabench-own-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
