import pytest

from serving.runtime.config import RuntimeConfig
from tests.support.servers import Etcd, Nats


@pytest.fixture(scope="session")
def etcd():
    with Etcd() as server:
        yield server


@pytest.fixture(scope="session")
def nats():
    with Nats() as server:
        yield server


@pytest.fixture(params=["embedded", "etcd+sockets", "etcd+nats"])
def config(request, tmp_path):
    """Settings of each back end; the servers are real."""
    settings = {"discovery_dir": str(tmp_path / "d"), "etcd_endpoints": "", "nats_server": "", "lease_ttl_s": 2.0}
    if "etcd" in request.param:
        settings["etcd_endpoints"] = request.getfixturevalue("etcd").url
    if "nats" in request.param:
        settings["nats_server"] = request.getfixturevalue("nats").url
    return RuntimeConfig(**settings)
