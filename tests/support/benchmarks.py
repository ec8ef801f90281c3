"""The programs in `benchmarks/`, as modules."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def program(name: str) -> ModuleType:
    """Import a program of `benchmarks/`; it finds the others there, as it does when it is run."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return importlib.import_module(name)
