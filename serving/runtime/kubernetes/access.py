"""The rights that the cluster must grant: roles are generated from them, and tests compare them with the calls made."""

from collections.abc import Iterable
from typing import NamedTuple

from serving.runtime.kubernetes.names import TOKEN_SECRET


class Rule(NamedTuple):
    """A rule of a Role."""

    group: str
    """The group in the API; "" is the core group."""
    resource: str
    verbs: tuple[str, ...]
    names: tuple[str, ...] = ()
    """The names of the objects; if empty, all objects of the namespace."""


def discovery(token_secret: str = TOKEN_SECRET) -> tuple[Rule, ...]:
    """Return the rights that every process with --discovery-backend kubernetes needs; this Secret has the cluster token."""
    return (
        Rule("coordination.k8s.io", "leases", ("get", "list", "watch", "create", "patch", "delete")),
        Rule("", "configmaps", ("get", "list", "create", "patch", "delete")),
        Rule("discovery.k8s.io", "endpointslices", ("list", "watch")),
        # Not `create`, which no rule can limit to a name: manifests contain the Secret, and a process fills it.
        Rule("", "secrets", ("get", "list", "watch", "patch"), (token_secret,)),
    )


def scaling(deployments: Iterable[str]) -> tuple[Rule, ...]:
    """Return the rights, besides discovery, that a planner with --hands kubernetes needs to scale these Deployments."""
    return (
        Rule("apps", "deployments", ("list", "watch")),
        Rule("apps", "deployments/scale", ("get", "patch"), tuple(deployments)),
        # Kubernetes generates the names of pods, and no rule can name a label. Only patch: a planner deletes no pod.
        Rule("", "pods", ("list", "watch", "patch")),
        Rule("autoscaling", "horizontalpodautoscalers", ("list", "watch")),
    )
