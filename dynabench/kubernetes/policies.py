"""NetworkPolicies: which pods may call which, in clusters whose network enforces them.

frontends             anyone, at their HTTP port
all of a deployment   its own pods, at any port: requests, events and KV use arbitrary free ports
etcd, NATS            the deployment's pods, at the port for clients

Probes come from a pod's node, which is always allowed.
"""

from collections.abc import Mapping

from dynabench.kubernetes.contract import COMPONENT, ours
from dynabench.kubernetes.names import FRONTEND
from dynabench.kubernetes.objects import Manifest


def policies(deployment: str, namespace: str) -> list[Manifest]:
    """Return the policies for the processes of a deployment."""
    own = ours(deployment)
    return [
        _policy(deployment, namespace, own, {"from": [{"podSelector": {"matchLabels": own}}]}),
        _policy(f"{deployment}-{FRONTEND}", namespace, own | {COMPONENT: FRONTEND}, {"ports": [{"port": "http"}]}),
    ]


def server_policy(name: str, deployment: str, namespace: str, labels: Mapping[str, str]) -> Manifest:
    """Return the policy for an etcd or NATS server of a deployment."""
    allowed = {"from": [{"podSelector": {"matchLabels": ours(deployment)}}], "ports": [{"port": "client"}]}
    return _policy(name, namespace, labels, allowed)


def _policy(name: str, namespace: str, labels: Mapping[str, str], allowed: Manifest) -> Manifest:
    spec = {"podSelector": {"matchLabels": dict(labels)}, "policyTypes": ["Ingress"], "ingress": [allowed]}
    metadata = {"name": name, "namespace": namespace, "labels": dict(labels)}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec}
