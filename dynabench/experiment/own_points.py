"""Measured points of one's own engines, in the columns of published_points.csv.

    validate --contribute FILE  ->  a file of rows  ->  DYNABENCH_POINTS  ->  the model error of a run

Nothing in such a file is free text: each word is one of those that dynabench knows, and all else are numbers. So it has
no address, path, key, host name or prompt, and can be given to others. Rows are checked where they are written and where
they are read.
"""

import csv
import io
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import get_args

from foundation.errors import UserError
from foundation.files import replace_text
from mocker.config import SCHEDULERS, EngineVersion
from mocker.models.catalog import model_configs
from mocker.timing.catalog import gpu_names, moe_backends
from mocker.timing.config import Quantization

Row = dict[str, str]

SOURCE, SPLIT = "own runs;", "own"
"""What stands for the source of a published point, and for what it was used for."""
PRECISIONS = {"bfloat16": "bf16"}
"""Types of weights that are called otherwise in points."""
NUMBER = re.compile(r"[0-9]{1,12}(\.[0-9]{1,6})?")
"""No longer than a figure is, so that nothing can hide in one."""
LATER = {"moe_backend": "auto"}
"""Columns that older files lack, and what their points ran with."""
TIMES = ("silicon_ttft_ms", "silicon_tpot_ms", "ttft", "tpot")
"""Columns of numbers with decimals; those of others count something."""


@cache
def columns() -> tuple[str, ...]:
    """Return the names of the columns, in order."""
    with files(__package__).joinpath("published_points.csv").open(encoding="utf-8") as file:
        return tuple(dict.fromkeys([*next(csv.reader(file)), *LATER]))


@cache
def words() -> Mapping[str, Collection[str]]:
    """Return what columns that are no numbers may have."""
    return {
        "silicon_data_source": (SOURCE,),
        "measured": ("",),
        "backend": tuple(SCHEDULERS),
        "backend_version": ("", *get_args(EngineVersion)),
        "model_path": tuple(model_configs()),
        "system": tuple(gpu_names()),
        "gpu": tuple(gpu_names()),
        "precision": tuple(PRECISIONS.get(weights, weights) for weights in get_args(Quantization)),
        "drafts": ("False",),
        "moe_backend": moe_backends(),
        "split": (SPLIT,),
        "problem": ("",),
    }


def check(row: Mapping[str, str | None]) -> None:
    """Refuse a row with anything but known words and numbers above 0.

    Raises:
        ValueError: it has something else; the message names the column, not the value.
    """
    _check_columns(row)
    for name, value in row.items():
        known = words().get(name)
        if known is not None:
            if value not in known:
                raise ValueError(f"{name} is not one of the names that dynabench knows")
        elif value is None or not NUMBER.fullmatch(value):  # csv's reader fills short lines with None
            raise ValueError(f"{name} is not a number")
        elif name not in TIMES and not value.isdigit():
            raise ValueError(f"{name} is not a whole number")
        elif not float(value):
            raise ValueError(f"{name} is 0; expected more")


def _check_columns(names: Collection[str]) -> None:
    if set(names) != set(columns()) or len(names) != len(columns()):
        raise ValueError(f"the columns are not those of a file of points; expected {', '.join(columns())}")


def read_points(path: Path) -> list[Row]:
    """Read a file of points.

    Raises:
        UserError: it cannot be read, or has something else than points.
    """
    try:
        reader = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
        names = reader.fieldnames or ()
        lacking = {name: value for name, value in LATER.items() if name not in names}
        _check_columns([*names, *lacking])
        rows: list[Row] = [row | lacking for row in reader]
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"points {path}: {error}") from error
    for line, row in enumerate(rows, 2):
        try:
            check(row)
        except ValueError as error:
            raise UserError(f"points {path}, line {line}: {error}") from error
    return rows


def add_points(path: Path, rows: Sequence[Row]) -> None:
    """Add rows to a file of points, which is made if it is not there.

    Raises:
        UserError: the file has something else than points.
        ValueError: a row has something else than known words and numbers.
        OSError: the file cannot be written.
    """
    for row in rows:
        check(row)
    every = [*(read_points(path) if path.exists() else ()), *rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(every)
    replace_text(path, text.getvalue())
