"""Which tool wrote a file, by its content."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from foundation.errors import UserError
from foundation.text import one_line
from reports.figures.load import Load
from reports.theirs import aiperf, bench, guidellm
from reports.theirs.measured import Measured

MOST_BYTES = 1 << 30
"""Larger than the output of a run of a million requests."""
ROWS = "profile_export.jsonl"
"""AIPerf's file of single requests, in its folder of artifacts."""
FIGURES = "profile_export_aiperf.json"
Objects = list[dict[str, Any]]
Reader = Callable[[Objects], dict[str, Measured]]

READERS: tuple[tuple[str, Callable[[dict[str, Any]], bool], Reader], ...] = (
    ("guidellm's report (benchmarks with metrics)", guidellm.is_like, guidellm.read),
    ("AIPerf's profile_export.jsonl (metadata and metrics of each request)", aiperf.is_like_rows, aiperf.read_rows),
    ("AIPerf's profile_export_aiperf.json (request_latency with a unit)", aiperf.is_like, aiperf.read),
    ("vllm bench serve (request_throughput, total_token_throughput)", bench.is_like_vllm, bench.read_vllm),
    ("SGLang's bench_serving (request_throughput, total_throughput)", bench.is_like_sglang, bench.read_sglang),
)
"""What is looked for, in words; whether the first object of a file is like it; and how it is read."""


def is_theirs(path: Path) -> bool:
    """Return whether a path is a file, or AIPerf's folder, rather than a results folder of ours."""
    return path.is_file() or (path / ROWS).is_file()


def read_theirs(path: Path) -> dict[str, Measured]:
    """Return the runs of a file, by what tells them apart.

    Raises:
        UserError: no tool that is known here wrote it, or something in it is not as that tool writes it.
    """
    file = path / ROWS if path.is_dir() else path
    try:
        objects = list(_objects(file))
        for _, is_like, read in READERS:
            if objects and is_like(objects[0]):
                found = read(objects)
                return {name: replace(run, load=run.load or _load_beside(path)) for name, run in found.items()}
    except (OSError, ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
        raise UserError(f"{file}: cannot be read ({one_line(error)})") from error
    if objects and str(objects[0].get("schema", "")).startswith("dynabench."):
        raise UserError(f"{file} is ours; give the results folder that it is from")
    looked_for = "; ".join(what for what, _, _ in READERS)
    raise UserError(f"{file}: not the output of a tool that is known here; looked for {looked_for}")


def _load_beside(path: Path) -> Load | None:
    """Return how requests of an AIPerf folder were sent; None if its settings are not there, or it is a file."""
    figures = path / FIGURES
    return aiperf.load_of(next(_objects(figures))) if figures.is_file() else None


def _objects(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file that is one, or has one per line.

    Raises:
        ValueError: it is too large, or something in it is not an object.
    """
    if file.stat().st_size > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES:,} bytes")
    text = file.read_text()
    try:
        values = [json.loads(text)]
    except ValueError:
        values = [json.loads(line) for line in text.splitlines() if line.strip()]
    for value in values:
        if not isinstance(value, dict):
            raise ValueError(f"a JSON object is expected, but there is {one_line(json.dumps(value), 40)}")
        yield value
