"""`dynamo-run` with an engine in the same process: it needs no servers, and says so if any are named."""

import pytest

from tests.support.commands import dynamo_run

NOWHERE = "nats://127.0.0.1:1"


@pytest.mark.parametrize("way_in", ["in=http", "in=text", "in=none"])
@pytest.mark.parametrize(
    ("flag", "value"),
    [("--nats-server", NOWHERE), ("--etcd-endpoints", "http://127.0.0.1:1"), ("--discovery-dir", "d")],
)
def test_settings_of_a_network_that_one_process_has_not_are_refused(way_in, flag, value):
    refused = dynamo_run(way_in, "out=mocker", flag, value, "--dry-run")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == (
        f"dynamo-run: {flag} is for processes that find each other, but this is one process; "
        "start a worker with in=dyn:// and a frontend with in=http out=dyn instead\n"
    )


def test_servers_in_the_environment_are_named_in_one_warning():
    servers = {"NATS_SERVER": NOWHERE, "ETCD_ENDPOINTS": "http://127.0.0.1:1"}
    shown = dynamo_run("in=http", "out=mocker", "--dry-run", env=servers)
    assert shown.returncode == 0
    [line] = shown.stderr.splitlines()
    assert "ETCD_ENDPOINTS and NATS_SERVER: servers are for processes that find each other, but this is one" in line
    assert " WARN " in line


def test_a_model_that_does_not_exist_is_refused_before_anything_listens():
    refused = dynamo_run("in=http", "out=mocker", "--http-port", "0", "--model-path", "/nope")
    assert refused.returncode == 2
    assert refused.stderr == ("dynamo-run: /nope does not exist; expected a folder, a GGUF file or a Hugging Face id\n")


@pytest.mark.parametrize("words", [("in=dyn://", "out=mocker"), ("in=http", "out=dyn")])
def test_workers_and_frontends_take_servers(words):
    servers = {"NATS_SERVER": NOWHERE, "ETCD_ENDPOINTS": "http://127.0.0.1:1"}
    shown = dynamo_run(*words, "--nats-server", NOWHERE, "--dry-run", env=servers)
    assert (shown.returncode, shown.stderr) == (0, "")
