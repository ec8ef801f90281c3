"""Settings of `dynabench kubernetes`: how a deployment runs in a cluster."""

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter
from msgspec import Meta

from foundation.settings import check

Discovery = Literal["kubernetes", "etcd"]
Autoscaler = Literal["none", "hpa", "keda", "planner"]
Form = Literal["manifests", "dynamo-v1alpha1", "dynamo-v1beta1"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Settings of the manifests for a cluster."""

    form: Form = "manifests"
    """Plain manifests, or a DynamoGraphDeployment of that version for NVIDIA Dynamo's operator."""

    namespace: str = "default"
    """Namespace of the cluster in which everything runs."""

    image: str = "dynabench:latest"
    """Container image with dynabench."""

    engine_image: str = ""
    """Container image with dynabench and an engine, for pools that run models (default: that of --image)."""

    frontends: Annotated[int, Meta(ge=1, le=10_000)] = 1
    """Pods of the frontend."""

    discovery: Discovery | None = None
    """How processes find each other: by what Kubernetes holds, or by an etcd server beside them (default: by the etcd servers
    that the file names, else by Kubernetes)."""

    nats: Annotated[bool, Parameter(negative=())] = False
    """Put a NATS server beside them, for requests and events (default: sockets, or the NATS server that the file names)."""

    autoscaler: Autoscaler | None = None
    """What changes the number of workers: a HorizontalPodAutoscaler, KEDA's ScaledObject, or our planner (default: the planner if
    the file has one)."""

    prometheus: str = "http://prometheus-operated.monitoring:9090"
    """Where KEDA asks for metrics."""

    monitor: Literal["none", "service", "pod"] = "none"
    """Let the Prometheus operator scrape the frontends, by a ServiceMonitor or a PodMonitor."""

    secret: str = ""
    """Secret with DYN_API_KEY for the frontends, and with ETCD_AUTH_PASSWORD, NATS_AUTH_PASSWORD or NATS_AUTH_TOKEN for every
    process. Each pod gets only the keys that it needs."""

    hf_token_secret: str = "hf-token-secret"  # noqa: S105 (a name)
    """Secret whose key HF_TOKEN opens models on the Hugging Face hub; it need not exist."""

    model_claim: str = ""
    """PersistentVolumeClaim with models, mounted at /models; what is downloaded is kept there, too."""

    def __post_init__(self) -> None:
        """Refuse invalid settings."""
        check(self)
