"""Which installed schedulers have been compared with ours, and where that is written down.

Those whose rules are known were compared in `.ci/engines`. For any other, `dynabench verify --engine-core vllm` does it, and
writes what it found into `engine-cores.json` in the user's cache, under a digest of the files that schedule: if they are
patched, they count as another version. Of versions whose rules are known, patched ones are not recognised.
"""

import os
from pathlib import Path
from typing import NamedTuple

import msgspec

from foundation.errors import UserError
from mocker.config import EngineType, version_of

ENOUGH = 60
"""Random scenarios after which a version may be used."""


class Release(NamedTuple):
    """Which scheduler is installed."""

    engine: EngineType
    version: str
    digest: str
    """Of the files that schedule."""


class Comparison(msgspec.Struct, frozen=True):
    """What a comparison found."""

    version: str
    """Release of the engine."""
    rules: str
    """Version of our rules."""
    num_scenarios: int
    num_identical: int
    differs_in: list[str]
    """Rules that explain the scenarios in which they differ, each once; "unknown" for those that none explains."""


def comparisons_file() -> Path:
    """Return the file with all comparisons of this user."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "dynabench" / "engine-cores.json"


def comparisons() -> dict[str, Comparison]:
    """Return the comparisons of this user, by the digest of a release.

    Raises:
        UserError: the file is damaged, or cannot be read.
    """
    path = comparisons_file()
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Comparison])
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); remove it, or allow it to be read") from error
    except msgspec.MsgspecError as error:
        raise UserError(
            f"{path}: cannot be read ({error}); remove it, and run dynabench verify --engine-core again"
        ) from error


def note(release: Release, comparison: Comparison) -> Path:
    """Write a comparison down, unless one in more scenarios is there; return the file."""
    path, found = comparisons_file(), comparisons()
    known = found.get(release.digest)
    if known is not None and known.num_scenarios > comparison.num_scenarios:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    found |= {release.digest: comparison}
    half = path.with_suffix(".tmp")
    half.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2))
    half.replace(path)
    return path


def refuse_unknown(release: Release, python: str) -> None:
    """Refuse a scheduler that was not compared with ours in enough scenarios.

    Raises:
        UserError: it was not.
    """
    if release.engine == "sglang":  # its program refuses other versions than the one whose rules are ours
        return
    try:
        version_of(release.version)
    except ValueError:
        known = comparisons().get(release.digest)
        if known is not None and known.num_scenarios >= ENOUGH:
            return
        how_often = "never compared with ours"
        if known is not None:
            how_often = f"compared with ours in only {known.num_scenarios} of the {ENOUGH} scenarios that are needed"
        raise UserError(
            f"{python} has vLLM {release.version}, whose scheduler was {how_often}; run dynabench verify --engine-core vllm "
            f"--engine-python {python} first"
        ) from None
