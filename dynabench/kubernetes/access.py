"""Accounts and rights in the cluster: one account for processes that discover each other, and one for the planner."""

from collections.abc import Iterable

from dynabench.kubernetes.contract import ours
from dynabench.kubernetes.objects import Manifest
from serving.runtime.kubernetes.access import Rule

RBAC = "rbac.authorization.k8s.io"


def account(name: str, rules: Iterable[Rule], *, deployment: str, namespace: str) -> list[Manifest]:
    """Return a service account with the rights in these rules; without rules, it gets no token."""
    metadata = {"name": name, "namespace": namespace, "labels": ours(deployment)}
    granted = [_rule(rule) for rule in rules]
    owner = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata,
        "automountServiceAccountToken": bool(granted),
    }
    if not granted:
        return [owner]
    subjects = [{"kind": "ServiceAccount", "name": name, "namespace": namespace}]
    role = {"apiGroup": RBAC, "kind": "Role", "name": name}
    return [
        owner,
        {"apiVersion": f"{RBAC}/v1", "kind": "Role", "metadata": metadata, "rules": granted},
        {
            "apiVersion": f"{RBAC}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "subjects": subjects,
            "roleRef": role,
        },
    ]


def token_secret(name: str, *, deployment: str, namespace: str) -> Manifest:
    """Return the Secret with the cluster token. It has no `data`, so applying it again keeps what a process stored."""
    metadata = {"name": name, "namespace": namespace, "labels": ours(deployment)}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque"}


def _rule(rule: Rule) -> Manifest:
    granted: Manifest = {"apiGroups": [rule.group], "resources": [rule.resource], "verbs": list(rule.verbs)}
    return granted | ({"resourceNames": list(rule.names)} if rule.names else {})
