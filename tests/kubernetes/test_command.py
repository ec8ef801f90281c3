"""`dynabench kubernetes` as people use it: a folder that can be written again, and one line for what cannot be."""

import fcntl
import os
import re
import resource
import shutil
import time
from pathlib import Path

import pytest
import yaml

from dynabench.kubernetes.settings import ClusterConfig
from dynabench.kubernetes.write import write_manifests
from foundation.errors import UserError
from tests.kubernetes.cluster import validate
from tests.support.commands import dynabench
from tests.support.power import PowerCut

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(text, *flags, out="out", **options):
        Path("d.yaml").write_text(text)
        return dynabench("kubernetes", "d.yaml", "--out", out, *flags, **options)

    return run


def contents(folder="out"):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@pytest.mark.parametrize("example", EXAMPLES, ids=[path.stem for path in EXAMPLES])
@pytest.mark.parametrize("form", ["manifests", "dynamo-v1alpha1", "dynamo-v1beta1"])
def test_every_example_becomes_a_valid_kustomization(tmp_path, monkeypatch, example, form):
    monkeypatch.chdir(tmp_path)
    text = example.read_text()
    if form != "manifests":
        text = "\n".join(line for line in text.splitlines() if not line.startswith("planner:"))
    names = [str(path) for path in written_by(text, form=form)]
    assert names == [
        f"out/{name}" for name in [*sorted(set(contents()) - {"kustomization.yaml"}), "kustomization.yaml"]
    ]
    written = {name: list(yaml.safe_load_all(text)) for name, text in contents().items()}
    assert written["kustomization.yaml"][0]["resources"] == sorted(set(written) - {"kustomization.yaml"})
    validate([each for held in written.values() for each in held])


def test_a_deployment_may_be_given_as_other_commands_take_it(run):
    assert run("pools: {a: {}}").returncode == 0
    assert dynabench("kubernetes", "-f", "d.yaml", "--out", "named").returncode == 0
    assert contents("named") == contents()


def test_what_was_written_before_is_replaced_and_what_is_no_longer_wanted_is_removed(run):
    assert run("pools: {a: {}, b: {}}", "--discovery", "etcd").returncode == 0
    assert {"pool-b.yaml", "etcd.yaml"} <= set(contents())
    assert run("pools: {a: {replicas: 2}}").returncode == 0
    assert set(contents()) == {
        "access.yaml",
        "frontend.yaml",
        "network.yaml",
        "pool-a.yaml",
        "kustomization.yaml",
    }
    assert b"replicas: 2" in contents()["pool-a.yaml"]


def test_manifests_survive_a_power_cut_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    disk = PowerCut(monkeypatch)
    paths = written_by("pools: {a: {}, b: {}}")
    assert disk.unsynced_when_renamed == []
    assert [path for path in paths if not disk.has_content(path)] == []


def test_the_same_deployment_is_written_alike_whatever_this_host_has_set(run, monkeypatch):
    text = "runtime: {lease_ttl_s: 7}\npools: {a: {}}"
    assert run(text, out="plain").returncode == 0
    for name, value in {
        "ETCD_ENDPOINTS": "http://here:2379",
        "NATS_SERVER": "nats://here",
        "DYN_NAMESPACE": "mine",
        "DYN_API_KEY": "hidden",
        "DYN_SYSTEM_PORT": "1",
        "ETCD_LEASE_TTL": "99",
    }.items():
        monkeypatch.setenv(name, value)
    assert run(text, out="set").returncode == 0
    assert contents("plain") == contents("set")
    assert b"hidden" not in b"".join(contents("set").values())


def test_files_of_others_are_left_alone(run):
    Path("out").mkdir()
    Path("out/mine.yaml").write_text("mine")
    done = run("pools: {a: {}}")
    assert done.returncode == 2
    assert done.stderr == (
        "dynabench: out holds mine.yaml, which dynabench kubernetes did not write; expected an empty or new folder, or "
        "--overwrite\n"
    )
    assert set(contents()) == {"mine.yaml"}
    assert run("pools: {a: {}}", "--overwrite").returncode == 0
    assert contents()["mine.yaml"] == b"mine"


def test_files_of_a_run_that_was_killed_are_removed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("out/.dynabench-kubernetes").mkdir(parents=True)
    Path("out/.dynabench-kubernetes/network.yaml").write_text("half of")
    written_by("pools: {a: {}}")
    assert set(contents()) == {"access.yaml", "frontend.yaml", "network.yaml", "pool-a.yaml", "kustomization.yaml"}


