"""How to install what an extra needs."""

import shlex
from importlib.metadata import requires


def install(extra: str) -> str:
    """Return the command that installs an extra's packages by their own names: on PyPI, `dynabench` is another project.

    Args:
        extra: one of pyproject.toml's optional dependencies.
    """
    parts = [requirement.partition(";") for requirement in requires("dynabench") or ()]
    wanted = [name.strip() for name, _, condition in parts if condition.split() in _conditions(extra)]
    if not wanted:
        raise KeyError(extra)
    return f"pip install {' '.join(map(shlex.quote, wanted))}"


def _conditions(extra: str) -> list[list[str]]:
    return [["extra", "==", f"{quote}{extra}{quote}"] for quote in "'\""]
