"""An engine's own Python package: imported when needed, and called with the user's arguments."""

import importlib
import importlib.util
from typing import Any

from foundation.text import one_line
from serving.worker.engine import EngineError
from serving.worker.registry import ENGINES, not_installed

MAX_REASON = 600
"""Characters of an engine's own words that are passed on."""


def require(name: str) -> Any:
    """Import the package of one of `ENGINES`.

    Raises:
        EngineError: it is not installed.
    """
    package = ENGINES[name].package
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] != package:
            raise EngineError(f"the Python package {package} cannot be loaded here: {error}") from error
        raise not_installed(name) from error
    except (ImportError, OSError, RuntimeError) as error:
        raise EngineError(f"the Python package {package} cannot be loaded here: {error}") from error


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
