"""etcd and NATS servers for a deployment: one pod each, with data that outlives the pod.

NATS asks its clients for a token. etcd asks for nothing, because its passwords can only be set by calls to a running
server. A NetworkPolicy lets only the deployment's pods reach either server.
"""

from typing import NamedTuple

from dynabench.kubernetes import names
from dynabench.kubernetes.contract import COMPONENT, NATS_TOKEN
from dynabench.kubernetes.objects import CONTAINER_SECURITY, POD_SECURITY, Manifest, secret_variable
from dynabench.kubernetes.policies import server_policy
from serving.runtime.kubernetes.names import APP, INSTANCE

ETCD_IMAGE = "quay.io/coreos/etcd:v3.5.21"
NATS_IMAGE = "docker.io/library/nats:2.11-alpine"
ETCD_PORT, NATS_PORT, NATS_HTTP_PORT = 2379, 4222, 8222


class _Server(NamedTuple):
    part: str
    image: str
    command: list[str]
    port: int
    """Port for clients."""
    probe_port: int
    path: str
    """Path of the probes."""
    environment: tuple[Manifest, ...] = ()


def etcd(deployment: str, namespace: str) -> list[Manifest]:
    """Return an etcd server."""
    url = f"http://{deployment}-{names.ETCD}:{ETCD_PORT}"
    listening = f"--listen-client-urls=http://0.0.0.0:{ETCD_PORT}"
    command = ["etcd", "--name=etcd", "--data-dir=/data/etcd", listening, f"--advertise-client-urls={url}"]
    command += ["--auto-compaction-retention=1"]
    return _objects(_Server(names.ETCD, ETCD_IMAGE, command, ETCD_PORT, ETCD_PORT, "/health"), deployment, namespace)


def nats(deployment: str, namespace: str, secret: str) -> list[Manifest]:
    """Return a NATS server with JetStream; its token comes from a Secret."""
    command = ["nats-server", "--jetstream", "--store_dir=/data", f"--auth=$({NATS_TOKEN})"]
    command += [f"--http_port={NATS_HTTP_PORT}"]
    token = secret_variable(NATS_TOKEN, secret, is_needed=True)
    server = _Server(names.NATS, NATS_IMAGE, command, NATS_PORT, NATS_HTTP_PORT, "/healthz", (token,))
    return _objects(server, deployment, namespace)


def _objects(server: _Server, deployment: str, namespace: str) -> list[Manifest]:
    name = f"{deployment}-{server.part}"
    labels = {APP: server.part, INSTANCE: deployment, COMPONENT: server.part}
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    ports = [{"name": "client", "port": server.port, "targetPort": "client"}]
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
        server_policy(name, deployment, namespace, labels),
    ]


def _container(server: _Server) -> Manifest:
    probe = {"httpGet": {"path": server.path, "port": server.probe_port}, "periodSeconds": 5, "timeoutSeconds": 5}
    return {
        "name": server.part,
        "image": server.image,
        "imagePullPolicy": "IfNotPresent",
        "command": server.command[:1],
        "args": server.command[1:],
        "env": list(server.environment),
        "ports": [{"name": "client", "containerPort": server.port}],
        "startupProbe": probe | {"failureThreshold": 60},
        "readinessProbe": probe | {"failureThreshold": 3},
        "livenessProbe": probe | {"failureThreshold": 12},
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
