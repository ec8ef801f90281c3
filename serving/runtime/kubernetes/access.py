"""What the cluster must allow: roles are generated from this, and the tests compare it with the calls that are made."""

from collections.abc import Iterable
from typing import NamedTuple

from serving.runtime.kubernetes.names import TOKEN_SECRET


class Rule(NamedTuple):
    """A rule of a Role."""

    group: str
    """Of the API; empty: the core's."""
    resource: str
    verbs: tuple[str, ...]
    names: tuple[str, ...] = ()
    """Of the objects; none: all of the namespace."""


def discovery(token_secret: str = TOKEN_SECRET) -> tuple[Rule, ...]:
    """Return what every process with --discovery-backend kubernetes needs, whose cluster token is in a Secret of this name."""
    return (
        Rule("coordination.k8s.io", "leases", ("get", "list", "watch", "create", "patch", "delete")),
        Rule("", "configmaps", ("get", "list", "create", "patch", "delete")),
        Rule("discovery.k8s.io", "endpointslices", ("list", "watch")),
        # Not `create`, which no rule can limit to a name: manifests hold the Secret, and a process fills it.
        Rule("", "secrets", ("get", "list", "watch", "patch"), (token_secret,)),
    )


def scaling(deployments: Iterable[str]) -> tuple[Rule, ...]:
    """Return what a planner with --hands kubernetes needs besides discovery, for the Deployments that it scales."""
    return (
        Rule("apps", "deployments", ("list", "watch")),
        Rule("apps", "deployments/scale", ("get", "patch"), tuple(deployments)),
        # Kubernetes makes up the names of pods, and no rule can name a label. Only patch: a planner deletes no pod.
        Rule("", "pods", ("list", "watch", "patch")),
        Rule("autoscaling", "horizontalpodautoscalers", ("list", "watch")),
    )
