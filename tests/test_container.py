"""The container image, the compose file and the workflow that builds wheels: linted, and true to the command lines."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from serving.cli.commands import frontend_app, mocker_app
from tests.support.commands import BIN, run
from tests.support.servers import free_port
from tests.support.waiting import until

ROOT = Path(__file__).parent.parent
SERVICES = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
PROGRAMS = {"serving.frontend": frontend_app, "serving.mocker": mocker_app}


def test_the_dockerfile_passes_its_linter():
    done = run(BIN / "hadolint", "--no-color", ROOT / "Dockerfile")
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("schema", "file"),
    [
        ("compose-spec", "compose.yaml"),
        ("github-workflows", ".github/workflows/ci.yml"),
        ("github-workflows", ".github/workflows/wheels.yml"),
    ],
)
def test_files_for_other_tools_fit_their_schemas(schema, file):
    done = run(BIN / "check-jsonschema", "--builtin-schema", f"vendor.{schema}", ROOT / file)
    assert done.returncode == 0, done.stdout


def test_the_image_gets_what_the_wheel_is_built_from():
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    licences = project["project"]["license-files"]
    assert allowed == {*packages, *licences, project["project"]["readme"], "pyproject.toml", "hatch_build.py"}


def test_images_carry_the_version_of_the_package():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {service["image"].partition(":")[2] for service in SERVICES.values()} == {version}


@pytest.mark.parametrize("name", [name for name, service in SERVICES.items() if "entrypoint" in service])
def test_the_real_command_line_takes_each_command(name):
    python, flag, module = SERVICES[name]["entrypoint"]
    assert (python, flag) == ("python", "-m")
    PROGRAMS[module].parse_args(SERVICES[name]["command"], exit_on_error=False, print_error=False)


def test_services_wait_for_services_that_there_are_and_that_are_checked():
    for service in SERVICES.values():
        for other, wait in service.get("depends_on", {}).items():
            has_check = (
                SERVICES[other]["build"] == "." or "test" in SERVICES[other]["healthcheck"]
            )  # the image's, or its own
            assert wait["condition"] != "service_healthy" or has_check


def test_ports_are_those_of_the_frontend_and_open_to_this_host_alone():
    ports = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    command = shlex.join(SERVICES["frontend"]["command"])
    assert ports == {"frontend": ["127.0.0.1:8080:8080"]}
    assert "--http-port 8080" in command
    assert "EXPOSE 8080\n" in (ROOT / "Dockerfile").read_text()


def test_the_images_health_check_asks_a_server_that_is_ready(tmp_path):
    dockerfile = (ROOT / "Dockerfile").read_text()
    health = json.loads(re.search(r"HEALTHCHECK .*\n +CMD (\[.*\])", dockerfile)[1])
    inside = re.search(r"DYN_SYSTEM_PORT=(\d+)", dockerfile)[1]
    assert f"http://127.0.0.1:{inside}/" in health[-1]
    port = str(free_port())
    check = [sys.executable, *health[1:-1], health[-1].replace(inside, port)]
    folder = tmp_path / "discovery"
    folder.mkdir(mode=0o700)
    assert run(*check).returncode == 1, "nothing runs yet"
    environment = os.environ | {"DYN_SYSTEM_PORT": port, "DYN_DISCOVERY_DIR": str(folder)}
    with subprocess.Popen([sys.executable, "-m", "serving.mocker", "--model-name=mock"], env=environment) as worker:
        try:
            until(lambda: run(*check).returncode == 0, worker)
        finally:
            worker.terminate()
    assert worker.returncode == 0


def test_addresses_name_services():
    addresses = SERVICES["frontend"]["environment"]
    assert addresses == {"ETCD_ENDPOINTS": "http://etcd:2379", "NATS_SERVER": "nats://nats:4222"}
    assert {"etcd", "nats"} <= SERVICES.keys()
