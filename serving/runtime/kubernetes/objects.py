"""Objects of the API, as far as we read them. A null or missing field is empty here."""

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

from serving.runtime.kubernetes.names import VERSION

DEFAULT_DURATION_S = 10

MAX_DIGITS = 18

Duration = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class Resource(NamedTuple):
    """A kind of object of a namespace."""

    group: str
    version: str
    name: str
    kind: str

    @property
    def api_version(self) -> str:
        """As an object has it."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str, *names: str) -> str:
        """Return the path of all objects of a namespace, of one object, or of a part of one."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"
        return "/".join([f"{root}/namespaces/{namespace}/{self.name}", *names])


LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
SECRETS = Resource("", "v1", "secrets", "Secret")
ENDPOINT_SLICES = Resource("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice")
PODS = Resource("", "v1", "pods", "Pod")
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
AUTOSCALERS = Resource("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler")


class Reference(Struct, frozen=True):
    """An object that another one names: its owner, with which it is removed, or its target."""

    kind: str = ""
    name: str = ""
    uid: str = ""


class Metadata(Struct, frozen=True, rename="camel"):
    """What every object has."""

    name: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owner_references: tuple[Reference, ...] | None = None

    def label(self, name: str) -> str:
        """Return a label's value."""
        return (self.labels or {}).get(name, "")

    def annotation(self, name: str) -> str:
        """Return an annotation's value."""
        return (self.annotations or {}).get(name, "")

    @property
    def version(self) -> int:
        """The version of a process's keys; 0 if it is not valid, or longer than any that we write."""
        text = self.annotation(VERSION)
        return int(text) if len(text) <= MAX_DIGITS and text.isascii() and text.isdecimal() else 0

    @property
    def pod(self) -> str:
        """The uid of the pod that the object belongs to."""
        return next((owner.uid for owner in self.owner_references or () if owner.kind == "Pod"), "")


class ClusterObject(Struct, frozen=True):
    """Any object."""

    metadata: Metadata


class LeaseSpec(Struct, frozen=True, rename="camel"):
    """Who holds a Lease, and since when."""

    holder_identity: str | None = None
    lease_duration_seconds: Duration | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None

    @property
    def duration_s(self) -> int:
        """How long the Lease lasts without a renewal."""
        return self.lease_duration_seconds or DEFAULT_DURATION_S


class Lease(ClusterObject, frozen=True):
    """A claim that lasts as long as it is renewed."""

    spec: LeaseSpec = LeaseSpec()


class Data(ClusterObject, frozen=True):
    """A ConfigMap, or a Secret with its values in base64."""

    data: dict[str, str] | None = None


class Conditions(Struct, frozen=True):
    """The conditions of an endpoint. If missing, `ready` is true, and `serving` is the same as `ready`."""

    ready: bool | None = None
    serving: bool | None = None

    @property
    def is_serving(self) -> bool:
        """Whether its pod is ready, even while it terminates."""
        return self.ready is not False if self.serving is None else self.serving


class Endpoint(Struct, frozen=True, rename="camel"):
    """A pod behind a Service."""

    conditions: Conditions | None = None
    target_ref: Reference | None = None


class EndpointSlice(ClusterObject, frozen=True):
    """Pods behind a Service."""

    endpoints: tuple[Endpoint, ...] | None = None


class Condition(Struct, frozen=True, rename="camel"):
    """A condition of a pod or a Deployment."""

    type: str = ""
    status: str = ""
    last_transition_time: str | None = None
    message: str | None = None


class ContainerStatus(Struct, frozen=True, rename="camel"):
    """The status of a pod's container."""

    restart_count: int = 0


class PodStatus(Struct, frozen=True, rename="camel"):
    """The status of a pod."""

    phase: str | None = None
    conditions: tuple[Condition, ...] | None = None
    container_statuses: tuple[ContainerStatus, ...] | None = None


class Pod(ClusterObject, frozen=True):
    """A pod."""

    status: PodStatus = PodStatus()


class Replicas(Struct, frozen=True):
    """How many pods a Deployment has, and what keeps it from its target."""

    replicas: int | None = None
    conditions: tuple[Condition, ...] | None = None


class Deployment(ClusterObject, frozen=True):
    """A Deployment, or the scale of one."""

    spec: Replicas = Replicas()
    status: Replicas = Replicas()


class AutoscalerSpec(Struct, frozen=True, rename="camel"):
    """The settings of an autoscaler."""

    scale_target_ref: Reference = Reference()


class Autoscaler(ClusterObject, frozen=True):
    """A HorizontalPodAutoscaler, which KEDA also creates."""

    spec: AutoscalerSpec = AutoscalerSpec()


class Status(Struct, frozen=True):
    """An answer that describes an error."""

    code: int = 0
    reason: str = ""
    message: str = ""


class ListMetadata(Struct, frozen=True, rename="camel"):
    """The metadata of a list: the version of its state, and how to get the rest."""

    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class Page(Struct, frozen=True):
    """A part of a list."""

    metadata: ListMetadata
    items: tuple[msgspec.Raw, ...] | None = None


class Change(Struct, frozen=True):
    """A line of a watch."""

    type: str
    object: msgspec.Raw
