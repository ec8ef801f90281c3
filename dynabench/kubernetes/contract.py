"""What manifests and the processes in a cluster must agree on: names, labels, environment and rights.

app.kubernetes.io/name        dynabench, on each pod of ours
app.kubernetes.io/instance    the deployment
app.kubernetes.io/component   frontend, router, kv-store, planner, or worker
dynabench.io/pool, /role      of workers
"""

from serving.runtime.kubernetes.access import Rule, discovery, scaling
from serving.runtime.kubernetes.names import (
    APP,
    APP_NAME,
    INSTANCE,
    POD_IP,
    POD_NAME,
    POD_UID,
    POOL,
    ROLE,
    TOKEN_SECRET_VARIABLE,
    deployment_of,
)

__all__ = [
    "APP",
    "APP_NAME",
    "INSTANCE",
    "POOL",
    "ROLE",
    "TOKEN_SECRET_VARIABLE",
    "Rule",
    "deployment_of",
    "discovery",
    "scaling",
]

FILES_DIGEST = "dynabench.io/files"
"""On pods, as an annotation: of the files in their ConfigMap."""

COMPONENT = "app.kubernetes.io/component"

POD_FIELDS = {
    POD_NAME: "metadata.name",
    "POD_NAMESPACE": "metadata.namespace",
    POD_UID: "metadata.uid",
    POD_IP: "status.podIP",
    "DYN_TCP_RPC_HOST": "status.podIP",
}
"""Environment of each process, by the field of its pod: who it is, and where others reach it."""

ADDRESS = f"$({POD_IP})"
"""Stands for the pod's address in a container's arguments; Kubernetes puts it in."""

BACKEND = "DYN_DISCOVERY_BACKEND"
"""Environment: whether processes find each other by what Kubernetes itself holds. Dynamo's operator sets it, too, so it is never
left to a default."""


API_KEY, ETCD_PASSWORD, NATS_PASSWORD, NATS_TOKEN = (
    "DYN_API_KEY",
    "ETCD_AUTH_PASSWORD",
    "NATS_AUTH_PASSWORD",
    "NATS_AUTH_TOKEN",
)
"""Keys of a Secret: what clients of the frontends must send, Prometheus among them, and what etcd and NATS ask for."""


def planner_arguments(*, deployment: str, url: str) -> list[str]:
    """Return the arguments of a planner that scales the workers of the deployment described in a file."""
    return ["-m", "dynabench.planner", f"--deployment={deployment}", "--hands=kubernetes", f"--url={url}"]
