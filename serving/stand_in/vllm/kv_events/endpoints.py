"""Where each rank of each replica publishes its KV events, by the one endpoint that is configured."""

from serving.frontend.http.listening import PortError


class PublisherError(PortError):
    """An address cannot be used."""


def endpoint_of(endpoint: str, rank: int) -> str:
    """Return the endpoint of a rank: its port follows those of the ranks before, and an inproc name ends with the rank.

    Raises:
        PublisherError: ranks cannot share such an endpoint.
    """
    if not rank:
        return endpoint
    if "inproc" in endpoint:
        return f"{endpoint}_dp{rank}"
    found = _further(endpoint, rank)
    if found is None:
        raise PublisherError(f"the endpoint {endpoint!r} is of rank 0 only; expected tcp://HOST:PORT or inproc://NAME")
    return found


def endpoint_of_replica(endpoint: str, more: int) -> str:
    """Return the endpoint of a replica's first rank, which follows so many ranks of the replicas before."""
    return _further(endpoint, more) or f"{endpoint}_replica{more}"


def _further(endpoint: str, more: int) -> str | None:
    """Return the endpoint whose port is so much higher, None if there is no port; 0 stays any free port."""
    address, colon, port = endpoint.rpartition(":")
    if "tcp" not in endpoint or not port.isdecimal():
        return None
    return f"{address}{colon}{int(port) + more}" if int(port) else endpoint
