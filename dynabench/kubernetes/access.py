"""Who may do what in the cluster: an account for processes that find each other, and one for the planner."""

from collections.abc import Iterable

from dynabench.kubernetes.contract import APP, APP_NAME, INSTANCE, Rule
from dynabench.kubernetes.objects import Object

RBAC = "rbac.authorization.k8s.io"


def account(name: str, rules: Iterable[Rule], *, deployment: str, namespace: str) -> list[Object]:
    """Return a service account that is allowed what rules say; without any, it gets no token."""
    metadata = {"name": name, "namespace": namespace, "labels": {APP: APP_NAME, INSTANCE: deployment}}
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


def token_secret(name: str, *, deployment: str, namespace: str) -> Object:
    """Return the Secret of a deployment's cluster token. It has no `data`: applied again, it keeps what a process put there."""
    metadata = {"name": name, "namespace": namespace, "labels": {APP: APP_NAME, INSTANCE: deployment}}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque"}


def _rule(rule: Rule) -> Object:
    granted: Object = {"apiGroups": [rule.group], "resources": [rule.resource], "verbs": list(rule.verbs)}
    return granted | ({"resourceNames": list(rule.names)} if rule.names else {})
