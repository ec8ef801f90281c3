"""Watch the metrics of a measured server, and of exporters beside it, during a run.

    watching               run                 finish
    all counts      states, once a second      all counts again: what was added is of the run

A run never fails because of it: what cannot be read is missing, and the record says why.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp
from msgspec import structs

from dynabench.live.bodies import MeasuredServer
from dynabench.live.http_client import clock
from dynabench.live.scrape import (
    PATIENCE_S,
    Exporter,
    Labels,
    ScrapeError,
    Series,
    SilenceError,
    fetch,
    published,
    values,
)
from dynabench.live.server_names import SERVERS, START, GpuExporter, Software
from dynabench.live.server_reading import (
    GpuSums,
    counts_of,
    exporters_of,
    gauges,
    growing,
    growth,
    known_names,
    sample_of,
    software_of,
    times_of,
)
from dynabench.live.tls import tls_context
from foundation.text import listed
from reports.figures.server import client_side
from reports.record.records import Requests
from reports.record.server import MOST_SAMPLES, ServerSample, ServerUse
from serving.runtime.config import masked

EVERY_S = 1.0
FIRST = 0.25
"""When the first sample is taken, in such times: a short run has one, too, and it is not of the idle server."""
LATE_S = 1.0
"""How long after the last answer the server may take to count it."""
PATHS = ("/metrics", "/prometheus/metrics")
"""Where servers publish them; at TensorRT-LLM's first are statistics of its own, in JSON."""
MODEL_LABELS = ("model", "model_name")


@dataclass(slots=True, eq=False)
class Source:
    """An exporter, and what it has said; of one that serves several models, only what it says of the measured one."""

    exporter: Exporter
    model: str
    software: tuple[Software, ...]
    gpus: tuple[GpuExporter, ...]
    published: set[str]
    """The names that it publishes, of those that we know."""
    first: dict[Series, float] = field(default_factory=dict)
    starts: set[float] = field(default_factory=set)
    """When the processes that answered had started."""

    def read(self, text: bytes, names: Iterable[str]) -> dict[Series, float]:
        """Return the samples with these names.

        Raises:
            ScrapeError: they cannot be read.
        """
        found = {series: value for series, value in values(text, names).items() if 0 <= value < math.inf}
        self.starts.update(value for (name, _), value in found.items() if name == START)
        ours = {series for series in found if self._is_of_model(series[1])}
        labelled = {name for name, _ in ours}
        return {
            series: value
            for series, value in found.items()
            if series[0] != START and (series in ours or series[0] not in labelled)
        }

    def _is_of_model(self, labels: Labels) -> bool:
        return any(name in MODEL_LABELS and value.lower() == self.model.lower() for name, value in labels)


