"""Metrics in Prometheus text, fetched and read: only those that are wanted, because a client that measures has little time."""

import ssl
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from dynabench.live.models import body_of

PATIENCE_S = 5.0
MAX_BYTES = 1 << 24
_AFTER_NAME = b"{ \t"

Labels = tuple[tuple[str, str], ...]
"""Names and values of labels, by name."""
Series = tuple[str, Labels]
"""The name of a sample and its labels."""


class ScrapeError(Exception):
    """Metrics that cannot be read; the message says why."""


class SilenceError(ScrapeError):
    """No answer within our patience."""


@dataclass(frozen=True, slots=True)
class Exporter:
    """Where metrics are published."""

    url: str
    headers: dict[str, str] = field(default_factory=dict)
    tls: ssl.SSLContext | None = None
    proxy: str | None = None
    """The HTTP proxy on the way to it."""


async def fetch(session: aiohttp.ClientSession, exporter: Exporter) -> bytes:
    """Return what an exporter publishes.

    Raises:
        ScrapeError: it does not answer, or not with metrics.
    """
    ssl_ = True if exporter.tls is None else exporter.tls
    try:
        # A redirection is not followed: our headers may hold a key.
        async with session.get(
            exporter.url, headers=exporter.headers, ssl=ssl_, proxy=exporter.proxy, allow_redirects=False
        ) as response:
            if response.status != 200:
                raise ScrapeError(f"it answers with status {response.status}")
            text = await body_of(response, MAX_BYTES)
    except TimeoutError as error:
        raise SilenceError(f"no answer within {PATIENCE_S:g} s") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise ScrapeError(str(error) or type(error).__name__) from error
    if not text:
        raise ScrapeError(f"the answer is empty, or longer than {MAX_BYTES:,} bytes")
    return text


def values(text: bytes, names: Iterable[str]) -> dict[Series, float]:
    """Return the samples with these names.

    Raises:
        ScrapeError: a line of them is not in Prometheus's text format.
    """
    wanted = b"\n".join(_lines(b"\n" + text, names)).decode(errors="replace")
    found: dict[Series, float] = {}
    try:
        for family in text_string_to_metric_families(f"{wanted}\n"):
            for sample in family.samples:
                found[sample.name, tuple(sorted(sample.labels.items()))] = float(sample.value)
    except (ValueError, IndexError, KeyError) as error:
        raise ScrapeError(f"not in Prometheus's text format ({error})") from error
    return found


def published(text: bytes, names: Iterable[str]) -> set[str]:
    """Return which of these names are published, also those of counters that have not counted yet."""
    text = b"\n" + text
    return {name for name in names if b"\n# TYPE %b " % name.encode() in text or any(_lines(text, (name,)))}


def _lines(text: bytes, names: Iterable[str]) -> Iterator[bytes]:
    """Yield the lines of samples with these names, of a text that begins with a line break."""
    for name in names:
        needle = b"\n" + name.encode()
        place = text.find(needle)
        while place >= 0:
            end = text.find(b"\n", place + 1)
            line = text[place + 1 : end if end >= 0 else len(text)]
            if line[len(name) : len(name) + 1] in _AFTER_NAME and len(line) > len(name):
                yield line
            place = text.find(needle, place + 1)
