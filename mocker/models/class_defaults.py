"""The sizes that files of multimodal models leave out: those of the language model's class in Transformers."""

import functools
import json
from pathlib import Path
from typing import Any

DEFAULTS = Path(__file__).with_name("data") / "class_defaults.json"


def class_defaults(name: str) -> dict[str, Any]:
    """Return what an architecture's class has where a file says nothing."""
    return _all().get(name, {})


@functools.cache
def _all() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(DEFAULTS.read_text())
    return found
