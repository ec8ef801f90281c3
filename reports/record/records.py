"""The record of a run: a row per request, and the gaps between tokens.

`Requests` describes every column once: its type, unit, meaning, and whether it may be unknown. The files, the
checks of what others wrote and the table in docs/reading-a-report.md follow from it.

    both clocks --(by number)--> RequestLog --finish--> Requests --+-- gaps, facts --> Record --> requests.parquet
                                                        past runs -^

Unknown values are masked; no special value means unknown. A column whose rows are all equal takes no memory for each.
"""

import typing
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Self

import numpy as np
import numpy.typing as npt

from foundation.large import Cells, filled, let_go
from reports.record.fleet import FleetUse
from reports.record.pools import AdapterUse, DraftUse, EncoderUse, KvOverTime, LinkUse, PoolUse, TierUse
from reports.record.server import ServerUse

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]
Texts = npt.NDArray[np.object_]
MaybeFloats = np.ma.MaskedArray[tuple[Any, ...], np.dtype[np.float64]]
MaybeInts = np.ma.MaskedArray[tuple[Any, ...], np.dtype[np.int32]]

MAX_WORKERS = 1_000_000
MAX_S = 1e12
"""No time of a run is farther from its start, so figures computed from times stay finite."""


@dataclass(frozen=True, slots=True)
class Column:
    """What a column of requests.parquet holds."""

    meaning: str
    unit: str = ""
    default: Any = None
    """The value of a request for which nothing else is given."""
    limit: int = 1 << 31
    """Whole numbers are below this."""
    least: int = 0
    """The smallest whole number."""
    name: str = ""
    dtype: type = object
    may_be_unknown: bool = False

    @property
    def must_be_given(self) -> bool:
        """Whether every request has a value, and there is none for those for which nothing else is given."""
        return not self.may_be_unknown and self.default is None

    def array(self, values: Any, count: int) -> Any:
        """Return values (None: all unknown) as an array of the column's type, masked if they may be unknown.

        Raises:
            TypeError: a column that must be known is unknown.
        """
        if values is None and self.default is not None:
            values = _repeated(self.default, count, self.dtype)
        if not self.may_be_unknown:
            if values is None:
                raise TypeError(f"requests need the column {self.name}")
            return thin(np.asarray(values, self.dtype))
        if values is None:
            return np.ma.MaskedArray(_repeated(0, count, self.dtype), _repeated(True, count, bool))
        if isinstance(values, list):
            values = np.ma.MaskedArray([value or 0 for value in values], [value is None for value in values])
        is_unknown, values = np.ma.getmask(values), np.ma.getdata(values)
        if values.dtype.kind == "f" and (is_nan := np.isnan(values)).any():
            is_unknown = is_unknown | is_nan
            values = np.where(is_unknown, 0, values)
        if is_unknown is np.ma.nomask:
            is_unknown = _repeated(False, len(values), bool)
        return np.ma.MaskedArray(thin(values.astype(self.dtype, copy=False)), thin(is_unknown))


