"""`python -m dynabench.reference DIR`: write the reference; with --check, report pages that are not current."""

import os
import sys
from pathlib import Path

OF_SETTINGS = ("DYN_", "ETCD_", "NATS_", "POD_")
"""Beginnings of the variables that are defaults of settings: the pages are the same wherever they are made."""


def main(arguments: list[str]) -> None:
    """Write the pages, or compare them with those that are there."""
    for name in [name for name in os.environ if name.startswith(OF_SETTINGS)]:
        del os.environ[name]
    from dynabench.reference.pages import COMMAND, pages  # after that: defaults are read on import

    folders = [Path(word) for word in arguments if word != "--check"]
    if len(folders) != 1:
        sys.exit("usage: python -m dynabench.reference [--check] DIR")
    there = {path.name: path.read_text() for path in folders[0].glob("*.md")}
    made = pages()
    if "--check" in arguments:
        stale = sorted(name for name in there.keys() | made.keys() if there.get(name) != made.get(name))
        sys.exit(f"{', '.join(stale)}: not current; run {COMMAND}" if stale else 0)
    folders[0].mkdir(parents=True, exist_ok=True)
    for name in there.keys() - made.keys():
        (folders[0] / name).unlink()
    for name, text in made.items():
        (folders[0] / name).write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
