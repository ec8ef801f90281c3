import random

import pytest

from serving.runtime.config import RuntimeConfig
from serving.runtime.kubernetes.access import discovery
from serving.runtime.memory.network import Network
from serving.runtime.memory.node import NODE
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


PROCESSES = ["embedded", "etcd+sockets", "etcd+nats", "kubernetes", "kubernetes+nats"]
MEMORY = ["memory", "memory+broker"]


@pytest.fixture(params=PROCESSES)
def config_of_processes(request, tmp_path, monkeypatch):
    """Settings of each back end that connects processes; the servers are real, but for that of Kubernetes."""
    return _settings(request, tmp_path, monkeypatch)


@pytest.fixture(params=PROCESSES + MEMORY)
def config(request, tmp_path, monkeypatch):
    """Settings of each back end."""
    if request.param not in MEMORY:
        yield _settings(request, tmp_path, monkeypatch)
        return
    network = Network(random.Random(7), has_broker="broker" in request.param)
    token = NODE.set(network.node("here"))
    yield RuntimeConfig(discovery_backend="memory", etcd_endpoints="", nats_server="", lease_ttl_s=2.0)
    NODE.reset(token)


def _settings(request, tmp_path, monkeypatch):
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
