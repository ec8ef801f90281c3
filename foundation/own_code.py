"""A class of the user's own, named on the command line as `FILE.py` or `FILE.py:CLASS`."""

import importlib.util
import inspect
import re
import sys
from contextvars import ContextVar
from types import ModuleType
from typing import TypeVar

from foundation.text import one_line

T = TypeVar("T")

MODULES: ContextVar[dict[str, ModuleType]] = ContextVar("own_code", default={})  # noqa: B039 (one for a whole process)
"""Files that were run, by their paths. Whoever simulates several processes in one sets one for each."""

GIVEN: dict[str, str] = {}
"""Files that were made of Python objects, by their paths: the names of the objects."""


def shown(name: str) -> str:
    """Return how results show a name: an object's file as the object."""
    base, additions = base_and_additions(name)
    return "+".join([GIVEN.get(base, base), *additions])


def is_own(name: str) -> bool:
    """Return whether a name refers to a class in a file."""
    return _parts(name)[0].endswith(".py")


def base_and_additions(name: str) -> tuple[str, list[str]]:
    """Split `base+addition+...`; in the path of a file, + is a character like any other."""
    match = re.match(r".*\.py(:[^+:/]*)?(?=\+|$)", name, re.DOTALL)
    base = match[0] if match else name.partition("+")[0]
    return base, name[len(base) + 1 :].split("+") if len(base) < len(name) else []


def own_class(name: str, kind: type[T]) -> type[T]:
    """Return the class that a name refers to: the only one of its kind in the file, or the one after the colon.

    The file is run once in each process (or simulated one) and must not change while the process lives.

    Raises:
        ValueError: the file cannot be run, or has no such class.
    """
    path, wanted = _parts(name)
    module = _module(path)
    found = {
        each.__name__: each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, kind) and each.__module__ == module.__name__
    }
    what = f"class that derives from {kind.__module__.partition('.policies')[0]}.{kind.__name__}"
    if wanted:
        if wanted not in found:
            raise ValueError(f"{path}: expected a {what}, named {wanted}, but found {_listed(found)}")
        return found[wanted]
    leaves = {
        n: each
        for n, each in found.items()
        if not any(other is not each and issubclass(other, each) for other in found.values())
    }
    if len(leaves) != 1:
        hint = f"; name one, as in {path}:{next(iter(leaves))}" if leaves else ""
        raise ValueError(f"{path}: expected one {what}, but found {_listed(leaves)}{hint}")
    return next(iter(leaves.values()))


def file_of(name: str) -> str:
    """Return the file that a name refers to."""
    return _parts(name)[0]


def _parts(name: str) -> tuple[str, str]:
    path, colon, wanted = name.rpartition(":")
    return (path, wanted) if colon and path.endswith(".py") else (name, "")


def _module(path: str) -> ModuleType:
    modules = MODULES.get()
    if path not in modules:
        modules[path] = _run(path)
    return modules[path]


def _run(path: str) -> ModuleType:
    name = f"own_code:{path}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look themselves up there
    try:
        spec.loader.exec_module(module)
    except FileNotFoundError as error:
        del sys.modules[name]
        if error.filename and str(error.filename).endswith(path):
            raise ValueError(f"{path}: no such file") from error
        raise ValueError(f"{path} cannot be run: {one_line(error)}") from error
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"{path} cannot be run: {type(error).__name__}: {_told(error, path)}") from error
    return module


def _told(error: Exception, path: str) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.msg} (line {error.lineno})"
    lines = [frame.lineno for frame in inspect.trace() if frame.filename.endswith(path)]
    return one_line(error) + (f" (line {lines[-1]})" if lines else "")


def _listed(found: dict[str, type]) -> str:
    return ", ".join(found) or "none"
