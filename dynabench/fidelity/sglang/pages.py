"""How SGLang names pages of KV in its events: by a hash of their tokens and everything before them."""

from array import array
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from hashlib import sha256

from dynabench.fidelity.recordings import Json
from mocker import BlockChain, BlockRemoved, BlockStored
from mocker.events import KvEvent, TierRemoved, TierStored

HOST_MEDIUM = "CPU_PINNED"
"""What SGLang calls host memory in its events; what is on the device is recorded without a name."""
SALT_DOMAIN = b"sglang-cache-salt-v1\0"


@dataclass
class Content:
    """The tokens of a request, with what keeps its pages apart from equal ones."""

    tokens: list[int]
    page_size: int
    salt: str | None = None
    extra_key: str | None = None
    digests: list[bytes] = field(default_factory=list)
    """One for each full page."""

    def __post_init__(self) -> None:
        """Hash the pages."""
        parent = b"" if self.salt is None else sha256(SALT_DOMAIN + self.salt.encode()).digest()
        for start in range(0, len(self.tokens) - self.page_size + 1, self.page_size):
            parent = sha256(parent + little_endian(self.tokens[start : start + self.page_size])).digest()
            self.digests.append(parent)

    def chain(self) -> BlockChain:
        """Return the names of its pages; an extra key is part of them, though not of the hashes."""
        named = self.digests if self.extra_key is None else [(self.extra_key, digest) for digest in self.digests]
        chain = BlockChain(named)
        chain.payload = self
        return chain

    def head(self, num_tokens: int) -> Hashable:
        """Name its first tokens, however long pages are."""
        return self.salt, self.extra_key, tuple(self.tokens[:num_tokens])


def little_endian(tokens: list[int]) -> bytes:
    """Return tokens as SGLang hashes them."""
    return array("I", tokens).tobytes()


def published(digest: bytes, bits: int = 64) -> int:
    """Return the number by which SGLang's events name a page, or its low bits."""
    number = int.from_bytes(digest[:8], "big", signed=True)
    return number if bits == 64 else number & ((1 << bits) - 1)


def event_rows(events: Iterable[KvEvent], bits: int) -> list[Json]:
    """Return events as they are recorded: SGLang merges neighbours of a kind, where one continues the other."""
    rows: list[Json] = []
    ends: list[Hashable] = []  # what the next event must begin with to continue each
    for event in events:
        row, begin, end = _row(event, bits)
        if rows and row["t"] == rows[-1]["t"] and begin is not None and begin == ends[-1]:
            for name in ("hashes", "tokens"):
                if name in row:
                    rows[-1][name] += row[name]
            ends[-1] = end
        else:
            rows.append(row)
            ends.append(end)
    return rows


def _row(event: KvEvent, bits: int) -> tuple[Json, Hashable, Hashable]:
    """Return one event, what it continues, and what may continue it."""
    if not isinstance(event, BlockStored | BlockRemoved | TierStored | TierRemoved):
        return {"t": "AllBlocksCleared"}, None, None
    medium = HOST_MEDIUM if isinstance(event, TierStored | TierRemoved) else None
    where: Json = {} if medium is None else {"medium": medium}
    content = event.chain.payload
    assert isinstance(content, Content)
    digests, start, stop = content.digests, event.start, event.stop
    hashes = [published(digest, bits) for digest in digests[start:stop]]
    if isinstance(event, BlockRemoved | TierRemoved):
        scope = ("removed", content.extra_key, medium)
        return {"t": "removed", "hashes": hashes} | where, scope, scope
    parent = digests[start - 1] if start else None
    row: Json = {"t": "stored", "hashes": hashes, "parent": None if parent is None else published(parent, bits)} | where
    if bits == 64:
        row["tokens"] = content.tokens[start * content.page_size : stop * content.page_size]
    if content.salt is not None:
        row["salt"] = content.salt
    begin = None if parent is None else (content.salt, medium, parent[:8])
    return row, begin, (content.salt, medium, digests[stop - 1][:8])
