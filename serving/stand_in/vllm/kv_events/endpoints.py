"""Where each rank publishes its KV events, by the one endpoint that is configured."""

from serving.frontend.http.listening import PortError
from serving.stand_in.ports import further_endpoint


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
    found = further_endpoint(endpoint, rank)
    if found is None:
        raise PublisherError(f"the endpoint {endpoint!r} is of rank 0 only; expected tcp://HOST:PORT or inproc://NAME")
    return found
