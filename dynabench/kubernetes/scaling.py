"""Autoscalers other than our planner that change the number of workers: Kubernetes' own or KEDA."""

import re

from dynabench.deployment.description import Deployment, Pool
from dynabench.kubernetes.names import FRONTEND
from dynabench.kubernetes.objects import Manifest, digits
from dynabench.kubernetes.settings import Autoscaler, ClusterConfig
from dynabench.planner.programs import check_planner, has_planner
from foundation.settings import changed

WAITING = "dynamo_component_requests_waiting"
"""The metric of waiting requests that each frontend reports for each worker."""

MOST = 10
"""Default limit of the number of workers in a pool."""

QUEUE = 3.0
"""Default target of waiting requests per worker."""

VALUE = re.compile(r"([A-Za-z0-9]([\w.-]*[A-Za-z0-9])?)?", re.ASCII)
"""The value of a label."""


def autoscaler_of(deployment: Deployment, config: ClusterConfig) -> Autoscaler:
    """Return what scales a deployment's workers.

    Raises:
        ValueError: two would scale the same workers, or the autoscaler cannot scale them.
    """
    kind = config.autoscaler or ("planner" if has_planner(deployment) else "none")
    policy = deployment.planner.planner
    if has_planner(deployment) and kind in ("hpa", "keda"):
        raise ValueError(
            f"autoscaler is {kind!r} and planner is {policy!r}; expected planner 'static': only one of them may scale"
        )
    if kind == "planner" and not has_planner(deployment):
        raise ValueError(
            "autoscaler is 'planner' but planner is 'static'; expected a planner policy in the file (see dynabench planners)"
        )
    if kind != "none" and config.form != "manifests":
        if config.autoscaler is None:
            raise ValueError(
                "the file has a planner, and Dynamo's operator sets the replicas itself: add --autoscaler none"
            )
        raise ValueError(
            f"autoscaler is {kind!r} and form is {config.form!r}; expected 'none': Dynamo's operator owns the replicas"
        )
    if kind == "planner":
        check_planner(deployment)
    if kind in ("hpa", "keda"):
        _check_metric(deployment, kind)
    if "prometheus" in changed(config) and kind != "keda":
        raise ValueError("--prometheus is given, but only --autoscaler keda uses it: leave it out")
    return kind


def scaler_of(
    deployment: Deployment, config: ClusterConfig, pool: Pool, kind: Autoscaler, metadata: Manifest
) -> list[Manifest]:
    """Return the autoscaler of a pool, if it has one of its own: it scales by waiting requests."""
    settings = deployment.planner
    least, most = settings.min_endpoint, settings.max_replicas or max(MOST, settings.min_endpoint)
    target = settings.hpa_target or QUEUE
    behavior = {"scaleDown": {"stabilizationWindowSeconds": min(int(settings.hpa_down_window_s), 3600)}}
    scaled = {"apiVersion": "apps/v1", "kind": "Deployment", "name": metadata["name"]}
    if kind == "keda":
        spec: Manifest = {
            "scaleTargetRef": scaled,
            "minReplicaCount": least,
            "maxReplicaCount": most,
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}},
            "triggers": [_trigger(deployment, config, pool, target)],
        }
        return [{"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "metadata": metadata, "spec": spec}]
    if kind == "hpa":
        spec = {
            "scaleTargetRef": scaled,
            "minReplicas": least,
            "maxReplicas": most,
            "metrics": [_metric(pool, target)],
            "behavior": behavior,
        }
        return [{"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": metadata, "spec": spec}]
    return []


def _metric(pool: Pool, target: float) -> Manifest:
    labels = {"model": pool.served_name, "worker_type": pool.role}
    external = {
        "metric": {"name": WAITING, "selector": {"matchLabels": labels}},
        "target": {"type": "AverageValue", "averageValue": _quantity(target)},
    }
    return {"type": "External", "external": external}


def _trigger(deployment: Deployment, config: ClusterConfig, pool: Pool, target: float) -> Manifest:
    """Return KEDA's query. Every frontend reports every worker, so it counts each worker once."""
    labels = {
        "namespace": config.namespace,
        "pod": f"{deployment.name}-{FRONTEND}-.*",
        "model": pool.served_name,
        "worker_type": pool.role,
    }
    chosen = ",".join(f"{name}{'=~' if name == 'pod' else '='}{_quoted(value)}" for name, value in labels.items())
    query = f"sum(max by (instance, rank) ({WAITING}{{{chosen}}}))"
    metadata = {"serverAddress": config.prometheus, "query": query, "threshold": digits(target)}
    return {"type": "prometheus", "metadata": metadata}


def _quoted(text: str) -> str:
    """Return a text as a PromQL string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _quantity(number: float) -> str:
    """Return a number in Kubernetes' notation: whole, or in thousandths."""
    return f"{number:.0f}" if number == int(number) else f"{max(round(number * 1000), 1)}m"


def _check_metric(deployment: Deployment, kind: Autoscaler) -> None:
    """Refuse pools for which no metric reports waiting requests."""
    settings = deployment.planner
    if settings.hpa_metric != "queue":
        raise ValueError(
            f"planner.hpa_metric is {settings.hpa_metric!r} and autoscaler is {kind!r}; expected 'queue' with that autoscaler"
        )
    seen: dict[tuple[str, str], Pool] = {}
    for pool in deployment.pools:
        first = seen.setdefault((pool.served_name, pool.role), pool)
        if first is not pool:
            raise ValueError(
                f"autoscaler is {kind!r}, but pools.{first.name} and pools.{pool.name} both serve "
                f"{pool.served_name}; expected one pool of each role: the frontend's metrics do not distinguish them"
            )
        if kind == "hpa" and (not VALUE.fullmatch(pool.served_name) or len(pool.served_name) > 63):
            raise ValueError(
                f"autoscaler is 'hpa' and pools.{pool.name} serves {pool.served_name!r}, which is not a valid label "
                "value; expected model_name of letters, digits, -, _ and ., or autoscaler 'keda'"
            )
