"""The names of our objects in a cluster, for all who write manifests, register, watch or scale."""

APP = "app.kubernetes.io/name"
APP_NAME = "dynabench"
"""On every pod and Service of a deployment; Kubernetes copies a Service's labels to its EndpointSlices."""

INSTANCE = "app.kubernetes.io/instance"
"""The deployment's name."""

POOL = "dynabench.io/pool"
ROLE = "dynabench.io/role"

PROCESS = "dynabench.io/process"
"""On the Lease and the ConfigMap of a process: its id in discovery."""

VERSION = "dynabench.io/version"
"""On both, as an annotation: how often the process has changed what it registers."""

TOKEN_SECRET = "dynabench-cluster-token"  # noqa: S105 (a name)
TOKEN_SECRET_VARIABLE = "DYN_CLUSTER_TOKEN_SECRET"  # noqa: S105 (a name)
"""Environment that names another Secret for the cluster token: each deployment of a namespace can have its own."""

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"

POD_NAME, POD_UID, POD_IP = "POD_NAME", "POD_UID", "POD_IP"
"""Environment that a pod's manifest sets from metadata.name, metadata.uid and status.podIP."""


def deployment_of(deployment: str, pool: str) -> str:
    """Return the name of the Kubernetes Deployment that runs a pool's workers."""
    return f"{deployment}-{pool}"


def workers_of(deployment: str) -> str:
    """Return the label selector of all workers of a deployment."""
    return f"{APP}={APP_NAME},{INSTANCE}={deployment},{POOL}"


def process_object(id: str) -> str:
    """Return the name of the Lease and of the ConfigMap of a process."""
    return f"dynabench-{id}"


def process_of(name: str) -> str:
    """Return the id of the process whose Lease or ConfigMap has this name; empty if it is none's."""
    before, _, id = name.partition(process_object(""))
    return "" if before else id


def claim_object(name: str) -> str:
    """Return the name of the Lease of a claim."""
    return f"dynabench-claim-{''.join(letter if letter.isalnum() else '-' for letter in name.lower()).strip('-')}"


def labels(more: dict[str, str] | None = None) -> dict[str, str]:
    """Return the labels of one of our objects."""
    return {APP: APP_NAME} | (more or {})
