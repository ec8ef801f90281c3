"""Labels, environment variables and arguments that manifests set for the pods of a deployment.

app.kubernetes.io/name        dynabench, on each of our pods
app.kubernetes.io/instance    the deployment
app.kubernetes.io/component   frontend, router, kv-store, planner, or worker
dynabench.io/pool, /role      on workers
"""

from serving.runtime.kubernetes.names import INSTANCE, POD_IP, POD_NAME, POD_UID, labels

FILES_DIGEST = "dynabench.io/files"
"""Annotation of pods: a digest of the files in their ConfigMap."""

COMPONENT = "app.kubernetes.io/component"

POD_FIELDS = {
    POD_NAME: "metadata.name",
    "POD_NAMESPACE": "metadata.namespace",
    POD_UID: "metadata.uid",
    POD_IP: "status.podIP",
    "DYN_TCP_RPC_HOST": "status.podIP",
}
"""Environment variables of each process by the pod field that sets them: the pod's identity and address."""

ADDRESS = f"$({POD_IP})"
"""Placeholder for the pod's address in a container's arguments; Kubernetes replaces it."""

BACKEND = "DYN_DISCOVERY_BACKEND"
"""Environment variable: whether processes discover each other through Kubernetes' own objects. It is always written,
because Dynamo's operator sets it, too."""

API_KEY, ETCD_PASSWORD, NATS_PASSWORD, NATS_TOKEN = (
    "DYN_API_KEY",
    "ETCD_AUTH_PASSWORD",
    "NATS_AUTH_PASSWORD",
    "NATS_AUTH_TOKEN",
)
"""Keys of a Secret: the key that clients of the frontends, including Prometheus, must send, and credentials for etcd
and NATS."""


def ours(deployment: str) -> dict[str, str]:
    """Return the labels of everything that belongs to a deployment."""
    return labels({INSTANCE: deployment})


def planner_arguments(*, deployment: str, url: str) -> list[str]:
    """Return the arguments of a planner that scales the workers of the deployment described in a file."""
    return ["-m", "dynabench.planner", f"--deployment={deployment}", "--hands=kubernetes", f"--url={url}"]
