"""Building blocks of several objects: their type, the rights of containers on a node, and access to secrets."""

from decimal import Decimal
from typing import Any

Manifest = dict[str, Any]
"""An object as a manifest describes it, or a part of one."""

USER = 1000

POD_SECURITY: Manifest = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY: Manifest = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}


def digits(number: float) -> str:
    """Return a number without an exponent: where a whole number is expected, 1e+06 is refused."""
    return f"{Decimal(str(number)).normalize():f}"


def secret_variable(key: str, secret: str, *, is_needed: bool) -> Manifest:
    """Return an environment variable read from the Secret key of its name; without a required key no pod starts."""
    reference = {"name": secret, "key": key} | ({} if is_needed else {"optional": True})
    return {"name": key, "valueFrom": {"secretKeyRef": reference}}
