"""The cluster's token: processes that call each other over TCP prove that they know it.

The first process creates it and puts it into etcd (docs/decisions/0015), a Kubernetes Secret, or the discovery folder.
So anyone who may read that may call, and nobody has to distribute anything.
"""

import asyncio
import logging
from typing import Protocol

from serving.runtime.folder import FolderDiscovery
from serving.runtime.ports import Discovery, RuntimeUnavailableError
from serving.runtime.world import world

log = logging.getLogger(__name__)

KEY = "v1/cluster_token"
MIN_BYTES = 16
RETRY_S = 1.0
FILE = "token"


def make_up() -> bytes:
    """Return a new token."""
    return world().token_hex(32).encode()


class KeepingDiscovery(Discovery, Protocol):
    """Discovery that keeps keys longer than the process that put them lives."""

    async def create(self, key: str, value: bytes) -> bytes:
        """Put such a key unless it exists; return its value after that.

        Raises:
            RuntimeUnavailableError: it cannot be put.
        """
        ...

    def place(self, key: str) -> tuple[str, str]:
        """Return where such a key is stored, and the command that removes it."""
        ...


class ClusterToken:
    """The token that discovery has now. It changes when somebody puts another, or after discovery lost everything."""

    def __init__(self, discovery: KeepingDiscovery) -> None:
        self.value = b""
        self._discovery = discovery
        self._putting_back: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Fetch the token, creating it if there is none, and follow its changes.

        Raises:
            RuntimeUnavailableError: discovery does not allow it, or has something else under that key.
        """
        value = await self._discovery.create(KEY, make_up())
        if len(value) < MIN_BYTES:
            place, removal = self._discovery.place(KEY)
            raise RuntimeUnavailableError(
                f"{place} holds {len(value)} bytes; expected at least {MIN_BYTES} "
                f"({removal} lets the next process create a new one)"
            )
        self.value = value
        await self._discovery.watch(KEY, self._on_change)

    def close(self) -> None:
        """Stop following it."""
        if self._putting_back is not None:
            self._putting_back.cancel()

    def _on_change(self, key: str, value: bytes | None) -> None:
        if key != KEY or value == self.value:
            return
        if value is not None:
            self._take(value)
        elif self._putting_back is None or self._putting_back.done():
            self._putting_back = asyncio.create_task(self._put_back())

    def _take(self, value: bytes) -> None:
        if len(value) < MIN_BYTES:
            log.warning("%s is shorter than %d bytes and is ignored", self._discovery.place(KEY)[0], MIN_BYTES)
        else:
            self.value = value

    async def _put_back(self) -> None:
        """Put ours back, unless a process that joined meanwhile has created another, which everybody then uses."""
        while True:
            try:
                self._take(await self._discovery.create(KEY, self.value))
            except RuntimeUnavailableError:
                await asyncio.sleep(RETRY_S)
            else:
                return


class FolderToken:
    """The token that the discovery folder has now; if it was removed, the next process that needs it puts it back."""

    def __init__(self, discovery: FolderDiscovery) -> None:
        """Fetch it, creating it if there is none.

        Raises:
            RuntimeUnavailableError: the folder does not allow it, or has something else under its name.
        """
        self._discovery = discovery
        try:
            self._last = discovery.share(FILE, make_up())
        except (OSError, ValueError) as error:
            raise RuntimeUnavailableError(f"the file {FILE} in the discovery folder cannot be used: {error}") from error
        if len(self._last) < MIN_BYTES:
            raise RuntimeUnavailableError(
                f"the file {FILE} in the discovery folder holds {len(self._last)} bytes; expected at least {MIN_BYTES} "
                "(remove it, and the next process creates a new one)"
            )

    @property
    def value(self) -> bytes:
        """The token."""
        try:
            found = self._discovery.share(FILE, self._last)
        except (OSError, ValueError) as error:
            log.warning(
                "the file %s in the discovery folder cannot be used; the last token read from it stays in use: %s",
                FILE,
                error,
            )
        else:
            self._last = found if len(found) >= MIN_BYTES else self._last
        return self._last

    def close(self) -> None:
        """Do nothing: the file is for later processes."""
