import pytest

from serving.runtime.config import RuntimeConfig
from serving.runtime.kubernetes.access import discovery
from tests.support.cluster import Cluster
from tests.support.servers import Etcd, Nats


@pytest.fixture(scope="session")
def etcd():
    with Etcd() as server:
        yield server


@pytest.fixture(scope="session")
def nats():
    with Nats() as server:
        yield server


@pytest.fixture(scope="session")
def cluster():
    with Cluster(rules=discovery()) as server:
        yield server
        assert not server.invalid


@pytest.fixture(params=["embedded", "etcd+sockets", "etcd+nats", "kubernetes", "kubernetes+nats"])
def config(request, tmp_path, monkeypatch):
    """Settings of each back end; the servers are real, but for that of Kubernetes."""
    settings = {"discovery_dir": str(tmp_path / "d"), "etcd_endpoints": "", "nats_server": "", "lease_ttl_s": 2.0}
    if "etcd" in request.param:
        settings["etcd_endpoints"] = request.getfixturevalue("etcd").url
    if "kubernetes" in request.param:
        cluster = request.getfixturevalue("cluster")
        for name, value in cluster.environment(cluster.pod()).items():
            monkeypatch.setenv(name, value)
        settings["discovery_backend"] = "kubernetes"
    if "nats" in request.param:
        settings["nats_server"] = request.getfixturevalue("nats").url
    return RuntimeConfig(**settings)
