"""Logs of any kind (CSV, JSON Lines or Parquet): the user says which column holds what.

`arrival=ts,input=prompt_tokens,output=completion_tokens`, optionally with `session=`, `hash_ids=`, `priority=` and `adapter=`. A name with
dots reaches into JSON objects (`usage.prompt_tokens`). The unit of a time is given after a colon (`arrival=ts:ms`) or recognised.
"""

import datetime
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Final

from foundation.text import instead_of
from workloads.formats.format import Format
from workloads.request import Request, WorkloadError
from workloads.row import PER_SECOND, Row
from workloads.source import FAILED, Source

NEEDED: Final = ("arrival", "input", "output")
FIELDS: Final = (*NEEDED, "session", "hash_ids", "priority", "adapter")
EPOCHS: Final = ((1e17, "ns"), (1e14, "us"), (1e11, "ms"))
"""From these numbers on, a time can only be in that unit: 1e11 s is the year 5138."""
ABSENT: Final = object()
"""The value of a column that a row does not have."""


def columns(text: str) -> Format:
    """Return the format of files with these columns.

    Raises:
        WorkloadError: the text is not understood.
    """
    names: dict[str, str] = {}
    for part in text.split(","):
        field, is_named, name = (side.strip() for side in part.partition("="))
        _check_field(field)
        if not is_named or not name or field in names:
            raise WorkloadError(f"columns: expected one {field}=COLUMN, not {part!r}")
        names[field] = name
    return columns_of(names)


def columns_of(given: Mapping[str, str]) -> Format:
    """Return the format of rows whose columns hold these fields; a time's unit may follow after a colon.

    Raises:
        WorkloadError: a field that is needed is missing, or the unit is unknown.
    """
    names = dict(given)
    for field in names:
        _check_field(field)
    if missing := [field for field in NEEDED if field not in names]:
        example = "arrival=ts,input=prompt_tokens,output=completion_tokens"
        raise WorkloadError(f"columns: {', '.join(missing)} is missing; expected something like {example}")
    name, _, unit = names["arrival"].rpartition(":")
    if name and unit not in PER_SECOND:
        raise WorkloadError(f"columns: {unit!r} is not a unit of {name}; expected one of {', '.join(PER_SECOND)}")
    names["arrival"] = name or names["arrival"]
    return Format(
        name="columns",
        description="any CSV, JSON Lines or Parquet",
        is_like=lambda *_: False,
        read=functools.partial(_read, names=names, unit=unit if name else None),
    )


def _check_field(field: str) -> None:
    if field not in FIELDS:
        raise WorkloadError(f"columns: {field!r} is unknown; {instead_of(field, FIELDS)}")


def _read(source: Source, *, names: Mapping[str, str], unit: str | None) -> Iterator[Request]:
    failed: Row | None = None
    is_any_read, is_given = False, unit is not None
    for row in source.rows():
        length, output = (_tokens(row, names[field]) for field in ("input", "output"))
        if not length or not output:
            failed = failed or row
            source.count(FAILED)
            continue
        is_any_read = True
        values = {field: _value(row, name) for field, name in names.items()}
        arrival = values["arrival"]
        if unit is None and (number := _number(arrival)) is not None:
            unit = _unit_of(names["arrival"], number)
            source.keep([f"{names['arrival']} read as times in {unit} (to change: arrival={names['arrival']}:UNIT)"])
        seconds = _seconds(row, names["arrival"], arrival, unit)
        if is_given and _number(arrival) is None:
            raise row.fail(f"{names['arrival']} holds times, whose unit is known; leave out :{unit}")
        ids = values.get("hash_ids")
        blocks = source.lengths_only(length) if ids is None else _ids(row, ids, length, source)
        session = values.get("session")
        name = "" if session is None else str(session)
        own = Row(values, row.place)
        yield Request(seconds, length, output, blocks, name, priority=own.priority(), adapter=own.adapter())
    if failed is not None and not is_any_read:  # no request may have failed; the column may have another name
        for name in names.values():
            _value(failed, name)


def _value(row: Row, name: str) -> Any:
    """Return the value of a column.

    Raises:
        WorkloadError: there is none of that name.
    """
    value = _found(row, name)
    if value is ABSENT:
        raise row.fail(f"there is no column {name!r}; the columns are {', '.join(map(str, row.values))}")
    return value


def _found(row: Row, name: str) -> Any:
    """Return the value of a column, if it exists; a name with dots reaches into objects."""
    if name in row.values:
        return row.values[name]
    value: Any = row.values
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return ABSENT
        value = value[part]
    return value


def _tokens(row: Row, name: str) -> int:
    """Return a number of tokens; none if it is left out, as in logs of failed requests."""
    value = _found(row, name)
    return 0 if value is ABSENT else Row({name: value}, row.place).count(name, least=0, default=0)


def _number(value: Any) -> float | None:
    """Return a number, also from a text that is one."""
    if isinstance(value, datetime.datetime):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _unit_of(name: str, first: float) -> str:
    """Recognise a unit by the size of a time since 1970, else by the end of the column's name; else assume seconds."""
    by_size = next((unit for least, unit in EPOCHS if first >= least), None)
    return by_size or next(
        (unit for unit in ("ms", "us", "ns") if name.lower().endswith(("_" + unit, "." + unit))), "s"
    )


def _seconds(row: Row, name: str, value: Any, unit: str | None) -> float:
    if _number(value) is not None:
        return Row({name: value}, row.place).seconds(name, unit=unit or "s", least=None)
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    try:
        time = value if isinstance(value, datetime.datetime) else datetime.datetime.fromisoformat(str(value).strip())
    except ValueError:
        expected = "a number, or a time such as 2026-01-31T18:15:46.68Z"
        raise row.fail(f"{name} must be {expected}, not {str(value)[:40]!r}") from None
    return (time if time.tzinfo else time.replace(tzinfo=datetime.UTC)).timestamp()


def _ids(row: Row, ids: Any, length: int, source: Source) -> tuple[int, ...]:
    """Return block ids: a list, or in CSV its text, with or without brackets and commas."""
    if isinstance(ids, str):
        words = ids.strip().strip("[]").replace(",", " ").split()
        ids = [int(word) if word.isdecimal() else word for word in words]
    return source.blocks(Row({"hash_ids": ids}, row.place), length)
