"""The requests of a workload as columns: a row takes some 50 bytes, and becomes an object only when one is asked for.

arrival_s       0.0     1.5   1.7
input_length    130     100   64
output_length   5       20    7
starts          0       3     5   6       where the ids of each row begin, and where those of the last one end
ids             0 1 2   0 3   4
more            {"priority": [0, 1, 0]}   the fields that some request has, though most workloads leave them out
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, pairwise
from operator import attrgetter
from typing import Any, Self, overload

import msgspec
import numpy as np
import numpy.typing as npt

from foundation.large import Growing, let_go
from workloads.request import Request

Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[Any]
"""Whole numbers in the smallest type that holds them; objects if they need more than 64 bits."""
RARE: dict[str, Any] = {
    field.name: field.default for field in msgspec.structs.fields(Request) if field.default is not msgspec.NODEFAULT
}
"""The fields that most workloads leave out."""
CHUNK = 4096
"""Rows that are objects at the same time while columns are filled, or read in order."""

_rare, _nothing = attrgetter(*RARE), tuple(RARE.values())


class RequestColumns(Sequence[Request]):
    """See the module. Rows and columns are never changed."""

    __slots__ = ("arrival_s", "ids", "input_length", "more", "output_length", "starts")

    def __init__(
        self,
        arrival_s: Floats,
        input_length: Numbers,
        output_length: Numbers,
        starts: Numbers,
        ids: Numbers,
        more: dict[str, list[Any]] | None = None,
    ) -> None:
        self.arrival_s = arrival_s
        self.input_length = input_length
        self.output_length = output_length
        self.starts = starts
        self.ids = ids
        self.more = more or {}

    @classmethod
    def of(cls, requests: Iterable[Request]) -> Self:
        """Put requests into columns, unless they are."""
        if isinstance(requests, cls):
            return requests
        return cls.joined(cls._chunks(requests))

    @classmethod
    def _chunks(cls, requests: Iterable[Request]) -> Iterator[Self]:
        rows = iter(requests)
        while chunk := list(islice(rows, CHUNK)):
            yield cls._of_chunk(chunk)

    @classmethod
    def _of_chunk(cls, chunk: list[Request]) -> Self:
        more: dict[str, list[Any]] = {}
        if any(values != _nothing for values in map(_rare, chunk)):
            columns = zip(RARE, zip(*map(_rare, chunk), strict=True), strict=True)
            more = {name: list(values) for name, values in columns if any(value != RARE[name] for value in values)}
        names = [request.hash_ids for request in chunk]
        return cls(
            np.array([request.arrival_s for request in chunk], float),
            narrow([request.input_length for request in chunk]),
            narrow([request.output_length for request in chunk]),
            np.cumsum([0, *map(len, names)]),
            narrow(list(chain.from_iterable(names))),
            more,
        )

    @classmethod
    def joined(cls, parts: Iterable[Self]) -> Self:
        """Put the rows of several columns behind each other, one part at a time."""
        arrival_s = Growing(np.float64)
        input_length, output_length, starts, ids = (Growing(np.int32) for _ in range(4))
        more: dict[str, list[Any]] = {}
        count = num_ids = 0
        for part in parts:
            arrival_s.add(part.arrival_s)
            input_length.add(part.input_length)
            output_length.add(part.output_length)
            starts.add(narrow(part.starts[:-1] + num_ids))
            ids.add(part.ids)
            for name in more.keys() | part.more.keys():
                more.setdefault(name, [RARE[name]] * count).extend(part.values(name))
            count, num_ids = count + len(part), num_ids + len(part.ids)
        starts.add(narrow([num_ids]))
        return cls(
            arrival_s.whole(),
            input_length.whole(),
            output_length.whole(),
            starts.whole(),
            ids.whole(),
            {name: more[name] for name in RARE if name in more},
        )

    def let_go(self) -> None:
        """Free the memory of columns that are in files, until they are used again."""
        for column in (self.arrival_s, self.input_length, self.output_length, self.starts, self.ids):
            let_go(column)

    def __len__(self) -> int:
        return len(self.arrival_s)

    @overload
    def __getitem__(self, place: int) -> Request: ...
    @overload
    def __getitem__(self, place: slice) -> Self: ...
    def __getitem__(self, place: int | slice) -> Request | Self:
        if isinstance(place, slice):
            return self.take(range(len(self))[place])
        if not 0 <= place < len(self.arrival_s):
            place = range(len(self))[place]
        start, stop = self.starts.item(place), self.starts.item(place + 1)
        lengths, ids = self.lengths(place), tuple(self.ids[start:stop].tolist())
        if not self.more:
            return Request(self.arrival_s.item(place), *lengths, ids)
        more = {name: values[place] for name, values in self.more.items()}
        return Request(self.arrival_s.item(place), *lengths, ids, **more)

    def __iter__(self) -> Iterator[Request]:
        for start in range(0, len(self), CHUNK):
            yield from self._rows(slice(start, start + CHUNK))

    def _rows(self, rows: slice) -> Iterator[Request]:
        starts = self.starts[rows.start : rows.stop + 1]
        ids, ends = self.ids[starts[0] : starts[-1]].tolist(), (starts - starts[0]).tolist()
        columns, rare = (self.arrival_s, self.input_length, self.output_length), RARE if self.more else ()
        made = map(
            Request,
            *(column[rows].tolist() for column in columns),
            [tuple(ids[start:stop]) for start, stop in pairwise(ends)],
            *(self.more[name][rows] if name in self.more else [RARE[name]] * len(ends[1:]) for name in rare),
        )
        yield from made

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(self) != len(other):
            return False
        return all(mine == its for mine, its in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}.of({list(self[:3])}{', ...' * (len(self) > 3)})"

    @property
    def adapters(self) -> list[str]:
        """The adapters that requests ask for, in order of appearance."""
        return list(dict.fromkeys(filter(None, self.more.get("adapter", ()))))

    @property
    def has_media(self) -> bool:
        """Whether any prompt has images or other media."""
        return any(self.more.get("media", ()))

    @property
    def kv_ids(self) -> Numbers:
        """The ids by which requests share KV: those of the same prompt differ if the adapters do."""
        if "adapter" not in self.more:
            return self.ids
        places = {name: place for place, name in enumerate(("", *self.adapters))}
        ids, _ = numbered(self.ids)
        asked: Numbers = np.repeat([places[name] for name in self.more["adapter"]], np.diff(self.starts))
        found: Numbers = ids.astype(np.int64) * len(places) + asked
        return found

    def lengths(self, number: int) -> tuple[int, int]:
        """Return the tokens of a request's prompt and of its answer."""
        return self.input_length.item(number), self.output_length.item(number)

    def values(self, name: str) -> list[Any]:
        """Return a field that most workloads leave out, of every request."""
        return self.more.get(name) or [RARE[name]] * len(self)

    @property
    def scheduled_s(self) -> Floats:
        """When the requests arrive that wait for no other (s)."""
        waits = self.more.get("after")
        return self.arrival_s if waits is None else self.arrival_s[[not after for after in waits]]

    @property
    def is_chained(self) -> bool:
        """Whether each id follows the same id everywhere."""
        ids, count = numbered(self.ids)
        known = np.empty(count, ids.dtype)
        for part, before in self._followed(ids):
            known[part] = before
        return all(bool((known[part] == before).all()) for part, before in self._followed(ids))

    def _followed(self, ids: Numbers) -> Iterator[tuple[Numbers, Numbers]]:
        """Yield ids, those of many rows at a time, and the id that each follows; -1 if it is the first of its row."""
        for place in range(0, len(self), CHUNK):
            starts = self.starts[place : place + CHUNK + 1]
            part = ids[starts[0] : starts[-1]]
            before = np.roll(part, 1)
            before[starts[:-1][np.diff(starts) > 0] - starts[0]] = -1
            yield part, before

    def take(self, rows: Iterable[int]) -> Self:
        """Return some rows in the given order, as they are: with numbers of requests that they wait for in these rows."""
        chosen: Any
        if isinstance(rows, range) and rows.step == 1:
            chosen = slice(rows.start, max(rows.start, rows.stop))
            begin, end = self.starts[chosen.start], self.starts[chosen.stop]
            starts, ids = self.starts[chosen.start : chosen.stop + 1] - begin, self.ids[begin:end]
        else:
            chosen = np.fromiter(rows, np.int64)
            starts, ids = _gathered(self.starts, self.ids, chosen)
        return type(self)(
            self.arrival_s[chosen],
            self.input_length[chosen],
            self.output_length[chosen],
            starts,
            ids,
            {name: np.fromiter(values, object, len(self))[chosen].tolist() for name, values in self.more.items()},
        )

    def select(self, numbers: Sequence[int]) -> Self:
        """Return some rows, which wait for each other by their new numbers, and for no other row."""
        kept = self.take(numbers)
        if "after" not in kept.more:
            return kept
        places = {number: place for place, number in enumerate(numbers)}
        waits = [tuple(places[parent] for parent in after if parent in places) for after in kept.more["after"]]
        return kept.replace(after=waits)

    def in_order(self) -> Self:
        """Return the rows by arrival, the first at 0; one that waits for others is no earlier than they are."""
        starts = self.arrival_s.copy()
        for number, after in enumerate(self.more.get("after", ())):
            if after:
                starts[number] = max(starts[number], *(starts[parent] for parent in after))
        order = np.argsort(starts, kind="stable")
        return self.select(order.tolist()).replace(arrival_s=starts[order] - starts.min())

    def replace(
        self, *, arrival_s: Floats | None = None, output_length: Numbers | None = None, **more: list[Any]
    ) -> Self:
        """Return the same requests with other columns."""
        return type(self)(
            self.arrival_s if arrival_s is None else arrival_s,
            self.input_length,
            self.output_length if output_length is None else output_length,
            self.starts,
            self.ids,
            self.more | more,
        )


