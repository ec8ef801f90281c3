"""The distribution that this is, and how to install what its extras need."""

import shlex

DISTRIBUTION = "dynabench-llm"
"""Its name on PyPI, where `dynabench` is another project."""

INDEXES = {"trtllm": "https://pypi.nvidia.com"}
"""By extra: where its packages come from. PyPI has only a stub of TensorRT-LLM, which fails without NVIDIA's index."""


def needed(package: str, what: str, extra: str) -> str:
    """Say that something needs a package of an extra, which is not installed."""
    return f"{what} needs the Python package {package}, which is not installed; it is in the extra {extra}: {install(extra)}"


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
