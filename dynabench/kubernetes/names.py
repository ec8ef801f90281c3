"""Names that a cluster accepts."""

import re

from dynabench.deployment.description import Deployment
from dynabench.kubernetes.settings import ClusterConfig

LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
OBJECT = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
PRINTED = re.compile(r"[!-~]*")
"""ASCII without spaces."""

MAX_LABEL = 63
MAX_STATEFUL = 52
"""Kubernetes puts the name of a StatefulSet into a label, with eleven more characters."""

FRONTEND, ROUTER, STORE, PLANNER, ETCD, NATS = "frontend", "router", "kv-store", "planner", "etcd", "nats"
OURS = (FRONTEND, ROUTER, STORE, PLANNER, ETCD, NATS)
"""Suffixes that are appended to the deployment's name, like the names of its pools."""

TOKEN = "cluster-token"  # noqa: S105 (the last part of a Secret's name)


def check_names(deployment: Deployment, config: ClusterConfig) -> None:
    """Refuse names that a cluster does not accept.

    Raises:
        ValueError: a name is not accepted; the message names the first such name.
    """
    _check_label("name is", deployment.name)
    if not deployment.name[0].isalpha():
        raise ValueError(
            f"name is {deployment.name!r}; expected one that starts with a letter, as the name of a Service must"
        )
    for pool in deployment.pools:
        _check_label(f"pools.{pool.name} has the name", pool.name)
        if pool.name in OURS:
            raise ValueError(f"pools.{pool.name} has a reserved name; expected none of {', '.join(OURS)}")
    for part in (*OURS, *(pool.name for pool in deployment.pools)):
        name, most = f"{deployment.name}-{part}", MAX_STATEFUL if part in (ETCD, NATS) else MAX_LABEL
        if len(name) > most:
            raise ValueError(
                f"{name} has {len(name)} characters; expected at most {most}: shorten the deployment's name"
            )
    _check_label("namespace is", config.namespace)
    for setting in ("secret", "hf_token_secret", "model_claim"):
        name = getattr(config, setting)
        if name and (not OBJECT.fullmatch(name) or len(name) > 253):
            raise ValueError(
                f"{setting} is {name!r}; expected lower-case letters, digits, - and . (at most 253 characters)"
            )
    for setting in ("image", "engine_image"):
        image = getattr(config, setting)
        if not PRINTED.fullmatch(image) or (setting == "image" and not image):
            raise ValueError(
                f"{setting} is {image!r}; expected the name of a container image, such as registry.example.com/dynabench:0.2.0"
            )
    if not PRINTED.fullmatch(config.prometheus) or not config.prometheus.startswith(("http://", "https://")):
        raise ValueError(
            f"prometheus is {config.prometheus!r}; expected an address such as {ClusterConfig().prometheus}"
        )


def _check_label(what: str, name: str) -> None:
    if not LABEL.fullmatch(name) or len(name) > MAX_LABEL:
        raise ValueError(
            f"{what} {name!r}; expected lower-case letters, digits and - (at most {MAX_LABEL} characters), as "
            "Kubernetes requires"
        )
