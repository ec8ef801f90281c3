"""What was measured as tables: Arrow inside, frames of pandas for the user, and a unit and a meaning for each column."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from foundation.errors import UserError
from foundation.extras import needed
from reports.figures import metrics
from reports.record.arrow import arrow_of
from reports.record.records import COLUMNS, Record
from reports.record.table import to_table

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


class Doc(NamedTuple):
    """What a column holds."""

    unit: str
    meaning: str


class Manifest(dict[str, Any]):
    """A manifest among a frame's `attrs`, which pandas copies with every frame made of it; this one stays the same."""

    def __deepcopy__(self, memo: Any) -> "Manifest":
        return self


RUN = {"arm": Doc("", "the arm"), "repeat": Doc("", "the run of that arm, from 0")}
"""The first columns of every table."""
TIMES = {
    name: Doc("s", f"{metrics.LABELS[name]}: {formula}")
    for name, formula in (metrics.FORMULAS | {"ttst": metrics.TTST_FORMULA}).items()
    if name in metrics.SPANS
}
"""The metrics of each request."""
DOCS: Mapping[str, Mapping[str, Doc]] = {
    "requests": RUN | {name: Doc(column.unit, column.meaning) for name, column in COLUMNS.items()} | TIMES,
    "steps": RUN
    | {
        "start_s": Doc("s", "when the first of these steps began; unknown in results that were read from a folder"),
        "steps": Doc("", "consecutive steps of one engine with the same sequences; live: 1, a chunk"),
        "sequences": Doc("", "sequences that got a token in each step; live: tokens of the chunk"),
        "first_s": Doc("s", "duration of the first step, as these sequences waited for it"),
        "last_s": Doc("s", "duration of the last step"),
        "duration_s": Doc("s", "duration of all these steps"),
    },
    "workers": RUN
    | {
        "worker": Doc("", "the worker"),
        "pool": Doc("", "its pool, if there is one"),
        "requests": Doc("", "requests that it answered"),
        "failed": Doc("", "those of them that failed"),
        "prompt_tokens": Doc("tokens", "prompt tokens of these requests"),
        "cached_tokens": Doc("tokens", "those of them that it found in its cache"),
        "output_tokens": Doc("tokens", "tokens that it generated"),
        "ttft_sched": Doc("s", "mean TTFT of these, from the intended arrival"),
        "tpot": Doc("s", "mean TPOT of these requests"),
    },
    "events": RUN
    | {
        "time_s": Doc("s", "when it happened, from the start of the run"),
        "event": Doc("", "what happened: a time of a request without its _s, or what became of workers"),
        "request": Doc("", "the request, if it is about one"),
        "worker": Doc("", "the request's worker"),
        "pool": Doc("", "the pool whose workers changed"),
        "detail": Doc("", "the numbers of workers, or the planner's reason"),
    },
}
"""Every table, with its columns."""
EVENTS = tuple(name for name, column in COLUMNS.items() if column.unit == "s")
"""The times of a request."""


def table(name: str, runs: Sequence[Record]) -> "pa.Table":
    """Return a table of the runs as Arrow; unknown values are null.

    Raises:
        UserError: there is no such table.
    """
    if name not in DOCS:
        raise UserError(f"there is no table {name!r}; expected one of {', '.join(DOCS)}")
    found: pa.Table = {"requests": _requests, "steps": _steps, "workers": _workers, "events": _events}[name](runs)
    return found


def frame(name: str, runs: Sequence[Record], manifest: Mapping[str, Any]) -> "pd.DataFrame":
    """Return the same as a frame of pandas, whose `attrs` hold the manifest and the columns' units.

    Raises:
        UserError: pandas is not installed.
    """
    found = to_pandas(table(name, runs), f"result.{name}")
    found.attrs = {
        "manifest": Manifest(manifest),
        "units": {column: doc.unit for column, doc in DOCS[name].items() if doc.unit},
    }
    return found


