"""etcd and NATS beside a deployment, each one pod whose data outlives it."""

from typing import NamedTuple

from dynabench.kubernetes import names
from dynabench.kubernetes.contract import APP, COMPONENT, INSTANCE
from dynabench.kubernetes.objects import CONTAINER_SECURITY, POD_SECURITY, Object

ETCD_IMAGE = "quay.io/coreos/etcd:v3.5.21"
NATS_IMAGE = "docker.io/library/nats:2.11-alpine"
ETCD_PORT, NATS_PORT, NATS_HTTP_PORT = 2379, 4222, 8222


class _Server(NamedTuple):
    part: str
    image: str
    command: list[str]
    ports: dict[str, int]
    """The first is what clients call, the last what probes ask."""
    path: str
    """That probes ask for."""


def etcd(deployment: str, namespace: str) -> list[Object]:
    """Return an etcd server."""
    url = f"http://{deployment}-{names.ETCD}:{ETCD_PORT}"
    listening = f"--listen-client-urls=http://0.0.0.0:{ETCD_PORT}"
    command = ["etcd", "--name=etcd", "--data-dir=/data/etcd", listening, f"--advertise-client-urls={url}"]
    server = _Server(
        names.ETCD, ETCD_IMAGE, [*command, "--auto-compaction-retention=1"], {"client": ETCD_PORT}, "/health"
    )
    return _objects(server, deployment, namespace)


def nats(deployment: str, namespace: str) -> list[Object]:
    """Return a NATS server with JetStream."""
    command = ["nats-server", "--jetstream", "--store_dir=/data", f"--http_port={NATS_HTTP_PORT}"]
    ports = {"client": NATS_PORT, "monitor": NATS_HTTP_PORT}
    return _objects(_Server(names.NATS, NATS_IMAGE, command, ports, "/healthz"), deployment, namespace)


def _objects(server: _Server, deployment: str, namespace: str) -> list[Object]:
    name = f"{deployment}-{server.part}"
    labels = {APP: server.part, INSTANCE: deployment, COMPONENT: server.part}
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    ports = [{"name": port, "port": number, "targetPort": port} for port, number in server.ports.items()]
    pod = {
        "automountServiceAccountToken": False,
        "securityContext": POD_SECURITY,
        "containers": [_container(server)],
    }
    claim = {
        "metadata": {"name": "data", "labels": labels},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    stateful = {
        "serviceName": name,
        "replicas": 1,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
        "volumeClaimTemplates": [claim],
    }
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"selector": labels, "ports": ports}},
        {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": metadata, "spec": stateful},
    ]


def _container(server: _Server) -> Object:
    probe = {"httpGet": {"path": server.path, "port": list(server.ports)[-1]}, "periodSeconds": 5, "timeoutSeconds": 5}
    return {
        "name": server.part,
        "image": server.image,
        "imagePullPolicy": "IfNotPresent",
        "command": server.command[:1],
        "args": server.command[1:],
        "ports": [{"name": name, "containerPort": port} for name, port in server.ports.items()],
        "startupProbe": probe | {"failureThreshold": 60},
        "readinessProbe": probe | {"failureThreshold": 3},
        "livenessProbe": probe | {"failureThreshold": 12},
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
