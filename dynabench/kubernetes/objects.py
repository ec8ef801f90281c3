"""What several objects share: their type, what containers may do on a node, and how they get secrets."""

from decimal import Decimal
from typing import Any

Object = dict[str, Any]
"""An object of a cluster, or a part of one."""

USER = 1000

POD_SECURITY: Object = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY: Object = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}


def digits(number: float) -> str:
    """Return a number without an exponent: where a whole number is expected, 1e+06 is refused."""
    return f"{Decimal(str(number)).normalize():f}"


def secret_variable(key: str, secret: str, *, is_needed: bool) -> Object:
    """Return the environment variable that a Secret holds under its own name; without one that is needed no pod starts."""
    reference = {"name": secret, "key": key} | ({} if is_needed else {"optional": True})
    return {"name": key, "valueFrom": {"secretKeyRef": reference}}
