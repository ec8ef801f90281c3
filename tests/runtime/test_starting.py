"""What is wrong with a server, or with what is said of it, ends in one line that names it and the way out."""

import pytest

from tests.runtime.test_security import files, refused, settings, talk  # noqa: F401 (a fixture)
from tests.support.commands import dynamo_run
from tests.support.servers import Nats


class Plain(Nats):
    """A server without JetStream."""

    def command(self):
        return [word for word in super().command() if word != "-js"]


def test_a_nats_server_without_jetstream_says_how_to_start_it(tmp_path):
    with Plain() as nats:
        done = dynamo_run(
            "in=dyn://x", "out=mocker", "--nats-server", nats.url.replace("//", "//me:secret@"), cwd=tmp_path
        )
        assert done.returncode == 2
        assert done.stderr.strip() == (
            f"dynamo-run: NATS at nats://***@127.0.0.1:{nats.port} has no JetStream, which events need; start it with -js "
            "(nats-server -js), or enable it for this account"
        )


def test_an_account_without_jetstream_is_told_apart_from_one_with_it(tmp_path):
    users = {name: f"{{users: [{{user: {name}, password: secret}}]" for name in ("with", "without", "system")}
    config = tmp_path / "nats.conf"
    config.write_text(
        f"accounts: {{A: {users['with']}, jetstream: enabled}}, B: {users['without']}}}, C: {users['system']}}}}}\n"
        "system_account: C\n"
    )
    with Nats("-c", str(config)) as nats:
        options = {"nats_server": nats.url, "nats_password": "secret"}
        assert talk(settings(tmp_path, nats_username="with", **options)) == [42]
        assert "has no JetStream" in refused(settings(tmp_path, nats_username="without", **options))


@pytest.mark.parametrize("option", ["etcd_ca", "etcd_client_cert", "nats_ca"])
def test_a_file_of_certificates_that_is_missing_or_no_certificate_is_named(tmp_path, files, option):  # noqa: F811
    server = (
        {"etcd_endpoints": "https://127.0.0.1:1"} if option.startswith("etcd") else {"nats_server": "tls://127.0.0.1:1"}
    )
    missing, empty = str(tmp_path / "missing.pem"), tmp_path / "empty.pem"
    empty.write_text("")
    name = "etcd" if option.startswith("etcd") else "NATS"
    said = refused(settings(tmp_path, **server, **{option: missing}))
    assert said == f"{missing} cannot be read (No such file or directory); expected a file for {name}"
    said = refused(settings(tmp_path, **server, **{option: str(empty)}))
    assert said.startswith(f"{empty} ")
    assert f"{name}" in said
    assert "in PEM" in said


def test_a_key_that_is_not_the_certificates_is_named(tmp_path, files):  # noqa: F811
    options = {"etcd_client_cert": files["client_cert"], "etcd_client_key": files["key"]}
    said = refused(settings(tmp_path, etcd_endpoints="https://127.0.0.1:1", **options))
    assert said.startswith(
        f"{files['client_cert']} and {files['key']} cannot be presented to etcd (KEY_VALUES_MISMATCH)"
    )


def test_endpoints_that_name_no_server_are_refused(tmp_path):
    said = refused(settings(tmp_path, etcd_endpoints=" , "))
    assert said == "ETCD_ENDPOINTS (--etcd-endpoints) is ' , '; expected addresses such as http://HOST:2379"


ECHO = ["in=dyn://x", "out=echo_full", "--model-name", "m"]


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        *(
            ("DYN_TOKEN_ECHO_DELAY_MS", value, "expected a number of milliseconds, at least 0")
            for value in ("abc", "", "-1", "nan", "inf", "10ms")
        ),
        ("DYN_SYSTEM_PORT", "-abc", "expected a port from 1 to 65535"),
        ("ETCD_LEASE_TTL", "ten", "expected a number of seconds, at least 1"),
        ("DYN_DISCOVERY_BACKEND", "kube", "expected one of auto, kubernetes, memory"),
    ],
)
def test_a_malformed_variable_is_refused_by_name(tmp_path, variable, value, message):
    done = dynamo_run(*ECHO, env={variable: value}, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip() == f"dynamo-run: {variable} is {value!r}; {message}"


def test_the_delay_of_echo_engines_may_be_a_fraction_of_a_millisecond(tmp_path):
    done = dynamo_run(*ECHO, "--dry-run", env={"DYN_TOKEN_ECHO_DELAY_MS": "0.5"}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "delay_s=0.0005" in done.stdout