def test_a_copy_of_a_file_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written_by("pools: {a: {}, b: {}}")
    shutil.copy("out/pool-b.yaml", "out/mine.yaml")
    written_by("pools: {a: {}}")
    assert {"mine.yaml", "pool-a.yaml", "pool-b.yaml"} & set(contents()) == {"mine.yaml", "pool-a.yaml"}


def test_only_files_in_the_folder_are_removed_whatever_its_list_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written_by("pools: {a: {}}")
    shutil.copy("out/pool-a.yaml", "beside.yaml")
    with Path("out/kustomization.yaml").open("a") as file:
        file.write("  - ../beside.yaml\n")
    written_by("pools: {a: {}}")
    assert Path("beside.yaml").exists()


def test_a_folder_where_a_file_is_to_be_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("out/pool-a.yaml").mkdir(parents=True)
    with pytest.raises(UserError, match=r"^out/pool-a\.yaml is a folder; remove it, or write to another folder$"):
        written_by("pools: {a: {}}", overwrite=True)
    assert [path.name for path in Path("out").iterdir()] == ["pool-a.yaml"]


def test_a_full_disk_leaves_what_was_there_as_it_was(run):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))

    done = run("pools: {a: {}}", preexec_fn=limit)  # frontend.yaml is larger, access.yaml before it is not
    assert (done.returncode, done.stderr) == (2, "dynabench: out: cannot be written (File too large)\n")
    assert contents() == {}
    assert run("pools: {a: {}}").returncode == 0
    before = contents()
    assert run("pools: {a: {replicas: 2}, b: {}}", preexec_fn=limit).returncode == 2
    assert contents() == before


