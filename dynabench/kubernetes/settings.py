"""Settings of `dynabench kubernetes`: how a deployment runs in a cluster."""

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter
from msgspec import Meta

from foundation.settings import CheckedSettings

Discovery = Literal["kubernetes", "etcd"]
Autoscaler = Literal["none", "hpa", "keda", "planner"]
Form = Literal["manifests", "dynamo-v1alpha1", "dynamo-v1beta1"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig(CheckedSettings):
    """Settings of the manifests for a cluster."""

    form: Form = "manifests"
    """What to write: plain manifests, or a DynamoGraphDeployment of that version for NVIDIA Dynamo's operator."""

    namespace: str = "default"
    """Namespace in the cluster. Give it to dynabench alone: its processes may change all Leases and ConfigMaps there."""

    image: str = "dynabench:latest"
    """Container image with dynabench."""

    engine_image: str = ""
    """Container image with dynabench and an engine, for pools that run models (default: that of --image)."""

    frontends: Annotated[int, Meta(ge=1, le=10_000)] = 1
    """Number of frontend pods."""

    discovery: Discovery | None = None
    """How processes find each other: through Kubernetes objects, or through an etcd server that is deployed with them
    (default: the etcd servers in the file, otherwise Kubernetes)."""

    nats: Annotated[bool, Parameter(negative=())] = False
    """Deploy a NATS server for requests and events (default: sockets, or the NATS server in the file)."""

    autoscaler: Autoscaler | None = None
    """What changes the number of workers: a HorizontalPodAutoscaler, KEDA's ScaledObject, or dynabench's planner (default: the
    planner if the file has one)."""

    prometheus: str = "http://prometheus-operated.monitoring:9090"
    """Prometheus server from which KEDA reads metrics."""

    monitor: Literal["none", "service", "pod"] = "none"
    """Let the Prometheus operator scrape the frontends, through a ServiceMonitor or a PodMonitor."""

    secret: str = ""
    """Secret with DYN_API_KEY, which frontends then require, and with ETCD_AUTH_PASSWORD, NATS_AUTH_PASSWORD or NATS_AUTH_TOKEN
    if servers need them. Each pod gets only the keys that it needs."""

    hf_token_secret: str = "hf-token-secret"  # noqa: S105 (a name)
    """Secret with HF_TOKEN for gated models on the Hugging Face hub; it does not have to exist."""

    model_claim: str = ""
    """PersistentVolumeClaim with models, mounted at /models; downloads are kept there too."""
