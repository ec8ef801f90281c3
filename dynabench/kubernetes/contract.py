"""What manifests and the processes in a cluster must agree on: names, labels, environment and rights.

app.kubernetes.io/name        dynabench, on each pod of ours
app.kubernetes.io/instance    the deployment
app.kubernetes.io/component   frontend, router, kv-store, planner, or worker
dynabench.io/pool, /role      of workers
"""

from typing import NamedTuple

APP, APP_NAME = "app.kubernetes.io/name", "dynabench"
INSTANCE = "app.kubernetes.io/instance"
COMPONENT = "app.kubernetes.io/component"
POOL = "dynabench.io/pool"
ROLE = "dynabench.io/role"

POD_FIELDS = {
    "POD_NAME": "metadata.name",
    "POD_NAMESPACE": "metadata.namespace",
    "POD_UID": "metadata.uid",
    "POD_IP": "status.podIP",
    "DYN_TCP_RPC_HOST": "status.podIP",
}
"""Environment of each process, by the field of its pod: who it is, and where others reach it."""

POD_IP = "$(POD_IP)"
"""Stands for the address in a container's arguments; Kubernetes puts it in."""

CLUSTER_DISCOVERY = {"DYN_DISCOVERY_BACKEND": "kubernetes"}
"""Environment of processes that find each other by what Kubernetes itself holds."""

TOKEN_SECRET = "dynabench-cluster-token"  # noqa: S105 (a name)


class Rule(NamedTuple):
    """A rule of a Role."""

    group: str
    """Of the API; empty: the core's."""
    resource: str
    verbs: tuple[str, ...]
    names: tuple[str, ...] = ()
    """Of the objects; none: all of the namespace."""


DISCOVERY = (
    Rule("coordination.k8s.io", "leases", ("get", "list", "watch", "create", "patch", "delete")),
    Rule("", "configmaps", ("get", "list", "create", "patch", "delete")),
    Rule("discovery.k8s.io", "endpointslices", ("list", "watch")),
    Rule("", "secrets", ("get", "list", "watch"), (TOKEN_SECRET,)),
    Rule("", "secrets", ("create",)),  # what is created has no name yet, so a rule cannot name it
)
"""For processes that find each other by what Kubernetes holds."""

SCALING = (
    Rule("apps", "deployments", ("list", "watch")),
    Rule("apps", "deployments/scale", ("get", "patch")),
    Rule("", "pods", ("list", "watch", "patch")),
    Rule("autoscaling", "horizontalpodautoscalers", ("list", "watch")),
)
"""For a planner, beside what its discovery needs."""


def planner_arguments(*, deployment: str, url: str) -> list[str]:
    """Return the arguments of a planner that scales the workers of the deployment described in a file."""
    return ["-m", "dynabench.planner", f"--deployment={deployment}", "--hands=kubernetes", f"--url={url}"]
