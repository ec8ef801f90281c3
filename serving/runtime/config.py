"""How processes find and reach each other."""

import os
import re
import tempfile
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from cyclopts import Parameter
from msgspec import Meta

from foundation.settings import Wait, check_settings


def masked(servers: str) -> str:
    """Return servers' addresses without what may be secret: names, passwords and tokens before an @, queries and fragments."""
    return re.sub(r"(://[^\s,?#]*)[?#][^\s,]*", r"\1?***", re.sub(r"(//|^)((?!//).)*@", r"\1***@", servers))


Backend = Literal["auto", "kubernetes", "memory"]
MAY_HOLD_PASSWORDS = Parameter(show_default=lambda servers: masked(servers) or None)


def _env(name: str, default: str = "", *, is_shown: bool = True) -> Any:
    return field(default_factory=lambda: os.environ.get(name, default), repr=is_shown)


def _backend() -> Any:
    text = os.environ.get("DYN_DISCOVERY_BACKEND", "auto")
    if text not in get_args(Backend):
        raise ValueError(f"DYN_DISCOVERY_BACKEND is {text!r}; expected one of {', '.join(get_args(Backend))}")
    return text


def _lease_ttl_s() -> float:
    text = os.environ.get("ETCD_LEASE_TTL", "10")
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"ETCD_LEASE_TTL is {text!r}; expected a number of seconds, at least 1") from None


def _secret(name: str) -> Any:
    return field(default="", repr=False, metadata={"secret": name})  # filled in later, because --help shows defaults


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """Settings of the runtime. With no server named, everything runs embedded, on one host."""

    discovery_backend: Backend = field(default_factory=_backend)
    """auto: etcd if --etcd-endpoints names servers, else a folder; kubernetes: objects in the cluster that this process runs in; memory: between nodes within one process, for tests and rehearsals only. Environment: DYN_DISCOVERY_BACKEND."""

    etcd_endpoints: Annotated[str, MAY_HOLD_PASSWORDS] = _env("ETCD_ENDPOINTS", is_shown=False)
    """Addresses of etcd servers for discovery, separated by commas (empty: a folder, see --discovery-dir). Environment: ETCD_ENDPOINTS."""

    etcd_username: str = _env("ETCD_AUTH_USERNAME")
    """User name for etcd. Environment: ETCD_AUTH_USERNAME."""

    etcd_password: str = _secret("ETCD_AUTH_PASSWORD")
    """Password for etcd. Environment: ETCD_AUTH_PASSWORD."""

    etcd_ca: str = _env("ETCD_AUTH_CA")
    """CA certificate file for the etcd servers (https). Environment: ETCD_AUTH_CA."""

    etcd_client_cert: str = _env("ETCD_AUTH_CLIENT_CERT")
    """Client certificate file for etcd. Environment: ETCD_AUTH_CLIENT_CERT."""

    etcd_client_key: str = _env("ETCD_AUTH_CLIENT_KEY")
    """Client key file for etcd. Environment: ETCD_AUTH_CLIENT_KEY."""

    nats_server: Annotated[str, MAY_HOLD_PASSWORDS] = _env("NATS_SERVER", is_shown=False)
    """NATS server for requests and events, with JetStream enabled (empty: sockets and ZeroMQ). Environment: NATS_SERVER."""

    nats_username: str = _env("NATS_AUTH_USERNAME")
    """User name for NATS. Environment: NATS_AUTH_USERNAME."""

    nats_password: str = _secret("NATS_AUTH_PASSWORD")
    """Password for NATS. Environment: NATS_AUTH_PASSWORD."""

    nats_token: str = _secret("NATS_AUTH_TOKEN")
    """Token for NATS. Environment: NATS_AUTH_TOKEN."""

    nats_credentials: str = _env("NATS_AUTH_CREDENTIALS_FILE")
    """Credentials file for NATS. Environment: NATS_AUTH_CREDENTIALS_FILE."""

    nats_ca: str = _env("NATS_AUTH_CA")
    """CA certificate file for the NATS server (tls). Environment: NATS_AUTH_CA."""

    nats_timeout_s: Wait = 5.0
    """How long a call waits for its answer to begin while NATS is away; after that, its request gets 503 (s)."""

    discovery_dir: str = _env("DYN_DISCOVERY_DIR")
    """Folder for discovery without etcd; nobody else may have write access (none: a folder of this user's).
    Environment: DYN_DISCOVERY_DIR."""

    lease_ttl_s: Annotated[float, Meta(ge=1, le=86400)] = field(default_factory=_lease_ttl_s)
    """How long a process may be silent before it counts as gone (s). Environment: ETCD_LEASE_TTL."""

    rpc_host: str = field(
        default_factory=lambda: os.environ.get("DYN_TCP_RPC_HOST") or os.environ.get("POD_IP") or "127.0.0.1"
    )
    """Address to listen on for TCP requests and events, with etcd or Kubernetes and without NATS; callers must be able to read the cluster's token (default: POD_IP, else 127.0.0.1). Environment: DYN_TCP_RPC_HOST."""

    def __post_init__(self) -> None:
        """Fill in secrets from the environment, and refuse a lease that is too short to keep."""
        for part in fields(self):
            if "secret" in part.metadata and not getattr(self, part.name):
                object.__setattr__(self, part.name, os.environ.get(part.metadata["secret"], ""))
        check_settings(self)
        unused = {"auto": (), "kubernetes": ("etcd_endpoints",), "memory": ("etcd_endpoints", "nats_server")}
        for name in unused[self.discovery_backend]:
            if servers := getattr(self, name):
                raise ValueError(
                    f"{name} is {masked(servers)!r}; expected none with discovery_backend {self.discovery_backend!r}"
                )

    @property
    def folder(self) -> Path:
        """The discovery folder."""
        if self.discovery_dir:
            return Path(self.discovery_dir)
        base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
        return Path(base) / f"dynabench-{os.getuid()}"

    @property
    def is_etcd_open(self) -> bool:
        """Whether we present neither a password nor a certificate to etcd."""
        return not self.etcd_username and not self.etcd_client_cert

    @property
    def place(self) -> str:
        """Where processes find each other."""
        if self.discovery_backend == "kubernetes":
            return "Kubernetes"
        if self.discovery_backend == "memory":
            return "a network within this process"
        return f"etcd at {masked(self.etcd_endpoints)}" if self.etcd_endpoints else f"folder {self.folder}"

    def describe(self) -> str:
        """Summarize where discovery, requests and events go."""
        if self.discovery_backend == "memory":
            return f"discovery, requests and events: {self.place}"
        requests = f"NATS at {masked(self.nats_server)}" if self.nats_server else "sockets and ZeroMQ"
        return f"discovery: {self.place}; requests and events: {requests}"
