"""Servers that want TLS, client certificates or passwords: the options reach them, and without them we are told."""

import asyncio
import sys

import httpx
import pytest
import trustme
import uvloop

from serving.runtime.address import EndpointAddress
from serving.runtime.config import RuntimeConfig, masked
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.ports import RuntimeUnavailableError
from tests.support.commands import run
from tests.support.nats_accounts import operator
from tests.support.servers import Etcd, Nats
from tests.support.waiting import in_time, until_async

ADDRESS = EndpointAddress("secure", "backend", "generate")


@pytest.fixture
def files(tmp_path):
    """Write an authority, a server's certificate and a client's; return their paths."""
    authority = trustme.CA()
    server, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("client")
    paths = {name: str(tmp_path / f"{name}.pem") for name in ("ca", "cert", "key", "client_cert", "client_key")}
    authority.cert_pem.write_to_path(paths["ca"])
    server.cert_chain_pems[0].write_to_path(paths["cert"])
    server.private_key_pem.write_to_path(paths["key"])
    client.cert_chain_pems[0].write_to_path(paths["client_cert"])
    client.private_key_pem.write_to_path(paths["client_key"])
    return paths


def settings(tmp_path, **options):
    base = {"etcd_endpoints": "", "nats_server": "", "discovery_dir": str(tmp_path / "d"), "lease_ttl_s": 2.0}
    return RuntimeConfig(**(base | options))


async def double(request):
    yield request * 2


def talk(config):
    """Let two processes' worth of runtime call each other; return the answer."""

    async def main():
        async with await DistributedRuntime.connect(config) as one, await DistributedRuntime.connect(config) as two:
            serving = asyncio.create_task(one.endpoint(ADDRESS).serve_endpoint(double))
            client = await two.client(ADDRESS)
            async with in_time():
                await client.wait_for_instances()
                answer = [item async for item in client.generate(21)]
            one.stopping.set()
            await serving
            return answer

    return uvloop.run(main())


def refused(config):
    async def main():
        with pytest.raises(RuntimeUnavailableError) as error:
            await DistributedRuntime.connect(config)
        return str(error.value)

    return uvloop.run(main())


def test_nats_with_tls_and_a_password(tmp_path, files):
    flags = ["--tls", "--tlscert", files["cert"], "--tlskey", files["key"], "--user", "me", "--pass", "secret"]
    with Nats(*flags, scheme="tls") as nats:
        options = {"nats_server": nats.url, "nats_ca": files["ca"], "nats_username": "me"}
        assert talk(settings(tmp_path, **options, nats_password="secret")) == [42]
        assert "NATS does not answer" in refused(settings(tmp_path, **options, nats_password="wrong"))
        without = {"nats_server": nats.url, "nats_username": "me", "nats_password": "secret"}
        assert "NATS does not answer" in refused(settings(tmp_path, **without))


def test_nats_with_a_token(tmp_path):
    with Nats("--auth", "sesame") as nats:
        assert talk(settings(tmp_path, nats_server=nats.url, nats_token="sesame")) == [42]
        assert "NATS does not answer" in refused(settings(tmp_path, nats_server=nats.url))


def test_nats_with_a_file_of_credentials(tmp_path):
    config, credentials = operator(tmp_path)
    with Nats("-c", config) as nats:
        assert talk(settings(tmp_path, nats_server=nats.url, nats_credentials=credentials)) == [42]
        assert "NATS does not answer" in refused(settings(tmp_path, nats_server=nats.url))
        nowhere = str(tmp_path / "nowhere.creds")
        said = refused(settings(tmp_path, nats_server=nats.url, nats_credentials=nowhere))
        assert said == f"{nowhere} cannot be read (No such file or directory); expected a file for NATS"


def test_etcd_with_tls_and_client_certificates(tmp_path, files):
    flags = ["--cert-file", files["cert"], "--key-file", files["key"]]
    flags += ["--client-cert-auth", "--trusted-ca-file", files["ca"]]
    with Etcd(*flags, scheme="https") as etcd:
        options = {"etcd_endpoints": etcd.url, "etcd_ca": files["ca"]}
        certificate = {"etcd_client_cert": files["client_cert"], "etcd_client_key": files["client_key"]}
        assert talk(settings(tmp_path, **options, **certificate)) == [42]
        assert "etcd does not answer" in refused(settings(tmp_path, **options))
        assert "etcd does not answer" in refused(settings(tmp_path, etcd_endpoints=etcd.url))


