"""Past runs, as a reference for simulated ones."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dynabench.fidelity.load_generators import OUTPUTS
from foundation.errors import UserError
from reports.record.records import Record, Requests
from workloads import Request, Workload, formats
from workloads.blocks import BlockNamer
from workloads.source import Source

ALIASES = {
    "arrival_s": ("arrival_s", "queued_ts", "sent_s", "arrival_time"),
    "input_tokens": ("input_tokens", "input_toks", "isl", "prompt_tokens"),
    "output_tokens": ("output_tokens", "output_toks", "osl", "completion_tokens"),
    "first_token_s": ("first_token_s", "first_token_ts"),
    "last_token_s": ("last_token_s", "last_token_ts"),
}
"""Possible column names in records; the first that exists is used. Times are in seconds on one clock."""
OPTIONAL = ("cached_tokens", "preemptions", "finish_reason", "error")
OWN_BLOCK = 1 << 20
"""Block size at which no two prompts share a block, because records do not say what prompts have in common."""


def read_requests(path: Path) -> tuple[Workload, Record]:
    """Read records of requests as the workload that was sent and the resulting run.

    They are JSON Lines, CSV, or the output of a load generator (AIPerf, vllm bench serve).

    Raises:
        UserError: the file cannot be read, or a column is missing.
    """
    table, notes = _table(path)
    columns = {name: _column(table, names, path) for name, names in ALIASES.items()}
    if "arrival_s" not in table and "queued_ts" in table and "arrival_time" in table:
        columns["arrival_s"] = _arrivals(columns["arrival_s"], _column(table, ("arrival_time",), path))
    order = np.argsort(columns["arrival_s"], kind="stable")
    columns = {name: column[order] for name, column in columns.items()}
    start = columns["arrival_s"][0]
    arrival, first, last = (columns[name] - start for name in ("arrival_s", "first_token_s", "last_token_s"))
    isl, osl = columns["input_tokens"].astype(np.int32), columns["output_tokens"].astype(np.int32)
    extra = {name: _optional(table[name], name)[order] for name in OPTIONAL if name in table}
    says_eos = extra.get("finish_reason", np.full(len(order), "")) == "stop"
    requests = [
        Request(float(arrival[n]), int(isl[n]), int(osl[n]), (n,), ends="stop" if says_eos[n] else "length")
        for n in range(len(arrival))
    ]
    known = Requests.of(
        intended_s=arrival,
        sent_s=arrival,
        first_byte_s=first,
        first_token_s=first,
        last_token_s=last,
        done_s=last,
        isl=isl,
        osl=osl,
        first_chunk_tokens=np.ones(len(isl), np.int32),
        **extra,
    )
    run = Record("real", known, np.empty((0, 5)), float(last.max()), 1)
    return Workload(path.stem, OWN_BLOCK, requests, notes, knows_prefixes=False), run


Table = dict[str, list[Any]]


def _table(path: Path) -> tuple[Table, tuple[str, ...]]:
    """Return the columns of a file, and notes on how it was read."""
    name = formats.like(path) if path.is_file() else None
    if name not in OUTPUTS:
        try:
            return _csv_columns(path) if path.suffix == ".csv" else _json_columns(path), ()
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{path}: cannot be read as request records ({error})") from error
    source = Source([path], BlockNamer(OWN_BLOCK))
    rows = list(OUTPUTS[name](source))
    if not rows:
        raise UserError(f"{path}: has no requests that were answered")
    return _columns_of(rows), (f"read as {name}", *source.notes)


def _csv_columns(path: Path) -> Table:
    from pyarrow import csv

    columns: Table = csv.read_csv(path).to_pydict()
    return columns


def _json_columns(path: Path) -> Table:
    with path.open() as lines:
        return _columns_of([dict(json.loads(line)) for line in lines if line.strip()])


def _columns_of(rows: list[dict[str, Any]]) -> Table:
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}


def _arrivals(queued_s: npt.NDArray[np.float64], time_of_day_s: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return when requests arrived, on the clock of the queue, which they enter when the step in flight ends.

    vLLM stamps arrivals with the time of day. The offset between the clocks is taken from the request that waited
    least.
    """
    return time_of_day_s + np.nanmin(queued_s - time_of_day_s)


def _column(table: Table, names: tuple[str, ...], path: Path) -> npt.NDArray[np.float64]:
    for name in names:
        if name in table:
            try:
                return np.array([np.nan if value is None else float(value) for value in table[name]])
            except (TypeError, ValueError) as error:
                raise UserError(f"{path}: {name} is not a column of numbers ({error})") from error
    raise UserError(f"{path}: has no column {names[0]} (or {', '.join(names[1:])}); it has {', '.join(table)}")


def _optional(values: list[Any], name: str) -> npt.NDArray[Any]:
    if name in ("error", "finish_reason"):
        return np.array([value if isinstance(value, str) else "" for value in values], object)
    return np.array([np.nan if value is None else value for value in values])
