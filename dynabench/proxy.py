"""The address of an HTTP proxy between the client and the server that it measures."""

import base64
from typing import NamedTuple
from urllib.parse import unquote, urlsplit


class Proxy(NamedTuple):
    """Where a proxy is, and how it knows us."""

    host: str
    port: int
    authorization: str = ""

    @classmethod
    def at(cls, url: str) -> "Proxy":
        """Read a proxy's address, http://host:port, perhaps with name and password.

        Raises:
            ValueError: it is something else.
        """
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.path.strip("/") or parts.query:
            raise ValueError(
                "proxy is not understood; expected http://host:port, perhaps with name:password@ before the host"
            )
        word = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else ""
        authorization = f"Basic {base64.b64encode(word.encode()).decode()}" if word else ""
        return cls(parts.hostname, parts.port or 80, authorization)

    @property
    def headers(self) -> dict[str, str]:
        """Headers for the proxy itself."""
        return {"proxy-authorization": self.authorization} if self.authorization else {}

    def connect(self, host: str, port: int) -> bytes:
        """Return the request for a tunnel to a server."""
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        lines = [f"CONNECT {place} HTTP/1.1", f"host: {place}"]
        return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in self.headers.items()), "\r\n"]).encode()