def thin(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return equal values as an array that takes no memory for each row, and others as they are."""
    if len(values) < 2 or not (values == values[0]).all():
        return values
    return _repeated(values[0], len(values), values.dtype)


def _repeated(value: Any, count: int, dtype: Any) -> npt.NDArray[Any]:
    return np.broadcast_to(np.array(value, dtype), count)


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """The outcome of each request, an array per column; times are from the start of the run."""

    request: Annotated[Ints, Column("its line in the workload, from 0")]
    worker: Annotated[MaybeInts, Column("the worker that answered it", limit=MAX_WORKERS)]
    intended_s: Annotated[Floats, Column("when the schedule wanted it sent", "s")]
    sent_s: Annotated[MaybeFloats, Column("when its bytes were written", "s")]
    admitted_s: Annotated[MaybeFloats, Column("when an engine first scheduled it (live: of our own stack)", "s")]
    prefill_worker: Annotated[
        MaybeInts, Column("the worker that computed its prompt, if it was another one", limit=MAX_WORKERS)
    ]
    prefill_queued_s: Annotated[MaybeFloats, Column("when it was sent to that worker", "s")]
    prefill_end_s: Annotated[MaybeFloats, Column("when its prompt was computed there", "s")]
    decode_queued_s: Annotated[MaybeFloats, Column("when it was sent to the worker that answered it", "s")]
    decode_blocks_s: Annotated[MaybeFloats, Column("when that worker had allocated blocks for its prompt", "s")]
    transfer_start_s: Annotated[MaybeFloats, Column("when the transfer of its KV started", "s")]
    transfer_end_s: Annotated[MaybeFloats, Column("when the transfer of its KV ended", "s")]
    decode_start_s: Annotated[MaybeFloats, Column("when that worker started to compute its tokens", "s")]
    first_byte_s: Annotated[MaybeFloats, Column("when the first byte of the answer arrived", "s")]
    first_token_s: Annotated[MaybeFloats, Column("when the first chunk with text arrived", "s")]
    second_token_s: Annotated[MaybeFloats, Column("when the second token arrived", "s")]
    last_token_s: Annotated[
        MaybeFloats, Column("when the last token arrived; an answer without tokens, as a whole", "s")
    ]
    done_s: Annotated[MaybeFloats, Column("when the answer ended", "s")]
    isl: Annotated[Ints, Column("prompt length as the server reported it; otherwise as in the workload", "tokens")]
    osl: Annotated[Ints, Column("output length", "tokens", 0)]
    planned_isl: Annotated[MaybeInts, Column("prompt length in the workload", "tokens")]
    planned_osl: Annotated[MaybeInts, Column("output length in the workload", "tokens")]
    priority: Annotated[MaybeInts, Column("priority in the workload: the smallest goes first", least=-(1 << 31))]
    adapter: Annotated[Texts, Column("the LoRA adapter that it asked for; empty for the model itself", default="")]
    first_chunk_tokens: Annotated[Ints, Column("tokens of the first chunk", "tokens", 0)]
    cached_tokens: Annotated[MaybeInts, Column("prompt tokens the engine found in its cache", "tokens")]
    host_tokens: Annotated[MaybeInts, Column("cached tokens that were loaded from host memory", "tokens")]
    disk_tokens: Annotated[MaybeInts, Column("cached tokens that were loaded from disk", "tokens")]
    store_tokens: Annotated[MaybeInts, Column("cached tokens that were loaded from the shared store", "tokens")]
    predicted_tokens: Annotated[
        MaybeInts, Column("prompt tokens that the router expected to be cached there", "tokens")
    ]
    best_tokens: Annotated[MaybeInts, Column("prompt tokens cached at the best worker when it was routed", "tokens")]
    endless_tokens: Annotated[MaybeInts, Column("prompt tokens an unlimited cache would have held", "tokens")]
    queue_depth: Annotated[MaybeInts, Column("other requests in flight at its worker when it was routed")]
    preemptions: Annotated[MaybeInts, Column("how often the engine preempted it")]
    finish_reason: Annotated[
        Texts,
        Column(
            "how the answer ended: `length`, `stop` or another reason that the server gives; empty if it gives none",
            default="",
        ),
    ]
    error: Annotated[Texts, Column("why it failed; empty if it did not", default="")]
    is_measured: Annotated[Flags, Column("whether it counts: sent after the warm-up, within the window", default=True)]

    @classmethod
    def of(cls, **known: Any) -> Self:
        """Make a record from columns of equal length; omitted ones have their default, or are unknown.

        A list may hold None for unknown values. `request` counts from 0 if it is omitted.

        Raises:
            TypeError: there is no such column, or one that must be known is omitted.
        """
        if strange := known.keys() - COLUMNS.keys():
            raise TypeError(f"requests have no column {', '.join(sorted(strange))}")
        count = len(next(iter(known.values())))
        known.setdefault("request", range(count))
        return cls(**{name: column.array(known.get(name), count) for name, column in COLUMNS.items()})

    @classmethod
    def concatenate(cls, parts: "Sequence[Requests]") -> Self:
        """Join the rows of several records."""
        if len(parts) == 1:
            return cls(**{name: getattr(parts[0], name) for name in COLUMNS})
        joined: dict[str, Any] = {}
        for name in COLUMNS:
            joined[name] = np.ma.concatenate([getattr(part, name) for part in parts])  # type: ignore[no-untyped-call]
        return cls(**{name: column.array(joined[name], len(joined[name])) for name, column in COLUMNS.items()})

    def __len__(self) -> int:
        return len(self.request)

    def __getitem__(self, rows: Any) -> Self:
        """Return some rows, selected by a mask, numbers or a slice."""
        if isinstance(rows, np.ndarray) and rows.dtype == bool and rows.all():
            return self
        return type(self)(**{name: getattr(self, name)[rows] for name in COLUMNS})

    def __reduce__(self) -> Any:
        """Travel between processes without a value for each row where all are equal."""
        return _unpacked, (type(self), len(self), {name: _packed(getattr(self, name)) for name in COLUMNS})

    def replace(self, **columns: Any) -> Self:
        """Return the same requests with other columns, passed as to `of`."""
        return replace(self, **{name: COLUMNS[name].array(values, len(self)) for name, values in columns.items()})

    @property
    def prompt_worker(self) -> MaybeInts:
        """The worker that computed each prompt: one that only prefills, or the one that answered."""
        answered = self.prefill_worker.mask
        workers = np.where(answered, self.worker.data, self.prefill_worker.data)
        return np.ma.MaskedArray(workers, answered & self.worker.mask)

    @property
    def succeeded(self) -> Flags:
        """Which requests did not fail."""
        if self.error.strides == (0,):  # equal texts are compared once
            return np.full(len(self), not len(self) or self.error[0] == "")
        return np.asarray(self.error == "", bool)

    @property
    def failure(self) -> tuple[str, ...]:
        """A note if every request failed."""
        return (f"every request failed, the first with: {self.error[0]}",) if all(self.error) and len(self) else ()


def _packed(values: Any) -> tuple[Any, Any]:
    """Return a column's values and what is unknown (None: it cannot be), each one value if all are equal."""
    unknown = np.ma.getmaskarray(values) if isinstance(values, np.ma.MaskedArray) else None
    shown, hidden = (
        each[:1].copy() if each is not None and each.strides == (0,) else each
        for each in (np.ma.getdata(values), unknown)
    )
    return shown, hidden


def _unpacked(kind: type[Requests], count: int, packed: dict[str, tuple[Any, Any]]) -> Requests:
    def column(values: Any, unknown: Any) -> Any:
        values = np.broadcast_to(values, count) if len(values) < count else values
        if unknown is None:
            return values
        return np.ma.MaskedArray(values, np.broadcast_to(unknown, count) if len(unknown) < count else unknown)

    return kind(**{name: column(*each) for name, each in packed.items()})


def _columns() -> dict[str, Column]:
    """Complete each column's description from its annotation."""
    found = {}
    for name, hint in typing.get_type_hints(Requests, include_extras=True).items():
        kind, column = typing.get_args(hint)
        dtype = typing.get_args(typing.get_args(kind)[1])[0]
        found[name] = replace(
            column, name=name, dtype=dtype, may_be_unknown=issubclass(typing.get_origin(kind), np.ma.MaskedArray)
        )
    return found


COLUMNS: Mapping[str, Column] = _columns()
"""Every column by its name."""


class RequestLog:
    """Notes what happens to each request, by its number; what is never noted is unknown.

    Each column of `Requests` is an attribute. It is made on first use and is a plain `array` (a list for text), or a
    file if it is large: nothing is faster to write from Python, and unused columns take no memory.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getattr__(self, name: str) -> Any:
        column = COLUMNS.get(name)
        if column is None:
            raise AttributeError(f"requests have no column {name}")
        values = _unwritten(column, self._count)
        setattr(self, name, values)
        return values

    def noted(self, name: str) -> Any:
        """Return what was noted in a column so far, unknown where nothing was; it is not a copy."""
        return _written(COLUMNS[name], getattr(self, name))

    def let_go(self) -> None:
        """Free the memory of what was noted so far, as far as it is in files."""
        for values in vars(self).values():
            let_go(values)

    def finish(self, rows: Any = slice(None), **known: Any) -> Requests:
        """Return what was noted for some rows (default: all), with whole columns from elsewhere."""
        noted = {
            name: self.noted(name)[rows]
            for name, column in COLUMNS.items()
            if name not in known and name != "request" and (name in vars(self) or column.must_be_given)
        }
        return Requests.of(request=np.arange(self._count, dtype=np.int32)[rows], **noted | known)


_NOT_WRITTEN = -(1 << 31)  # only in the arrays of a log; elsewhere unknown values are masked


def _unwritten(column: Column, count: int) -> "Cells | list[Any]":
    if column.dtype is np.float64:
        return filled(array("d", [np.nan]), count)
    if column.dtype is np.int32:
        return filled(array("i", [_NOT_WRITTEN if column.may_be_unknown else 0]), count)
    return [column.default] * count


def _written(column: Column, values: "Cells | list[Any]") -> npt.NDArray[Any]:
    """Return what was noted in a column of a log, masked where nothing was noted."""
    found: npt.NDArray[Any] = (
        np.array(values, column.dtype)
        if isinstance(values, list) or not values
        else np.frombuffer(values, column.dtype)
    )
    if not column.may_be_unknown:
        return found
    return np.ma.MaskedArray(found, np.isnan(found) if column.dtype is np.float64 else found == _NOT_WRITTEN)


@dataclass(frozen=True, slots=True)
class Record:
    """The result of one run of one arm, the same for both clocks.

    `gaps` are the times between tokens as rows (first, slope, curve, steps, tokens): for each of `steps` steps j, `tokens`
    sequences waited `first + slope*j + curve*j*j` seconds for their next token.
    """

    arm: str
    requests: Requests
    gaps: Floats
    wall_s: float
    num_workers: int
    repeat: int = 0
    is_complete: bool = True
    notes: tuple[str, ...] = ()
    """What makes the run invalid, such as a client that was late."""
    facts: Mapping[str, float] = field(default_factory=dict)
    """What else is known about it, such as how busy the client was."""
    is_live: bool = False
    """Whether each row of `gaps` is a chunk that came over HTTP."""
    pools: tuple[PoolUse, ...] = ()
    """How busy workers were, if that is known."""
    links: tuple[LinkUse, ...] = ()
    """How busy the links between them were, if KV is transferred."""
    tiers: tuple[TierUse, ...] = ()
    """What KV tiers held and moved, if there are any."""
    adapters: tuple[AdapterUse, ...] = ()
    """What LoRA adapters were asked for, and how often they were loaded, if there are any."""
    drafts: tuple[DraftUse, ...] = ()
    """What speculative decoding drafted, if there is any."""
    encoders: tuple[EncoderUse, ...] = ()
    """What encoders of images and other media did, if requests had any."""
    kv: tuple[KvOverTime, ...] = ()
    """How full the KV of each pool was over time, if that is known."""
    fleet: FleetUse | None = None
    """How the number of workers changed, if that is known."""
    server: ServerUse | None = None
    """What a measured server says of itself, if it was asked."""
    gap_starts_s: Floats | None = None
    """When the first gap of each row of `gaps` began (s), if that is known; results folders do not have it."""

    @property
    def measured(self) -> "Record":
        """The same without the requests of the warm-up and after the window; `gaps` never include those."""
        kept = self.requests.is_measured
        return self if kept.all() else replace(self, requests=self.requests[kept])
