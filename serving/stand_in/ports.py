"""The ports of replicas, in ranges that must not overlap: the second of two sockets could not be opened."""

import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

from serving.stand_in.config import StandInConfig

TCP = re.compile(r"tcp://(?P<host>.*):(?P<port>\d+)\Z")
EVERYWHERE = ("", "*", "0.0.0.0", "::", "[::]")  # noqa: S104 (compared, not listened on)


class _Ports(NamedTuple):
    """Consecutive ports at which something listens."""

    flag: str
    host: str
    first: int
    length: int

    def __str__(self) -> str:
        last = self.first + self.length - 1
        return f"{self.flag} ({self.first}{f' to {last}' if self.length > 1 else ''})"

    def meets(self, other: "_Ports") -> bool:
        """Whether a port of both is at one address."""
        if self.host != other.host and not {self.host, other.host} & set(EVERYWHERE):
            return False
        return self.first < other.first + other.length and other.first < self.first + self.length


def further_endpoint(endpoint: str, more: int) -> str | None:
    """Return the endpoint whose port is so much higher, None if there is no port; 0 stays any free port."""
    address, colon, port = endpoint.rpartition(":")
    if "tcp" not in endpoint or not port.isdecimal():
        return None
    return f"{address}{colon}{int(port) + more}" if int(port) else endpoint


def endpoint_of_replica(endpoint: str, more: int) -> str:
    """Return the endpoint of a replica's first rank, which follows so many ranks of the replicas before."""
    return further_endpoint(endpoint, more) or f"{endpoint}_replica{more}"


def check_ports(config: StandInConfig, count: int) -> None:
    """Check that the ports of so many replicas are apart.

    Raises:
        ValueError: they are not; the message has both ranges.
    """
    for one, other in itertools.combinations(_ports(config, count), 2):
        if one.meets(other):
            raise ValueError(f"the ports of {one} and of {other} overlap; expected ranges apart from each other")


def _ports(config: StandInConfig, count: int) -> Iterator[_Ports]:
    """Yield the ranges whose ports are known before they are opened."""
    http, admin, events, handover = config.http, config.admin, config.kv_events, config.kv_handover
    first_rank, ranks = config.ranks.first, count * config.engine.dp_size
    if not http.uds and http.port:
        yield _Ports("--port", http.host, http.port, count)
    if admin is not None and admin.port:
        yield _Ports("--admin-port", admin.host, admin.port, count)
    if events is not None:
        for name, endpoint in (("endpoint", events.endpoint), ("replay_endpoint", events.replay_endpoint)):
            found = TCP.match(endpoint or "")
            listens = name == "replay_endpoint" or "*" in (endpoint or "") or "::" in (endpoint or "")
            if found is not None and listens and int(found["port"]):
                yield _Ports(f"--kv-events-config.{name}", found["host"], int(found["port"]) + first_rank, ranks)
    if handover is not None and handover.side_channel_port:
        host, port = handover.side_channel_host, handover.side_channel_port
        yield _Ports("VLLM_NIXL_SIDE_CHANNEL_PORT", host, port + first_rank, ranks)
