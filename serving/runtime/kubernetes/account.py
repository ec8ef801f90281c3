"""Who this process is in the cluster: its pod, and the account with which it calls the API server."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from serving.runtime.kubernetes.names import POD_NAME, POD_UID
from serving.runtime.ports import RuntimeUnavailableError
from serving.runtime.world import world

FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"
FRESH_S = 60.0
"""How long a token that was read is used: the cluster replaces it long before it expires."""


class Account:
    """The service account of the pod; its token is read again, because the cluster replaces it."""

    def __init__(self, server: str, folder: Path, namespace: str) -> None:
        self.server = server
        self.namespace = namespace
        self._folder = folder
        self._token = ""
        self._read_s = -FRESH_S

    @classmethod
    def of_this_pod(cls) -> Self:
        """Find the account.

        Raises:
            RuntimeUnavailableError: this is not a pod, or one without a service account.
        """
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
        if not host or not port:
            raise RuntimeUnavailableError(
                "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set; expected a pod in a cluster, where Kubernetes "
                "sets them"
            )
        folder = Path(os.environ.get("DYN_SERVICE_ACCOUNT_DIR") or FOLDER)
        namespace = os.environ.get("POD_NAMESPACE") or _read(folder / "namespace")
        _read(folder / "token")
        return cls(f"https://{f'[{host}]' if ':' in host else host}:{port}", folder, namespace)

    @property
    def authority(self) -> str:
        """The certificate of the authority that signed the server's."""
        return _read(self._folder / "ca.crt")

    @property
    def token(self) -> str:
        """The token, at most a minute old."""
        now = world().now()
        if now - self._read_s >= FRESH_S:
            self._token, self._read_s = _read(self._folder / "token"), now
        return self._token

    def refresh(self) -> None:
        """Read the token again at its next use."""
        self._read_s = -FRESH_S


@dataclass(frozen=True, slots=True)
class ThisPod:
    """The pod that this process runs in."""

    name: str
    uid: str

    @classmethod
    def found(cls) -> Self:
        """Find it.

        Raises:
            RuntimeUnavailableError: the environment does not name it.
        """
        name, uid = os.environ.get(POD_NAME, ""), os.environ.get(POD_UID, "")
        if not name or not uid:
            missing = POD_UID if name else POD_NAME
            raise RuntimeUnavailableError(
                f"{missing} is not set; expected {POD_NAME} and {POD_UID} in the pod's environment, from metadata.name and metadata.uid"
            )
        return cls(name, uid)

    @property
    def as_owner(self) -> dict[str, str]:
        """The pod as the owner of an object, which is removed with the pod."""
        return {"apiVersion": "v1", "kind": "Pod", "name": self.name, "uid": self.uid}


def _read(file: Path) -> str:
    try:
        text = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RuntimeUnavailableError(
            f"{file} cannot be read ({getattr(error, 'strerror', '') or 'not text'}); expected the files of a "
            "service account (automountServiceAccountToken)"
        ) from error
    if not text:
        raise RuntimeUnavailableError(f"{file} is empty; expected the {file.name} of a service account")
    return text
