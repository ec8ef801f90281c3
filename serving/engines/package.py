"""An engine's own Python package: imported when needed, and called with the user's arguments."""

import importlib
import importlib.util
from typing import Any

from foundation.extras import install
from foundation.text import one_line
from serving.worker.engine import EngineError
from serving.worker.make import not_installed
from serving.worker.registry import ENGINES

MAX_REASON = 600
"""Characters of an engine's own words that are passed on."""

ADVICE = "install it again with what it needs, as a build for this machine"
"""The way out if a package is there but cannot be imported."""


def require(name: str, *parts: str) -> Any:
    """Import the package of one of `ENGINES`; `parts` are names in it, or in its modules, that must be there too.

    Raises:
        EngineError: it is not installed, or broken.
    """
    package = ENGINES[name].package
    try:
        imported = importlib.import_module(package)
        for part in parts:
            module, _, attribute = part.rpartition(".")
            getattr(importlib.import_module(f"{package}.{module}") if module else imported, attribute)
    except Exception as error:  # it runs its own code, and that of others, which may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise not_installed(name) from error
        raise EngineError(
            f"the Python package {package} cannot be loaded here ({in_a_line(error)}); {ADVICE}: {install(name)}"
        ) from error
    return imported


def in_a_line(error: BaseException) -> str:
    """Return an error's type and message in one line of at most `MAX_REASON` characters."""
    message = one_line(error, MAX_REASON)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def require_nixl(user: str, hint: str = "") -> None:
    """Check that NIXL is installed: engines would only notice later, with a poorer message.

    Raises:
        EngineError: it is not installed.
    """
    if not any(importlib.util.find_spec(name) for name in ("nixl", "nixl_rocm")):
        raise EngineError(f"{user} needs the Python package nixl, which is not installed: pip install nixl{hint}")


def call_with(function: Any, arguments: dict[str, Any]) -> Any:
    """Call an engine's constructor, and report the arguments that it refuses.

    Raises:
        EngineError: it refuses them.
    """
    try:
        return function(**arguments)
    except (TypeError, ValueError) as error:
        name = getattr(function, "__name__", function)
        raise EngineError(f"{name} refuses its arguments: {one_line(error, MAX_REASON)}") from error
