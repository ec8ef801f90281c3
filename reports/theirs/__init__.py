"""Runs that other tools measured, read from what they wrote: AIPerf, guidellm, vLLM's and SGLang's benches.

    file --(by content)--> reader --+-- a value for each request --> Record --+--> Measured --> one table, in words
                                    +-- figures only -------------------------+

Requests of different tools are not the same requests, so nothing is paired: an interval of a difference is that of two
means. What a file lacks is said in words, and no figure is shown under a name that has another meaning here.
"""

from collections.abc import Sequence
from pathlib import Path

from reports import folder
from reports.figures.load import load_of
from reports.theirs.measured import Measured, of_runs
from reports.theirs.source import is_theirs, read_theirs

__all__ = ["Measured", "is_theirs", "read", "read_all"]


def read_all(paths: Sequence[Path]) -> dict[str, Measured]:
    """Return the runs of files of other tools and of our results folders, by a name that no other has.

    Raises:
        UserError: one cannot be read, or is given twice.
    """
    labels = folder.labels_of(paths)
    found: dict[str, Measured] = {}
    for path in paths:
        its = read(path)
        for name, measured in its.items():
            found[" ".join(filter(None, [labels[path], name if len(its) > 1 else ""]))] = measured
    return found


def read(path: Path) -> dict[str, Measured]:
    """Return the runs of one file or folder, by what tells them apart.

    Raises:
        UserError: it cannot be read.
    """
    if is_theirs(path):
        return read_theirs(path)
    manifest, runs = folder.read(path)
    arms = dict.fromkeys(run.arm for run in runs)
    return {
        arm: of_runs([run for run in runs if run.arm == arm], tool="dynabench", load=load_of(manifest, arm))
        for arm in arms
    }
