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
    def parse(cls, text: str, *, component: str = "backend") -> Self:
        """Read `dyn://namespace.component.endpoint`, with defaults for missing parts, as Dynamo does.

        One part names the component, two the namespace and component; more than three are joined into the endpoint. If
        none is given, the component is `component`.
        """
        parts = [part for part in re.split(r"[./]", text.strip().removeprefix("dyn://").strip(" ./")) if part]
        match [slug(part) for part in parts]:
            case []:
                return cls(component=component)
            case [named]:
                return cls(component=named)
            case [namespace, named]:
                return cls(namespace, named)
            case [namespace, named, *endpoint]:
                return cls(namespace, named, "_".join(endpoint))
        raise AssertionError(parts)

    @property
    def prefix(self) -> str:
        """Key prefix of this endpoint's instances."""
        return f"{INSTANCES}{self.namespace}/{self.component}/{self.endpoint}/"

    def beside(self, endpoint: str) -> "EndpointAddress":
        """Return another endpoint of the same component."""
        return self._replace(endpoint=endpoint)

    def subject(self, topic: str) -> str:
        """Return the component's subject for events, as Dynamo names it."""
        return f"namespace.{self.namespace}.component.{self.component}.{topic}"

    def __str__(self) -> str:
        return f"dyn://{self.namespace}.{self.component}.{self.endpoint}"


class Instance(msgspec.Struct, frozen=True, omit_defaults=True):
    """A process that serves an endpoint, as discovery records it."""

    namespace: str
    component: str
    endpoint: str
    instance_id: int
    transport: str
    """How to reach it: `unix:PATH`, `tcp:HOST:PORT` or `nats:SUBJECT`; `memory:NODE/ID` within one process."""
    pod: str = ""
    """The pod that it runs in, in a Kubernetes cluster."""

    @classmethod
    def parse(cls, key: str, value: bytes) -> Self:
        """Read the value that discovery has under a key.

        Raises:
            ValueError: the value is not an instance, or belongs to another key.
        """
        instance = msgspec.json.decode(value, type=cls)
        if instance.key != key:
            raise ValueError(f"it belongs under the key {instance.key}")
        if not is_transport(instance.transport):
            raise ValueError(
                f"its transport is {instance.transport!r}; expected unix:PATH, tcp:HOST:PORT or nats:SUBJECT"
            )
        return instance

    @property
    def key(self) -> str:
        """Its key in discovery."""
        return f"{EndpointAddress(self.namespace, self.component, self.endpoint).prefix}{self.instance_id:x}"


def is_transport(text: str) -> bool:
    """Return whether a text says how to reach a process."""
    kind, _, place = text.partition(":")
    if kind != "tcp":
        return kind in ("unix", "nats", "memory") and place != "" and "\0" not in place
    host, _, port = place.rpartition(":")
    return host != "" and port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16


def slug(text: str) -> str:
    """Lower-case a name and replace all but letters, digits, - and _ (Dynamo's rule)."""
    return re.sub(r"[^a-z0-9_-]", "_", text.lower()).lstrip("_") or "_"