def test_etcd_with_a_password(tmp_path):
    with Etcd() as etcd, httpx.Client(base_url=f"{etcd.url}/v3/auth") as admin:
        for path, body in (
            ("user/add", {"name": "root", "password": "secret"}),
            ("role/add", {"name": "root"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("enable", {}),
        ):
            admin.post(f"/{path}", json=body).raise_for_status()
        options = {"etcd_endpoints": etcd.url, "etcd_username": "root"}
        assert talk(settings(tmp_path, **options, etcd_password="secret")) == [42]
        assert "etcd does not answer" in refused(settings(tmp_path, **options, etcd_password="wrong"))
        assert "etcd does not answer" in refused(settings(tmp_path, etcd_endpoints=etcd.url))
        uvloop.run(over_a_restart(etcd, settings(tmp_path, **options, etcd_password="secret")))


async def over_a_restart(etcd, config):
    """A restarted server knows none of the tokens it gave; keys put before and after are there all the same."""
    async with await DistributedRuntime.connect(config) as one, await DistributedRuntime.connect(config) as two:
        seen = {}
        await one.discovery.put("test/before", b"1")
        await two.discovery.watch("test/", seen.__setitem__)
        await asyncio.to_thread(etcd.stop)
        await asyncio.to_thread(etcd.start)
        await one.discovery.put("test/after", b"2")
        await until_async(lambda: set(seen) == {"test/before", "test/after"})


@pytest.mark.parametrize("module", ["serving.mocker", "serving.frontend", "serving.router_service"])
def test_help_shows_no_password_of_the_environment(module):
    secrets = {"ETCD_ENDPOINTS": "http://me:hunter2@host:1", "NATS_SERVER": "nats://me:hunter2@host:2"}
    command = [sys.executable, "-m", module, "--help-all"]
    done = run(*command, env=secrets)
    assert done.returncode == 0
    assert "hunter2" not in done.stdout
    assert "***@host" in done.stdout


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("http://me:hunter2@host:1", "http://***@host:1"),
        ("http://me:hunter2@host:1,http://you:hunter2@other", "http://***@host:1,http://***@other"),
        ("me:hunter2@host", "***@host"),
        ("nats://hunter2@host", "nats://***@host"),
        ("nats://me:p@hunter2@host", "nats://***@host"),
        ("nats://me:/hunter2@host", "nats://***@host"),
        ("http://host:1/?token=hunter2,http://other", "http://host:1/?***,http://other"),
        ("nats://host#hunter2", "nats://host?***"),
        ("http://host:2379,host:1", "http://host:2379,host:1"),
    ],
)
def test_addresses_are_shown_without_what_is_secret(given, shown):
    assert masked(given) == shown


@pytest.mark.parametrize(
    "servers",
    [
        {"etcd_endpoints": "http://me:hunter2@127.0.0.1:1"},
        {"etcd_endpoints": "http://me:hunter2@127.0.0.1:1:x"},
        {"etcd_endpoints": "me:hunter2@127.0.0.1:1,http://me:/hunter2@127.0.0.1:1"},
        {"nats_server": "nats://me:hunter2@127.0.0.1:1"},
        {"nats_server": "nats://me:/hunter2@127.0.0.1:1"},
        {"nats_server": "nats://me:hunter2@127.0.0.1:x"},
    ],
)
def test_a_server_that_does_not_answer_is_named_without_its_password(tmp_path, caplog, servers):
    config = RuntimeConfig(**{"etcd_endpoints": "", "nats_server": "", "discovery_dir": str(tmp_path / "d")} | servers)

    async def main():
        with pytest.raises(RuntimeUnavailableError, match=r"does not answer at .*\*\*\*@") as error:
            await DistributedRuntime.connect(config)
        return str(error.value)

    assert "hunter2" not in uvloop.run(main()) + caplog.text + config.describe() + repr(config)
