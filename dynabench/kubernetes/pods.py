"""Pods of components: containers, probes, resources and volumes."""

import math
from collections.abc import Mapping

from dynabench.kubernetes.arguments import literal
from dynabench.kubernetes.components import CACHE, FILES, MODELS, SHARED_MEMORY, SYSTEM, TMP, ClusterComponent
from dynabench.kubernetes.contract import POD_FIELDS
from dynabench.kubernetes.objects import CONTAINER_SECURITY, POD_SECURITY, Manifest, secret_variable
from dynabench.kubernetes.settings import ClusterConfig

LEAVE_S = 5
"""How long a pod that was asked to stop still accepts requests, because other nodes learn of it late."""

LATE_S = 30
"""How much longer than the drain time a pod may take to stop."""

PERIOD_S = 10
GPU = "nvidia.com/gpu"


def pod_of(
    component: ClusterComponent,
    config: ClusterConfig,
    network: Mapping[str, str],
    secrets: Mapping[str, bool],
    *,
    account: str,
    files: str,
    labels: Mapping[str, str],
) -> Manifest:
    """Return the specification of a component's pods.

    Args:
        component: the component.
        config: how to put it into the cluster.
        network: environment variables for discovery.
        secrets: the Secret keys that it needs, and whether each is required.
        account: name of the service account.
        files: name of the ConfigMap with the local files that it reads.
        labels: labels that only its pods have.
    """
    volumes, mounts = _volumes(component, config, files)
    container = {
        "name": "main",
        "image": component.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python"],
        "args": list(component.arguments),
        "env": _environment(component, config, network, secrets),
        "ports": [{"name": name, "containerPort": port} for name, port in component.ports.items()],
        **_probes(component),
        "lifecycle": {"preStop": {"sleep": {"seconds": LEAVE_S}}},
        "resources": _resources(component),
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": mounts,
    }
    return {
        "serviceAccountName": account,
        "terminationGracePeriodSeconds": LEAVE_S + math.ceil(component.drain_s) + LATE_S,
        "securityContext": POD_SECURITY,
        "topologySpreadConstraints": [_spread(labels)],
        **({"tolerations": [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]} if component.gpus else {}),
        "containers": [container],
        "volumes": volumes,
    }


def _environment(
    component: ClusterComponent, config: ClusterConfig, network: Mapping[str, str], secrets: Mapping[str, bool]
) -> list[Manifest]:
    """Return the environment, the pod's own facts first, because later variables may refer to them."""
    plain = {
        "DYN_SYSTEM_PORT": str(SYSTEM),
        "HOME": TMP,
        "USER": "dynabench",  # the image may have no user with the pod's user id
        "PYTHONUNBUFFERED": "1",
        **{name: literal(value) for name, value in network.items()},
        **component.environment,
    }
    if component.loads_model:
        plain["HF_HOME"] = f"{MODELS if config.model_claim else CACHE}/huggingface"
    held = [secret_variable(key, config.secret, is_needed=is_needed) for key, is_needed in secrets.items()]
    if component.loads_model and config.hf_token_secret:
        held.append(secret_variable("HF_TOKEN", config.hf_token_secret, is_needed=False))
    return [
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in POD_FIELDS.items()),
        *({"name": name, "value": value} for name, value in plain.items()),
        *held,
    ]


def _spread(labels: Mapping[str, str]) -> Manifest:
    """Return constraints that spread a component's pods over nodes, so that draining a node stops few of them."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": dict(labels)},
    }


def _probes(component: ClusterComponent) -> Manifest:
    """Return the container's probes. The others wait for the start, which is long when weights are loaded."""
    port = next(iter(component.ports))

    def asking(path: str, **numbers: int) -> Manifest:
        return {"httpGet": {"path": path, "port": port}, "periodSeconds": PERIOD_S, "timeoutSeconds": 5, **numbers}

    # A frontend is healthy only once there are workers, so its start-up probe must not ask for that.
    started = "/live" if component.kind == "frontend" else "/health"
    return {
        "startupProbe": asking(started, failureThreshold=math.ceil(component.startup_s / PERIOD_S)),
        "readinessProbe": asking("/health", failureThreshold=2) | {"periodSeconds": 5},
        "livenessProbe": asking("/live", failureThreshold=6),
    }


def _resources(component: ClusterComponent) -> Manifest:
    gpus = {GPU: str(component.gpus)} if component.gpus else {}
    most = {} if component.most_memory_mib is None else {"memory": f"{component.most_memory_mib}Mi"}
    requests = {"cpu": component.cpu, "memory": f"{component.memory_mib}Mi", **gpus}
    return {"requests": requests} | ({"limits": most | gpus} if most or gpus else {})


def _volumes(component: ClusterComponent, config: ClusterConfig, files: str) -> tuple[list[Manifest], list[Manifest]]:
    """Return the volumes of a pod, and their mount points in its container."""
    empty: Manifest = {"emptyDir": {}}
    found: list[tuple[str, Manifest, Manifest]] = [("tmp", empty, {"mountPath": TMP})]
    if component.files:
        found.append(("files", {"configMap": {"name": files}}, {"mountPath": FILES, "readOnly": True}))
    if component.loads_model and config.model_claim:
        found.append(("models", {"persistentVolumeClaim": {"claimName": config.model_claim}}, {"mountPath": MODELS}))
    elif component.loads_model:
        found.append(("cache", empty, {"mountPath": CACHE}))
    if component.gpus:
        found.append(("shared-memory", {"emptyDir": {"medium": "Memory"}}, {"mountPath": SHARED_MEMORY}))
    volumes = [{"name": name, **source} for name, source, _ in found]
    return volumes, [{"name": name, **place} for name, _, place in found]
