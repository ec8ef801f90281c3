"""Names on the network: `dyn://namespace.component.endpoint`, and the instances behind them."""

import re
from typing import NamedTuple, Self

import msgspec

INSTANCES = "v1/instances/"
"""Where instances are registered, as `v1/instances/{namespace}/{component}/{endpoint}/{instance id, hexadecimal}`."""


class EndpointAddress(NamedTuple):
    """The name of an endpoint; any number of instances may serve it."""

    namespace: str = "dynamo"
    component: str = "backend"
    endpoint: str = "generate"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `dyn://namespace.component.endpoint`, with defaults for missing parts, as Dynamo does.

        One part names the component, two the namespace and component; more than three are joined into the endpoint.
        """
        parts = [part for part in re.split(r"[./]", text.strip().removeprefix("dyn://").strip(" ./")) if part]
        match [slug(part) for part in parts]:
            case []:
                return cls()
            case [component]:
                return cls(component=component)
            case [namespace, component]:
                return cls(namespace, component)
            case [namespace, component, *endpoint]:
                return cls(namespace, component, "_".join(endpoint))
        raise AssertionError(parts)

    @property
    def prefix(self) -> str:
        """Key prefix of this endpoint's instances."""
        return f"{INSTANCES}{self.namespace}/{self.component}/{self.endpoint}/"

    def __str__(self) -> str:
        return f"dyn://{self.namespace}.{self.component}.{self.endpoint}"


class Instance(msgspec.Struct, frozen=True):
    """A process that serves an endpoint: what discovery tells of it."""

    namespace: str
    component: str
    endpoint: str
    instance_id: int
    transport: str
    """How to reach it: `unix:PATH`, `tcp:HOST:PORT` or `nats:SUBJECT`."""

    @property
    def key(self) -> str:
        """Its key in discovery."""
        return f"{EndpointAddress(self.namespace, self.component, self.endpoint).prefix}{self.instance_id:x}"


def slug(text: str) -> str:
    """Lower-case a name and replace what is not a letter, digit, - or _ (Dynamo's rule)."""
    return re.sub(r"[^a-z0-9_-]", "_", text.lower()).lstrip("_") or "_"