def test_a_run_does_not_write_to_a_folder_while_another_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("out").mkdir()
    other = os.open("out", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(
        UserError, match=r"^out is being written by another dynabench kubernetes; run this one after it$"
    ):
        written_by("pools: {a: {}}")
    assert contents() == {}
    os.close(other)
    written_by("pools: {a: {}}")


def test_a_key_in_the_file_is_in_no_manifest(run):
    done = run("frontend: {api_key: hidden}\npools: {a: {}}", "--secret", "keys")
    assert done.returncode == 0
    assert b"hidden" not in b"".join(contents().values())
    assert b"name: keys" in contents()["frontend.yaml"]


LOOK_DIFFERENT = [
    "1e3",
    "0x1F",
    "0o7",
    "0b1",
    "1_000",
    "1:20",
    "+1",
    "-.5",
    ".inf",
    "2026-11-25",
    "y",
    "N",
    "yes",
    "Off",
    "true",
    "NULL",
    "~",
    "=",
]


@pytest.mark.parametrize("word", LOOK_DIFFERENT)
def test_text_that_a_yaml_reader_takes_for_something_else_is_quoted(tmp_path, monkeypatch, word):
    monkeypatch.chdir(tmp_path)
    written_by(f"{{runtime: {{nats_server: nats://n, nats_username: '{word}'}}, pools: {{a: {{}}}}}}")
    assert f"value: '{word}'\n" in Path("out/pool-a.yaml").read_text()


def test_a_pool_may_be_called_y(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written_by("{name: n, pools: {y: {}}}")
    text = Path("out/pool-y.yaml").read_text()
    assert "dynabench.io/pool: 'y'\n" in text
    assert "app.kubernetes.io/instance: 'n'\n" in text


LONG = "a" * 60
BAD = {
    "pools: {Chatty: {}}": "pools.Chatty has the name 'Chatty'; expected lower-case letters, digits and - (at most 63",
    "pools: {my_pool: {}}": "pools.my_pool has the name 'my_pool'; expected lower-case",
    "pools: {planner: {}}": "pools.planner has a reserved name; expected none of frontend, router,",
    "{name: Demo, pools: {a: {}}}": "name is 'Demo'; expected lower-case",
    f"{{name: {LONG}, pools: {{a: {{}}}}}}": f"{LONG}-frontend has 69 characters; expected at most 63",
    "pools: {a: {model_path: ./tiny}}": "pools.a.model is './tiny'; expected a model on the Hugging Face hub",
    "pools: {a: {engine: llamacpp, model: /x.gguf}}": "pools.a.model is '/x.gguf'; expected a model on the Hugging",
    "pools: {a: {engine: vllm, model: a/b, num_nodes: 2, leader_addr: 'h:1'}}": "pools.a.num_nodes is 2; expected 1",
    "pools: {a: {engine: vllm, model: a/b, extra_engine_args: no.yaml}}": "pools.a: no.yaml cannot be read (No such file",
    "{frontend: {api_key: hidden}, pools: {a: {}}}": "frontend.api_key is secret, but manifests are not; expected --secret",
    "{runtime: {nats_token: hidden}, pools: {a: {}}}": "runtime.nats_token is secret, but manifests are not; expected",
    "{runtime: {etcd_endpoints: 'http://me:hidden@e:1'}, pools: {a: {}}}": "runtime.etcd_endpoints is 'http://***@e:1'; expec",
    "{runtime: {etcd_ca: /x.pem}, pools: {a: {}}}": "runtime.etcd_ca is '/x.pem'; expected none in a cluster",
    "{planner: {planner: lead-time}, pools: {a: {}}}": "planner lead-time needs a TTFT limit",
    "{planner: {planner: hpa}, pools: {a: {engine: echo_core}}}": "planner is 'hpa' and pools.a.engine is 'echo_core'; expected",
    "{kv_store: {kv_store_size: 4}, pools: {a: {}}}": "kv_store_size is 4, but no worker has kv_offloading_size; expected",
    "{frontend: {http_port: 80}, pools: {a: {}}}": "frontend.http_port is 80; expected at least 1024",
    "{frontend: {http_port: 9090}, pools: {a: {}}}": "frontend.http_port is 9090; expected at least 1024, because pods",
    "{frontend: {drain_s: 1e300}, pools: {a: {}}}": "frontend.drain_s is '1e300'; expected a number from 0 to 86400",
    "{frontend: {drain_s: 1.0e+300}, pools: {a: {}}}": "frontend.drain_s is 1e+300; expected from 0 to 86400",
    "pools: {a: {drain_s: 86401}}": "pools.a.drain_s is 86401; expected from 0 to 86400",
    "{planner: {startup_timeout_s: 1.0e+300}, pools: {a: {}}}": "planner.startup_timeout_s is 1e+300; expected",
    "{planner: {max_replicas: 10001}, pools: {a: {}}}": "planner.max_replicas is 10001; expected from 1 to 10000",
    "{planner: {min_endpoint: 10001}, pools: {a: {}}}": "planner.min_endpoint is 10001; expected from 1 to 10000",
    '{runtime: {nats_username: "a\\0b"}, pools: {a: {}}}': "the file contains text with a NUL or a lone surrogate",
    'pools: {a: {model_name: "\\ud800"}}': "the file contains text with a NUL or a lone surrogate",
    'pools: {a: {engine: vllm, model: a/b, engine_args: {"a\\0": 1}}}': "the file contains text with a NUL",
    "": "the file is empty; expected entries of the form NAME: VALUE",
    "# pools: {a: {}}": "the file is empty; expected entries of the form NAME: VALUE",
    "pools: {a: {replicas: 1:20}}": "pools.a.replicas is '1:20'; expected a whole number from 0 to 10000",
    "pools: {a: {replicas: !!int 1:20}}": "pools.a.replicas is '1:20'; expected a whole number from 0 to 10000",
    "pools: {a: {drain_s: 1:20.5}}": "pools.a.drain_s is '1:20.5'; expected a number from 0 to 86400",
    "pools: {a: {}, b: {wrong: 1}}": "pools.b.wrong is unknown",
    "[": "cannot be read as YAML",
}


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_a_deployment_that_cannot_be_in_a_cluster_is_refused_in_a_sentence(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        written_by(text)
    assert str(caught.value).startswith(f"d.yaml: {BAD[text]}")
    assert "hidden" not in str(caught.value)
    assert not Path("out").exists()


def test_a_deployment_that_cannot_be_in_a_cluster_is_one_line(run):
    text = "{frontend: {api_key: hidden}, pools: {a: {}}}"
    refused(run(text), f"d.yaml: {BAD[text]}")


def test_a_long_name_is_not_printed_whole(run):
    done = run(f"{{name: {'a' * 900_000}, pools: {{a: {{}}}}}}")
    refused(done, "d.yaml: name is 'aaa")
    assert "aaa ... aaa" in done.stderr
    assert done.stderr.endswith("characters), as Kubernetes requires\n")
    assert len(done.stderr) < 2100


def test_a_number_of_many_parts_is_read_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parts = ":".join(["1"] * 300_000)  # took 36 s as a number of base 60
    for tag in ("", "!!int "):
        start = time.monotonic()
        with pytest.raises(UserError, match=r"pools\.a\.replicas is '1:1:1"):
            written_by(f"pools: {{a: {{replicas: {tag}{parts}}}}}")
        assert time.monotonic() - start < 10


FLAGS = {
    ("--wrong",): "Unknown option: --wrong",
    ("--form", "helm"): 'Invalid value "helm" for --form',
    ("--namespace", "A_b"): "d.yaml: namespace is 'A_b'; expected lower-case",
    ("--image", "a b"): "d.yaml: image is 'a b'; expected the name of a container image",
    ("--secret", "My Keys"): "d.yaml: secret is 'My Keys'; expected lower-case",
    (
        "--nats",
    ): "d.yaml: nats is true, but no Secret is named; expected --secret with a Secret that contains NATS_AUTH_TOKEN",
    ("--image", "a\x07b"): "d.yaml: image is 'a\\x07b'; expected the name of a container image",
    ("--prometheus", "prometheus:9090"): "d.yaml: prometheus is 'prometheus:9090'; expected an address such as http://",
    ("--frontends", "0"): "frontends must be from 1 to 10000, not 0",
    ("--frontends", "10001"): "frontends must be from 1 to 10000, not 10001",
    (
        "--autoscaler",
        "planner",
    ): "d.yaml: autoscaler is 'planner' but planner is 'static'; expected a planner policy in the file",
    (
        "--autoscaler",
        "hpa",
        "--form",
        "dynamo-v1beta1",
    ): "d.yaml: autoscaler is 'hpa' and form is 'dynamo-v1beta1'; expected",
    ("--out", "d.yaml"): "d.yaml is a file; expected a folder",
    ("--out", "d.yaml/below"): "d.yaml/below: cannot be written (Not a directory)",
    ("--out", "/proc/none"): "/proc/none: cannot be written (No such file or directory)",
}


@pytest.mark.parametrize("flags", FLAGS, ids=range(len(FLAGS)))
def test_a_wrong_flag_is_one_line(run, flags):
    text, out = "pools: {a: {}}", "out"
    if flags[0] == "--out":
        flags, out = (), flags[1]
    refused(run(text, *flags, out=out), FLAGS[flags or ("--out", out)])


@pytest.mark.parametrize(
    ("text", "autoscaler", "message"),
    [
        (
            "pools: {a: {model_name: m}, b: {model_name: m}}",
            "keda",
            "autoscaler is 'keda', but pools.a and pools.b both serve m; expected one pool of each role",
        ),
        (
            "pools: {a: {model_name: org/m}}",
            "hpa",
            "autoscaler is 'hpa' and pools.a serves 'org/m', which is not a valid label value; expected",
        ),
        (
            "{planner: {planner: kpa}, pools: {a: {}}}",
            "hpa",
            "autoscaler is 'hpa' and planner is 'kpa'; expected planner 'static'",
        ),
        (
            "{planner: {hpa_metric: kv_usage}, pools: {a: {}}}",
            "keda",
            "planner.hpa_metric is 'kv_usage' and autoscaler is 'keda'; expected 'queue' with that autoscaler",
        ),
    ],
)
def test_what_cannot_be_scaled_by_a_metric_is_refused(tmp_path, monkeypatch, text, autoscaler, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="^" + re.escape(f"d.yaml: {message}")):
        written_by(text, autoscaler=autoscaler)


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("prometheus", "http://p:9090", "--prometheus is given, but only --autoscaler keda uses it: leave it out"),
        ("engine_image", "vllm:1", "--engine-image is given, but no pool runs a model: leave it out"),
        ("model_claim", "weights", "--model-claim is given, but no pool runs a model: leave it out"),
        ("hf_token_secret", "mine", "--hf-token-secret is given, but no pool runs a model: leave it out"),
    ],
)
def test_a_flag_that_changes_nothing_is_refused(tmp_path, monkeypatch, flag, value, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"^d.yaml: {re.escape(message)}$"):
        written_by("pools: {a: {}}", **{flag: value})


def test_a_planner_under_dynamos_operator_is_told_what_to_add(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "{planner: {planner: hpa}, pools: {a: {}}}"
    message = "d.yaml: the file has a planner, and Dynamo's operator sets the replicas itself: add --autoscaler none"
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        written_by(text, form="dynamo-v1beta1")
    assert written_by(text, form="dynamo-v1beta1", autoscaler="none")


def written_by(text, *, overwrite=False, **settings):
    Path("d.yaml").write_text(text)
    return write_manifests(Path("d.yaml"), ClusterConfig(**settings), Path("out"), overwrite=overwrite)


def refused(done, message):
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"dynabench: {message}"), done.stderr
    assert done.stderr.count("\n") == 1
    assert "hidden" not in done.stderr
    assert not Path("out").exists()
