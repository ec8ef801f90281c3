"""What all objects share: their type, and what pods and their containers may do on a node."""

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