class ServerWatch:
    """What a server says of itself from `watching` to `finish`."""

    def __init__(self, target: MeasuredServer, others: Sequence[str] = (), *, every_s: float = EVERY_S) -> None:
        """Prepare to watch.

        Args:
            target: the measured server.
            others: URLs of further exporters: of its workers, of its GPUs.
            every_s: time between two samples.
        """
        self._target = target
        self._others = tuple(dict.fromkeys(others))
        self._sources: list[Source] = []
        self._samples: list[ServerSample] = []
        self._gpus = GpuSums()
        self._problems: list[str] = []
        self._every_s = every_s
        self._begun_s = clock()
        self._session: aiohttp.ClientSession | None = None
        self._sampling: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator["ServerWatch"]:
        """Look at all counts, and then sample states until `finish`, or until the block ends."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as self._session:
            found = await asyncio.gather(*map(self._find, self._places()))
            self._sources = [source for source in found if source is not None]
            self._begun_s = clock()
            self._sampling = asyncio.create_task(self._keep_sampling())
            try:
                yield self
            finally:
                await self._stop()

    async def finish(self, requests: Requests, start_s: float) -> ServerUse:
        """Look at all counts again, once the server had time to count the last answer, and return what was said.

        Args:
            requests: what the client saw in the meantime.
            start_s: time 0 of the run, on our clock.
        """
        await self._stop()
        client = client_side(requests)
        until_s = clock() + LATE_S
        while True:
            use = await self._counted()
            if clock() >= until_s or _has(use, client.answered):
                break
            await asyncio.sleep(LATE_S / 10)
        samples = tuple(structs.replace(sample, time_s=sample.time_s - start_s) for sample in self._samples)
        return structs.replace(use, samples=samples, client=client, gpus=self._gpus.uses())

    def _places(self) -> list[tuple[Exporter, ...]]:
        """Return where each exporter may be."""
        target = self._target
        # The servers whose metrics come in several formats choose one by what is accepted.
        headers = {name: value for name, value in target.headers.items() if name not in ("accept", "content-type")}
        own = tuple(Exporter(f"{target.url}{path}", headers, target.tls, target.proxy) for path in PATHS)
        others = [
            Exporter(url, {}, tls_context(url, ca_file=target.ca_file, insecure=target.insecure), target.proxy)
            for url in map(with_path, self._others)
        ]
        return [own, *((other,) for other in others if other.url != own[0].url)]

    async def _find(self, places: Sequence[Exporter]) -> Source | None:
        """Return the first of these places that has metrics that we know, with its counts."""
        reasons = []
        for exporter in places:
            try:
                text = await self._fetch(exporter)
                names = published(text, known_names())
                source = Source(exporter, self._target.model, software_of(names), exporters_of(names), names)
                if names:
                    source.read(text, gauges(source.software, source.gpus))  # if that fails, it always will
                    source.first = source.read(text, _counting(source))
                    return source
                reasons.append(f"{masked(exporter.url)} has none of {listed([one.name for one in SERVERS])}")
            except ScrapeError as error:
                reasons.append(f"{masked(exporter.url)}: {error}")
                if isinstance(error, SilenceError):
                    break
        self._problems.append(f"no metrics of the server: {reasons[0]}")
        return None

    async def _keep_sampling(self) -> None:
        await asyncio.sleep(self._every_s * FIRST)
        while self._sources:
            await self._sample()
            await asyncio.sleep(self._every_s)

    async def _sample(self) -> None:
        """Note the present state; if an exporter does not answer, that is a gap."""
        begun_s = clock()
        try:
            found = await asyncio.gather(*map(self._state, self._sources))
        except ScrapeError:
            return
        rows = _together(found)
        if rows:
            software = [one for source in self._sources for one in source.software]
            self._samples.append(sample_of((begun_s + clock()) / 2, rows, software))
        if len(self._samples) >= MOST_SAMPLES:
            del self._samples[1::2]
            self._every_s *= 2

    async def _state(self, source: Source) -> dict[Series, float]:
        rows = source.read(await self._fetch(source.exporter), gauges(source.software, source.gpus))
        for exporter in source.gpus:
            self._gpus.note(exporter, rows)
        return rows

    async def _counted(self) -> ServerUse:
        """Return what was counted since the first look."""
        problems = list(self._problems)
        found = []
        for source in self._sources:
            url = masked(source.exporter.url)
            try:
                rows = growth(source.first, source.read(await self._fetch(source.exporter), _counting(source)))
            except ScrapeError as error:
                problems.append(f"no counts of the server: {url} at the end: {error}")
                continue
            if rows is None or len(source.starts) > 1:
                problems.append(f"no counts of the server: several processes answer at {url}, or it was restarted")
                continue
            found.append((source, rows))
        software = list(dict.fromkeys(one for source in self._sources for one in source.software))
        rows = _together([rows for _, rows in found])
        names = {name for source, _ in found for name in source.published}
        try:
            times = times_of(rows, software)
        except ScrapeError as error:
            problems.append(f"no times of the server: {error}")
            times = {}
        use = ServerUse(
            software=tuple(one.name for one in software),
            problems=tuple(problems),
            length_s=clock() - self._begun_s,
            times=times,
        )
        return structs.replace(use, **counts_of(rows, software, names))

    async def _fetch(self, exporter: Exporter) -> bytes:
        assert self._session is not None, "only within `watching`"
        return await fetch(self._session, exporter)

    async def _stop(self) -> None:
        if self._sampling is not None:
            self._sampling.cancel()
            await asyncio.wait([self._sampling])
            self._sampling = None


def with_path(url: str) -> str:
    """Return the address of an exporter of which perhaps only the host is given."""
    return url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}{PATHS[0]}"


def _counting(source: Source) -> set[str]:
    return growing(source.software) | {START}


def _together(found: Sequence[dict[Series, float]]) -> dict[Series, float]:
    """Return the samples of several exporters, which may have the same names and labels."""
    if len(found) == 1:
        return found[0]
    return {
        (name, (*labels, ("exporter", str(place)))): value
        for place, rows in enumerate(found)
        for (name, labels), value in rows.items()
    }


def _has(use: ServerUse, answered: int) -> bool:
    """Return whether a server has counted that many answers, if it counts any."""
    counts = [use.times["ttft"].count] if "ttft" in use.times else []
    counts += [use.requests] if use.requests is not None else []
    return all(count >= answered for count in counts)