def to_pandas(table: "pa.Table", what: str) -> "pd.DataFrame":
    """Return a table as a frame.

    Raises:
        UserError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError:
        raise UserError(needed("pandas", what, "notebook")) from None
    types: Any = {"int32": pd.Int32Dtype(), "int64": pd.Int64Dtype()}
    # Whole numbers stay whole beside unknown ones.
    return table.to_pandas(types_mapper=lambda kind: types.get(str(kind)))


def columns() -> "pd.DataFrame":
    """Return the unit and the meaning of every column of every table.

    Raises:
        UserError: pandas is not installed.
    """
    import pyarrow as pa

    rows = [(name, column, *doc) for name, its in DOCS.items() for column, doc in its.items()]
    heads = ("table", "column", "unit", "meaning")
    made = pa.table(dict(zip(heads, map(list, zip(*rows, strict=True)), strict=True)))
    return to_pandas(made, "result.columns").set_index(["table", "column"])


def _requests(runs: Sequence[Record]) -> "pa.Table":
    made = to_table(runs).drop_columns("run")
    for name in TIMES:
        values = np.concatenate([metrics.of_each(run.requests, name) for run in runs])
        made = made.append_column(name, arrow_of(np.ma.masked_invalid(values)))
    return made


def _steps(runs: Sequence[Record]) -> "pa.Table":
    def rows() -> Iterator[dict[str, Any]]:
        for run in runs:
            first, slope, curve, steps, tokens = run.gaps.reshape(-1, 5).T
            starts_s = np.full(len(first), np.nan) if run.gap_starts_s is None else run.gap_starts_s
            last = steps - 1
            yield {
                "start_s": np.ma.masked_invalid(starts_s),
                "steps": steps.astype(np.int64),
                "sequences": tokens.astype(np.int64),
                "first_s": first,
                "last_s": first + last * (slope + last * curve),
                "duration_s": steps * (first + last * (slope / 2 + curve * (2 * steps - 1) / 6)),
            }

    return _joined("steps", runs, list(rows()))


def _workers(runs: Sequence[Record]) -> "pa.Table":
    def rows() -> Iterator[dict[str, Any]]:
        for run in runs:
            requests = run.measured.requests
            known = ~np.ma.getmaskarray(requests.worker)
            number, count = requests.worker.data[known].astype(np.int64), max(run.num_workers, 1)
            count = max(count, int(number.max(initial=-1)) + 1)

            def total(values: Any, number: Any = number, known: Any = known, count: int = count) -> Any:
                return np.bincount(number, weights=np.ma.filled(values, 0)[known].astype(float), minlength=count)

            def mean(values: Any, total: Any = total) -> Any:
                with np.errstate(invalid="ignore"):
                    return np.ma.masked_invalid(total(np.nan_to_num(values)) / total(~np.isnan(values)))

            cached = requests.cached_tokens
            pools = [pool.name for pool in run.pools for _ in range(pool.workers)]
            yield {
                "worker": np.arange(count),
                "pool": np.array(pools if len(pools) == count else [""] * count, object),
                "requests": total(np.ones(len(requests))).astype(np.int64),
                "failed": total(~requests.succeeded).astype(np.int64),
                "prompt_tokens": total(requests.isl).astype(np.int64),
                "cached_tokens": np.ma.MaskedArray(total(cached).astype(np.int64), np.ma.getmaskarray(cached).all()),
                "output_tokens": total(requests.osl).astype(np.int64),
                "ttft_sched": mean(metrics.of_each(requests, "ttft_sched")),
                "tpot": mean(metrics.of_each(requests, "tpot")),
            }

    return _joined("workers", runs, list(rows()))


def _events(runs: Sequence[Record]) -> "pa.Table":
    return _joined("events", runs, [_events_of(run) for run in runs])


def _events_of(run: Record) -> dict[str, Any]:
    """Return everything that has a time, in order of time."""
    requests, nobody = run.requests, np.ma.MaskedArray
    parts: list[dict[str, Any]] = []
    for name in EVENTS:
        values = getattr(requests, name)
        known = ~np.ma.getmaskarray(values)
        parts.append(
            {
                "time_s": np.ma.getdata(values)[known],
                "event": np.full(int(known.sum()), name.removesuffix("_s"), object),
                "request": nobody(requests.request[known], False),
                "worker": requests.worker[known],
                "pool": np.full(int(known.sum()), "", object),
                "detail": np.full(int(known.sum()), "", object),
            }
        )
    fleet = [(time_s, event, pool, detail) for time_s, event, pool, detail in _fleet_events(run)]
    if fleet:
        times, events, pools, details = zip(*fleet, strict=True)
        unknown = nobody(np.zeros(len(fleet), np.int32), True)
        texts = {"event": events, "pool": pools, "detail": details}
        parts.append(
            {"time_s": np.array(times, float), "request": unknown, "worker": unknown}
            | {name: np.array(values, object) for name, values in texts.items()}
        )
    joined = {name: np.ma.concatenate([part[name] for part in parts]) for name in parts[0]}  # type: ignore[no-untyped-call]
    order = np.argsort(np.ma.getdata(joined["time_s"]), kind="stable")
    return {name: values[order] for name, values in joined.items()}


def _fleet_events(run: Record) -> Iterator[tuple[float, str, str, str]]:
    if run.fleet is None:
        return
    for pool in run.fleet.pools:
        for count in pool.history:
            states = {
                "pending": count.pending,
                "starting": count.starting,
                "ready": count.ready,
                "draining": count.draining,
            }
            detail = ", ".join(f"{number} {state}" for state, number in states.items() if number)
            yield count.time_s, "workers", pool.pool, detail
        for died_s in pool.died_s:
            yield died_s, "died", pool.pool, ""
    for change in run.fleet.changes:
        yield change.time_s, "planned", change.pool, f"{change.before} to {change.after}: {change.reason}"


def _joined(name: str, runs: Sequence[Record], parts: Sequence[Mapping[str, Any]]) -> "pa.Table":
    """Put the rows of all runs into one table, with the columns in the order of `DOCS`."""
    import pyarrow as pa

    tables = []
    for run, part in zip(runs, parts, strict=True):
        count = len(next(iter(part.values())))
        whole = {"arm": np.full(count, run.arm, object), "repeat": np.full(count, run.repeat)} | dict(part)
        tables.append(pa.table({column: arrow_of(np.ma.asarray(whole[column])) for column in DOCS[name]}))
    return pa.concat_tables(tables)
