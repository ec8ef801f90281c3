"""Files of step times: calibrations (JSON) and tables (Dynamo's profiler NPZ, or CSV and Parquet of our own)."""

import functools
import json
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mocker.timing.calibrated import StepCosts
from mocker.timing.table import StepTable

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA = "dynabench.calibration/2"
OVERHEADS = ("request_ms", "prompt_token_us", "spacing_ms", "answer_ms")
COLUMNS = ("prefill_tokens", "num_decodes", "kv_tokens", "step_ms")
MAX_NPZ_BYTES = 1 << 26


@functools.lru_cache(maxsize=16)
def read_calibration(path: str) -> dict[str, Any]:
    """Read a file from `dynabench calibrate`; `step` is its `StepCosts`.

    Raises:
        ValueError: the file is not a calibration.
    """
    try:
        found: dict[str, Any] = json.loads(Path(path).read_text())
        if found.get("schema") != SCHEMA:
            raise ValueError(f"expected schema {SCHEMA}, not {found.get('schema')!r}; calibrate again")
        step = dict(found["step"])
        step["tokens"] = tuple((float(knot), float(slope)) for knot, slope in step["tokens"])
        return found | {
            "engine": dict(found["engine"]),
            "step": StepCosts(**step),
            "overhead": {name: float(found["overhead"][name]) for name in OVERHEADS},
            "noise": tuple(float(factor) for factor in found["noise"]),
        }
    except KeyError as error:
        raise ValueError(f"timing_file {path}: not a calibration (it has no {error})") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"timing_file {path}: not a calibration ({error})") from error


@functools.lru_cache(maxsize=16)
def read_table(path: str) -> StepTable:
    """Read a table of step times.

    An NPZ has prefill_isl, prefill_ttft_ms, decode_active_kv_tokens, decode_context_length and decode_itl, as Dynamo's
    profiler writes them; a CSV or Parquet has prefill_tokens, num_decodes, kv_tokens and step_ms.

    Raises:
        ValueError: the file is none of these, or lacks one kind of step.
    """
    try:
        prefill, decode = _read_npz(path) if path.endswith(".npz") else _read_rows(path)
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, zipfile.BadZipFile) as error:
        raise ValueError(f"timing_file {path}: not a table of step times ({error})") from error
    if not prefill or not decode:
        raise ValueError(f"timing_file {path}: needs rows with prefill and rows with decodes")
    curves = tuple((count, _curve(points)) for count, points in sorted(decode.items()))
    return StepTable(prefill=_curve(prefill), decode=curves)


def _read_npz(path: str) -> tuple[dict[float, list[float]], dict[int, dict[float, list[float]]]]:
    """Read Dynamo's profile: a sequence's share of the active KV tokens is its context, so their ratio counts sequences."""
    import numpy as np

    with zipfile.ZipFile(path) as packed:
        size = sum(entry.file_size for entry in packed.infolist())
    if size > MAX_NPZ_BYTES:
        raise ValueError(f"it unpacks to {size:,} bytes; expected at most {MAX_NPZ_BYTES:,}")
    with np.load(path, allow_pickle=False) as file:
        columns = {name: np.asarray(file[name], float).ravel() for name in file.files}
    prefill: dict[float, list[float]] = defaultdict(list)
    decode: dict[int, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for tokens, time in zip(columns["prefill_isl"], columns["prefill_ttft_ms"], strict=True):
        prefill[tokens].append(time / 1e3)
    rows = (columns[name] for name in ("decode_active_kv_tokens", "decode_context_length", "decode_itl"))
    for kv, context, time in zip(*rows, strict=True):
        decode[max(round(kv / context), 1)][kv].append(time / 1e3)
    return prefill, decode


def _read_rows(path: str) -> tuple[dict[float, list[float]], dict[int, dict[float, list[float]]]]:
    import numpy as np

    table = _read_arrow(path)
    if missing := [name for name in COLUMNS if name not in table.column_names]:
        raise ValueError(f"column {missing[0]} is missing; expected {', '.join(COLUMNS)}")
    prefill: dict[float, list[float]] = defaultdict(list)
    decode: dict[int, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for tokens, count, kv, time in zip(*(np.asarray(table[name], float).tolist() for name in COLUMNS), strict=True):
        if tokens > 0 and count > 0:
            continue  # a mixed step: it does not show the times of its parts
        if tokens > 0:
            prefill[float(tokens)].append(time / 1e3)
        elif count > 0:
            decode[int(count)][float(kv)].append(time / 1e3)
    return prefill, decode


def _read_arrow(path: str) -> "pa.Table":
    """Read a table from Arrow columns."""
    if path.endswith(".parquet"):
        from pyarrow import parquet

        return parquet.read_table(path)
    from pyarrow import csv

    return csv.read_csv(path)


def _curve(points: dict[float, list[float]]) -> tuple[tuple[float, float], ...]:
    """Return the median of measurements at the same point."""
    return tuple((x, sorted(values)[len(values) // 2]) for x, values in sorted(points.items()))
