"""The distribution that this is, and how to install what its extras need."""

import os
import shlex
import sys
from pathlib import Path

from foundation.errors import UserError

DISTRIBUTION = "dynabench-llm"
"""Its name on PyPI, where `dynabench` is another project."""

INDEXES = {"trtllm": "https://pypi.nvidia.com"}
"""By extra: where its packages come from. PyPI has only a stub of TensorRT-LLM, which fails without NVIDIA's index."""


def refuse_namesake(folder: Path = Path(__file__).parent.parent) -> None:
    """Refuse to run in an environment with PyPI's `dynabench`, whose modules replace ours, or the other way round.

    Args:
        folder: the folder that packages are installed in.

    Raises:
        UserError: it is there.
    """
    try:
        names = os.listdir(folder)  # noqa: PTH208 (the fastest way)
    except OSError:  # in a zip file
        return
    if any(name.startswith("dynabench-") and name.endswith((".dist-info", ".egg-info")) for name in names):
        raise UserError(
            "another project's package dynabench is installed here, too, and its modules have the names of ours; run "
            f"{sys.executable} -m pip uninstall -y dynabench {DISTRIBUTION}, and install {DISTRIBUTION} again"
        )


def needed(package: str, what: str) -> str:
    """Say that something needs a package that is not installed."""
    return f"{what} needs the Python package {package}, which is not installed: pip install {package}"


def install(extra: str) -> str:
    """Return the command that installs an extra's packages by their own names.

    Args:
        extra: one of pyproject.toml's optional dependencies.

    Raises:
        KeyError: there is no such extra.
    """
    from importlib.metadata import requires  # loads e-mail's parsers, and this is rarely asked

    parts = [requirement.replace('"', "'").partition(";") for requirement in requires(DISTRIBUTION) or ()]
    wanted = [name.strip() for name, _, condition in parts if condition.split() == ["extra", "==", f"'{extra}'"]]
    if not wanted:
        raise KeyError(extra)
    index = ["--extra-index-url", INDEXES[extra]] if extra in INDEXES else []
    return f"pip install {' '.join([*index, *map(shlex.quote, wanted)])}"
