"""PyPI's `dynabench`, another project with a module of the same name."""

import os
import sys
from pathlib import Path

from foundation.errors import UserError
from foundation.extras import DISTRIBUTION


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
