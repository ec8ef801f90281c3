"""The examples of stand-ins behind a router are valid, and the real command line takes what they say."""

import json
from pathlib import Path

import pytest
import yaml

from tests.kubernetes.cluster import container, expanded, named, validate
from tests.support.commands import BIN, in_process, run

FOLDER = Path(__file__).parents[2] / "examples" / "router_ci"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
OBJECTS = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))
STAND_INS = [name for name in COMPOSE if name.startswith("vllm")]


def settings(words):
    """Return what follows from a command line of the image."""
    return json.loads(in_process(*words, "--dry-run"))


def test_the_compose_file_fits_its_schema():
    done = run(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", FOLDER / "compose.yaml")
    assert done.returncode == 0, done.stdout


def test_three_stand_ins_listen_where_the_router_looks_for_them():
    router = COMPOSE["router"]
    for name in STAND_INS:
        http = settings(COMPOSE[name]["command"])["http"]
        assert (http["host"], http["port"]) == ("0.0.0.0", 8000)
        assert f"http://{name}:8000" in router["command"][-1]
        assert router["depends_on"][name] == {"condition": "service_healthy"}
    assert len(STAND_INS) == 3


def test_only_this_host_reaches_the_router():
    assert {name: service["ports"] for name, service in COMPOSE.items() if "ports" in service} == {
        "router": ["127.0.0.1:8000:8000"]
    }


def test_a_cluster_accepts_the_manifest():
    validate(OBJECTS)


def test_pods_publish_kv_events_under_their_own_address():
    main = container(OBJECTS, "vllm")
    found = settings([expanded(word, {"POD_IP": "10.0.0.7"}) for word in main["args"]])
    assert found["kv_events"]["topic"] == "kv@10.0.0.7:8000@meta-llama/Llama-3.1-8B"
    ports = {port["name"]: port["containerPort"] for port in main["ports"]}
    assert ports == {"http": found["http"]["port"], "kv-events": int(found["kv_events"]["endpoint"].rpartition(":")[2])}


@pytest.mark.parametrize("probe", ["readinessProbe", "livenessProbe"])
def test_probes_ask_vllms_health(probe):
    asked = container(OBJECTS, "vllm")[probe]["httpGet"]
    assert asked == {"path": "/health", "port": "http"}
    assert named(OBJECTS, "Service", "vllm")["spec"]["ports"][0]["targetPort"] == "http"