def narrow(values: "Sequence[int] | Numbers") -> Numbers:
    """Return whole numbers as an array of 32 bits if they fit, else of 64 bits, else of objects."""
    wide: Numbers = np.asarray(values) if len(values) else np.empty(0, np.int32)
    if wide.dtype.kind != "i":
        return np.array(values, object)
    limits = np.iinfo(np.int32)
    fits = wide.dtype == np.int32 or (limits.min <= wide.min() and wide.max() <= limits.max)
    return wide.astype(np.int32, copy=False) if fits else wide


def numbered(ids: Numbers) -> tuple[Numbers, int]:
    """Return ids as numbers from 0 that are equal where ids are, and the number above all of them."""
    if not len(ids):
        return ids, 0
    if ids.dtype != object and ids.min() >= 0 and ids.max() < 4 * len(ids):
        return ids, int(ids.max()) + 1
    found, numbers = np.unique(ids, return_inverse=True)
    return numbers, len(found)


def _gathered(starts: Numbers, ids: Numbers, rows: Numbers) -> tuple[Numbers, Numbers]:
    """Return the starts and ids of some rows."""
    lengths = np.diff(starts)[rows]
    ends = np.concatenate([[0], np.cumsum(lengths)])
    places = np.arange(ends[-1]) + np.repeat(starts[:-1][rows] - ends[:-1], lengths)
    return narrow(ends), ids[places]
