"""What is written for a cluster: valid, consistent, and the deployment that the file describes."""

import dataclasses
import re
from pathlib import Path
from urllib.parse import urlsplit

import jsonschema
import kubernetes_validate
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.file import from_plain
from dynabench.kubernetes.manifests import manifests
from dynabench.kubernetes.settings import ClusterConfig
from mocker import EngineConfig, SglangConfig, TrtllmConfig
from mocker.timing.config import TimingConfig
from serving.frontend.config import FrontendConfig
from serving.router import RouterConfig
from serving.runtime.kubernetes.access import discovery, scaling
from serving.worker.config import WorkerConfig
from tests.kubernetes.cluster import (
    annotations,
    container,
    environment,
    expanded,
    files,
    named,
    objects,
    of_kind,
    parsed,
    pods,
    validate,
)
from tests.support.examples import worth

DOCS = Path(__file__).parents[2] / "docs"
MOCK = "pools: {worker: {replicas: 3, speedup_ratio: 10}}"
TWO_MODELS = """
name: demo
router_mode: kv
pools:
  chatty: {replicas: 2, model_name: chatty, drain_s: 300.5}
  parrot: {model_name: parrot, engine: echo_core}
"""
APART = """
router_mode: kv
pools:
  prefill: {role: prefill, replicas: 2, model: meta-llama/Llama-3.1-70B, gpu: h100, tensor_parallel_size: 4}
  decode: {role: decode, replicas: 2, router_mode: least-loaded, model: meta-llama/Llama-3.1-70B, gpu: h100, tensor_parallel_size: 4}
"""
TIERS = """
model: meta-llama/Llama-3.1-8B
gpu: h100
standalone_router: true
pools: {worker: {kv_offloading_size: 64, kv_disk_size: 100}}
kv_store: {kv_store_size: 100}
"""
REAL = """
name: prod
model: Qwen/Qwen3-32B
frontend: {drain_s: 120, http_workers: 2, http_port: 9000}
pools:
  p: {engine: vllm, role: prefill, replicas: 2, tensor_parallel_size: 4, engine_args: {max_num_seqs: 64, note: 'a $(POD_NAME) $$'}}
  d: {engine: vllm, role: decode, tensor_parallel_size: 8}
"""
PLANNED = """
pools: {worker: {replicas: 2}}
planner: {planner: hpa, max_replicas: 6}
"""
EXTERNAL = """
runtime: {etcd_endpoints: 'https://etcd.infra:2379', nats_server: 'nats://nats.infra:4222', lease_ttl_s: 20}
pools: {worker: {}}
"""
ALL = {
    "mock": (MOCK, {}),
    "two models": (TWO_MODELS, {"discovery": "etcd", "nats": True, "secret": "keys", "namespace": "bench"}),
    "apart": (APART, {"discovery": "etcd", "monitor": "service", "frontends": 2}),
    "tiers": (TIERS, {"nats": True, "secret": "keys", "monitor": "pod"}),
    "real": (REAL, {"secret": "keys", "monitor": "pod", "model_claim": "weights", "engine_image": "vllm:1"}),
    "planned": (PLANNED, {}),
    "hpa": (MOCK, {"autoscaler": "hpa", "monitor": "service"}),
    "keda": (APART, {"autoscaler": "keda", "monitor": "service"}),
    "external": (EXTERNAL, {}),
    "alpha": (APART, {"form": "dynamo-v1alpha1", "monitor": "pod"}),
    "beta": (TIERS, {"form": "dynamo-v1beta1", "discovery": "etcd"}),
    "real alpha": (REAL, {"form": "dynamo-v1alpha1"}),
    "real beta": (REAL, {"form": "dynamo-v1beta1"}),
}


@pytest.fixture(params=ALL, ids=[name.replace(" ", "-") for name in ALL])
def written(request):
    text, given = ALL[request.param]
    return objects(text, **given)


def test_everything_is_valid(written):
    validate(written)


def test_validation_sees_a_misspelled_field_and_a_wrong_type():
    found = objects(MOCK)
    worker = named(found, "Deployment", "dynamo-worker")
    worker["spec"]["template"]["spec"]["terminationGracePeriodSecond"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriodSecond"):
        validate([worker])
    [graph] = of_kind(objects(MOCK, form="dynamo-v1beta1"), "DynamoGraphDeployment")
    graph["spec"]["services"] = {}
    with pytest.raises(jsonschema.ValidationError, match="services"):
        validate([graph])


def test_selectors_match_the_pods_they_are_for_and_no_others(written):
    labels = {name: held for name, (held, _) in pods(written).items()}
    for each in of_kind(written, "Deployment", "StatefulSet", "PodDisruptionBudget", "Service"):
        selector = each["spec"]["selector"]
        chosen = selector.get("matchLabels", selector)
        matched = [name for name, held in labels.items() if chosen.items() <= held.items()]
        assert matched == [each["metadata"]["name"]]


def test_every_object_has_the_label_by_which_a_deployment_is_pruned(written):
    assert {each["metadata"]["labels"]["app.kubernetes.io/instance"] for each in written} <= {"dynamo", "demo", "prod"}


def test_what_prometheus_scrapes_is_the_frontends_port(written):
    for each in of_kind(written, "ServiceMonitor"):
        wanted = each["spec"]["selector"]["matchLabels"].items()
        [service] = [one for one in of_kind(written, "Service") if wanted <= one["metadata"]["labels"].items()]
        assert {end["port"] for end in each["spec"]["endpoints"]} <= {port["name"] for port in service["spec"]["ports"]}
    for each in of_kind(written, "PodMonitor"):
        wanted = each["spec"]["selector"]["matchLabels"].items()
        [pod] = [pod for labels, pod in pods(written).values() if wanted <= labels.items()]
        names = {port["name"] for port in pod["containers"][0]["ports"]}
        assert {end["port"] for end in each["spec"]["podMetricsEndpoints"]} <= names


def test_ports_of_services_and_probes_are_open_in_their_pods(written):
    held = pods(written)
    for service in of_kind(written, "Service"):
        [main] = held[service["metadata"]["name"]][1]["containers"]
        ports = {port["name"]: port["containerPort"] for port in main["ports"]}
        assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == ports
    for _, pod in held.values():
        [main] = pod["containers"]
        names = {port["name"] for port in main["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            port = main[probe]["httpGet"]["port"]
            assert port in names or f"--http_port={port}" in main["args"] or f":{port}" in " ".join(main["args"])


def test_addresses_of_services_are_those_of_services(written):
    services = {
        (each["metadata"]["name"], port["port"])
        for each in of_kind(written, "Service")
        for port in each["spec"]["ports"]
    }
    for _, pod in pods(written).values():
        [main] = pod["containers"]
        values = [each.get("value", "") for each in main.get("env", [])] + main["args"]
        for value in values:
            for text in re.findall(r"(?:http|nats)://\S+|(?<=--kv-store=)\S+", value):
                place = urlsplit(text if "://" in text else f"kv://{text}")
                if place.hostname == "0.0.0.0" or place.hostname.endswith(".infra") or not of_kind(written, "Service"):
                    continue
                if of_kind(written, "DynamoGraphDeployment") and "kv://" in place.geturl():
                    continue
                assert (place.hostname, place.port) in services


def test_a_pod_outlives_its_drain():
    text = """
frontend: {drain_s: 120}
standalone_router: true
pools: {worker: {drain_s: 300.5}}
"""
    for form in ("manifests", "dynamo-v1alpha1", "dynamo-v1beta1"):
        held = pods(objects(text, form=form))
        for part, drain_s in (("frontend", 120), ("worker", 300.5), ("router", 30)):
            [pod] = [pod for name, (_, pod) in held.items() if name.endswith(part)]
            leaving = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
            assert pod["terminationGracePeriodSeconds"] >= leaving + drain_s + 30


def test_every_container_understands_its_arguments(written):
    for name, (_, pod) in pods(written).items():
        [main] = pod["containers"]
        if main["name"] == "main":
            assert parsed(main), name


def test_processes_can_do_in_the_cluster_what_they_have_to(written):
    rules = {each["metadata"]["name"]: each["rules"] for each in of_kind(written, "Role")}
    bound = {each["subjects"][0]["name"]: each["roleRef"]["name"] for each in of_kind(written, "RoleBinding")}
    accounts = {each["metadata"]["name"]: each for each in of_kind(written, "ServiceAccount")}
    for _, pod in pods(written).values():
        [main] = pod["containers"]
        if main["name"] != "main":
            continue
        account = pod["serviceAccountName"]
        wanted = list(discovery(token)) if (token := environment(main).get("DYN_CLUSTER_TOKEN_SECRET")) else []
        pools = [name for name, (labels, _) in pods(written).items() if "dynabench.io/pool" in labels]
        wanted += scaling(pools) if "dynabench.planner" in main["args"] else []
        assert accounts[account]["automountServiceAccountToken"] == bool(wanted)
        granted = rules[bound[account]] if wanted else []
        for rule in wanted:
            assert any(
                rule.group in each["apiGroups"]
                and rule.resource in each["resources"]
                and set(rule.verbs) <= set(each["verbs"])
                and list(rule.names) == each.get("resourceNames", [])
                for each in granted
            )


@pytest.mark.parametrize(
    ("page", "heading", "rules"),
    [
        ("serving", "| the Role allows | on | of API group |", list(discovery())),
        ("planner", "| verbs | on | of API group |", scaling(["dynamo-a"])),
    ],
)
def test_the_pages_name_the_rights_that_are_granted(page, heading, rules):
    _, _, table = (DOCS / f"{page}.md").read_text().partition(f"{heading}\n|---|---|---|\n")
    rows = [line.strip("| ").split(" | ") for line in table.partition("\n\n")[0].splitlines()]
    assert len(rows) == len(rules)
    for rule in rules:
        [verbs] = [row[0] for row in rows if row[1].startswith(f"`{rule.resource}`") and rule.group in row[2]]
        assert verbs == ", ".join(rule.verbs)
        [limit] = [", only " in row[1] for row in rows if row[1].startswith(f"`{rule.resource}`")]
        assert limit == bool(rule.names)


def test_the_tokens_secret_is_shipped_empty_and_nobody_may_make_one():
    [secret] = of_kind(objects(MOCK), "Secret")
    assert (secret["metadata"]["name"], secret["type"]) == ("dynamo-cluster-token", "Opaque")
    assert not {"data", "stringData", "immutable"} & {*secret}
    rules = [rule for each in of_kind(objects(PLANNED), "Role") for rule in each["rules"]]
    for rule in rules:
        if "secrets" in rule["resources"]:
            assert rule["resourceNames"] == [secret["metadata"]["name"]]
            assert not {"create", "update", "delete"} & {*rule["verbs"]}
    assert of_kind(objects(MOCK, discovery="etcd"), "Secret") == []


def test_volumes_are_mounted_and_mounts_have_volumes(written):
    maps = {each["metadata"]["name"] for each in of_kind(written, "ConfigMap")}
    for _, pod in pods(written).values():
        [main] = pod["containers"]
        if main["name"] == "main":
            volumes = {each["name"] for each in pod["volumes"]}
            assert volumes == {each["name"] for each in main["volumeMounts"]}
            assert {each["configMap"]["name"] for each in pod["volumes"] if "configMap" in each} <= maps


def test_containers_write_to_volumes_and_nowhere_else(written):
    for name, (_, pod) in pods(written).items():
        [main] = pod["containers"]
        assert main["securityContext"]["readOnlyRootFilesystem"], name
        writable = [each["mountPath"] for each in main["volumeMounts"] if not each.get("readOnly")]
        given = environment(main) if "env" in main else {}
        flags = [word.partition("=")[2] for word in main["args"] if word.startswith(("--data-dir=", "--store_dir="))]
        wanted = [*flags, *(given[name] for name in ("HOME", "HF_HOME") if name in given)]
        assert wanted, name
        assert [path for path in wanted if not any(f"{path}/".startswith(f"{each}/") for each in writable)] == []


def test_objects_are_in_the_namespace_and_have_names_of_their_own(written):
    names = [(each["kind"], each["metadata"]["name"]) for each in written]
    assert len(names) == len(set(names))
    assert len({each["metadata"]["namespace"] for each in written}) == 1


@pytest.mark.parametrize("name", ALL)
def test_the_kustomization_lists_exactly_what_is_written(name):
    text, given = ALL[name]
    found = files(text, **given)
    [kustomization] = found.pop("kustomization.yaml")
    validate([kustomization])
    assert kustomization["resources"] == sorted(found)
    assert kustomization["namespace"] == given.get("namespace", "default")
    assert all(found.values())


def test_a_pools_workers_are_found_by_their_labels():
    found = objects(APART, namespace="bench")
    worker = named(found, "Deployment", "dynamo-prefill")
    assert worker["spec"]["replicas"] == 2
    assert worker["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert worker["spec"]["template"]["metadata"]["labels"] == {
        "app.kubernetes.io/name": "dynabench",
        "app.kubernetes.io/instance": "dynamo",
        "app.kubernetes.io/component": "worker",
        "dynabench.io/pool": "prefill",
        "dynabench.io/role": "prefill",
    }
    assert named(found, "Service", "dynamo-prefill")["spec"]["clusterIP"] == "None"


def test_processes_tell_others_the_address_of_their_pod():
    found = objects(APART)
    for name in ("dynamo-frontend", "dynamo-prefill", "dynamo-decode"):
        fields = {
            each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"] for each in container(found, name)["env"][:5]
        }
        assert fields["DYN_TCP_RPC_HOST"] == fields["POD_IP"] == "status.podIP"
    assert parsed(container(found, "dynamo-decode"), ip="10.1.2.3")["transfer"].transfer_host == "10.1.2.3"
    assert parsed(container(found, "dynamo-frontend"))["frontend"].http_host == "0.0.0.0"


def test_a_kv_store_listens_at_its_pod_and_is_reached_by_its_service():
    found = objects(TIERS)
    store = parsed(container(found, "dynamo-kv-store"), ip="10.1.2.3")["store"]
    assert (store.host, store.port, store.kv_store_size) == ("10.1.2.3", 7600, 1.0)  # kv_bytes_scale is 0.01
    assert parsed(container(found, "dynamo-worker"))["transfer"].kv_store == "dynamo-kv-store:7600"
    assert container(found, "dynamo-kv-store")["resources"]["limits"]["memory"] == "1280Mi"
    assert named(found, "Deployment", "dynamo-kv-store")["spec"]["strategy"] == {"type": "Recreate"}


def test_mockers_need_no_gpu_and_little_else():
    [pod] = [pod for name, (_, pod) in pods(objects(MOCK)).items() if name == "dynamo-worker"]
    [main] = pod["containers"]
    assert main["resources"] == {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "512Mi"}}
    assert "tolerations" not in pod


def test_engines_that_run_models_get_gpus_time_to_load_and_their_image():
    found = objects(REAL, secret="keys", model_claim="weights", engine_image="vllm:1")
    main = container(found, "prod-d")
    assert main["image"] == "vllm:1"
    assert main["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    probe = main["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] >= 1800
    assert environment(main)["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "$(POD_IP)"
    assert environment(main)["HF_HOME"] == "/models/huggingface"
    assert secrets(main) == {"HF_TOKEN": {"name": "hf-token-secret", "key": "HF_TOKEN", "optional": True}}


def secrets(main):
    """Return what a container gets from Secrets, by the variable."""
    found = {each["name"]: each.get("valueFrom", {}).get("secretKeyRef") for each in main.get("env", [])}
    return {name: held for name, held in found.items() if held}


def test_each_pod_gets_only_the_secrets_that_it_needs():
    text = "pools: {mock: {}, real: {engine: vllm, model: a/b}}"
    found = objects(text, secret="keys")
    key = {"name": "keys", "key": "DYN_API_KEY"}
    assert {name: set(secrets(container(found, name))) for name in pods(found)} == {
        "dynamo-frontend": {"DYN_API_KEY"},
        "dynamo-mock": set(),
        "dynamo-real": {"HF_TOKEN"},
    }
    assert secrets(container(found, "dynamo-frontend")) == {"DYN_API_KEY": key}
    for more, flags in (("frontend: {api_key: hidden}", {}), ("name: dynamo", {"monitor": "pod"})):
        held = secrets(container(objects(f"{more}\n{text}", secret="keys", **flags), "dynamo-frontend"))
        assert held == {"DYN_API_KEY": {"name": "keys", "key": "DYN_API_KEY"}}  # no pod starts without it
    assert "DYN_API_KEY" in secrets(container(objects(PLANNED, secret="keys"), "dynamo-planner"))
    assert not any("envFrom" in pod["containers"][0] for _, pod in pods(found).values())


@pytest.mark.parametrize("form", ["manifests", "dynamo-v1alpha1", "dynamo-v1beta1"])
def test_pods_are_replaced_when_their_files_change_and_not_otherwise(form, tmp_path):
    path = tmp_path / "more.yaml"
    path.write_text("seed: 1")
    text = f"pools: {{a: {{engine: vllm, model: a/b, extra_engine_args: {path}}}, b: {{}}}}"
    contents = ({str(path): content} for content in (b"seed: 1", b"seed: 1", b"seed: 2"))
    once, same, changed = (objects(text, content, form=form) for content in contents)
    assert once == same
    before, after = ({name: annotations(found, name) for name in pods(found)} for found in (once, changed))
    a = "a" if form != "manifests" else "dynamo-a"
    assert {name for name in before if before[name] != after[name]} == {name for name in before if before[name]} == {a}


def test_a_changed_limit_of_a_planner_starts_it_again():
    few, many = (
        annotations(objects(PLANNED.replace("max_replicas: 6", more)), "dynamo-planner")
        for more in ("max_replicas: 6", "max_replicas: 7")
    )
    assert few != many


def test_deployments_of_a_namespace_share_no_secret():
    one, another = (
        {each["metadata"]["name"] for each in of_kind(objects(f"name: {name}\npools: {{a: {{}}}}"), "Secret")}
        for name in ("one", "two")
    )
    assert one and another and not one & another


def test_passwords_of_servers_reach_every_process_that_uses_them():
    found = objects(EXTERNAL, secret="keys")
    for name in pods(found):
        wanted = {"ETCD_AUTH_PASSWORD", "NATS_AUTH_PASSWORD", "NATS_AUTH_TOKEN"}
        assert set(secrets(container(found, name))) - {"DYN_API_KEY"} == wanted
    needed = EXTERNAL.replace("lease_ttl_s: 20", "nats_token: hidden")
    assert secrets(container(objects(needed, secret="keys"), "dynamo-worker"))["NATS_AUTH_TOKEN"] == {
        "name": "keys",
        "key": "NATS_AUTH_TOKEN",
    }


def test_nats_asks_for_the_token_that_its_clients_get_and_shows_nobody_what_it_does():
    found = objects(MOCK, nats=True, secret="keys")
    token = {"NATS_AUTH_TOKEN": {"name": "keys", "key": "NATS_AUTH_TOKEN"}}
    server = container(found, "dynamo-nats")
    assert "--auth=$(NATS_AUTH_TOKEN)" in server["args"]
    assert secrets(server) == secrets(container(found, "dynamo-worker")) == token
    assert [port["port"] for port in named(found, "Service", "dynamo-nats")["spec"]["ports"]] == [4222]


def reaches(found, caller, called, port):
    """Whether pods with the labels of `caller` may call those with the labels of `called` at a port of this name."""

    def selects(selector, labels):
        return selector["matchLabels"].items() <= labels.items()

    specs = [each["spec"] for each in of_kind(found, "NetworkPolicy")]
    holding = [spec for spec in specs if selects(spec["podSelector"], called)]
    return not holding or any(
        ("from" not in rule or any(selects(peer["podSelector"], caller) for peer in rule["from"]))
        and ("ports" not in rule or port in [each["port"] for each in rule["ports"]])
        for spec in holding
        for rule in spec["ingress"]
    )


@pytest.mark.parametrize("form", ["manifests", "dynamo-v1beta1"])
def test_strangers_reach_the_frontends_and_nothing_else(form):
    found = objects(TIERS, form=form, discovery="etcd", nats=True, secret="keys")
    stranger = {"app.kubernetes.io/name": "shop", "app.kubernetes.io/instance": "dynamo"}
    another = {"app.kubernetes.io/name": "dynabench", "app.kubernetes.io/instance": "other"}
    held = {name.removeprefix("dynamo-"): labels for name, (labels, _) in pods(found).items()}
    assert {"etcd", "nats", "frontend", "kv-store", "router", "worker"} == {*held}
    worker = held["worker"]
    for name, labels in held.items():
        for caller in (stranger, another):
            assert reaches(found, caller, labels, "http") == (name == "frontend")
            assert not any(reaches(found, caller, labels, port) for port in ("client", "kv", "system", "free"))
        assert reaches(found, worker, labels, "client")
        assert reaches(found, worker, labels, "free") == (name not in ("etcd", "nats"))


def test_arguments_of_an_engine_arrive_as_they_were_given():
    given = parsed(container(objects(REAL), "prod-p"))
    assert given["arguments"] == ["--max_num_seqs=64", '--note="a $(POD_NAME) $$"']
    assert given["engine"].tensor_parallel_size == 4
    assert given["worker"].model_path == "Qwen/Qwen3-32B"


def test_a_mocker_with_a_models_tokenizer_uses_the_claim_and_the_token():
    found = objects("pools: {a: {model_path: a/b}}", model_claim="weights", hf_token_secret="mine")
    assert "/models" in [mount["mountPath"] for mount in container(found, "dynamo-a")["volumeMounts"]]
    assert secrets(container(found, "dynamo-a"))["HF_TOKEN"]["name"] == "mine"


def test_sglang_meets_at_its_pods_address():
    text = "model: a/b\npools: {p: {engine: sglang, role: prefill}, d: {engine: sglang, role: decode}}"
    assert parsed(container(objects(text), "dynamo-p"), ip="10.1.2.3")["arguments"] == ['--host="10.1.2.3"']


def test_files_of_this_machine_come_along(tmp_path):
    path = tmp_path / "args.yaml"
    path.write_text("enforce_eager: true\n")
    text = f"pools: {{p: {{engine: vllm, model: a/b, extra_engine_args: {path}}}}}"
    found = objects(text, {str(path): path.read_bytes()})
    [held] = of_kind(found, "ConfigMap")
    assert held["data"] == {"args.yaml": "enforce_eager: true\n"}
    assert held["metadata"]["name"] == "dynamo-p-files"
    main = container(found, "dynamo-p")
    assert str(parsed(main)["engine"].extra_engine_args) == "/etc/dynabench/args.yaml"
    assert {"name": "files", "mountPath": "/etc/dynabench", "readOnly": True} in main["volumeMounts"]
    validate(found)


def test_a_graph_has_roles_of_dynamos_operator_and_its_ports():
    [graph] = of_kind(objects(APART, form="dynamo-v1alpha1"), "DynamoGraphDeployment")
    services = graph["spec"]["services"]
    assert {name: (each["componentType"], each.get("subComponentType")) for name, each in services.items()} == {
        "frontend": ("frontend", None),
        "prefill": ("worker", "prefill"),
        "decode": ("worker", "decode"),
    }
    [graph] = of_kind(objects(APART, form="dynamo-v1beta1"), "DynamoGraphDeployment")
    types = {each["name"]: each["type"] for each in graph["spec"]["components"]}
    assert types == {"frontend": "frontend", "prefill": "prefill", "decode": "decode"}
    main = graph["spec"]["components"][0]["podTemplate"]["spec"]["containers"][0]
    assert main["name"] == "main"
    assert main["ports"] == [{"name": "http", "containerPort": 8000}]


def test_a_graph_in_v1alpha1_asks_for_gpus_in_its_own_way():
    [graph] = of_kind(objects(REAL, form="dynamo-v1alpha1"), "DynamoGraphDeployment")
    assert graph["spec"]["services"]["p"]["resources"]["limits"] == {"gpu": "4"}


def test_what_is_scaled_has_no_number_that_would_undo_it():
    for name in ("hpa", "keda", "planned"):
        text, flags = ALL[name]
        found = objects(text, **flags)
        for each in of_kind(found, "Deployment"):
            assert ("replicas" in each["spec"]) == ("dynabench.io/pool" not in each["metadata"]["labels"])
        for each in of_kind(found, "HorizontalPodAutoscaler", "ScaledObject"):
            assert named(found, "Deployment", each["spec"]["scaleTargetRef"]["name"])


def test_an_advisory_planner_may_change_nothing_and_pools_keep_their_size():
    found = objects("pools: {worker: {replicas: 3}}\nplanner: {planner: hpa, advisory: true}")
    assert named(found, "Deployment", "dynamo-worker")["spec"]["replicas"] == 3
    rules = named(found, "Role", "dynamo-planner")["rules"]
    theirs = [rule["verbs"] for rule in rules if {"pods", "deployments", "deployments/scale"} & {*rule["resources"]}]
    assert len(theirs) == 3
    assert not any({"patch", "update", "create", "delete"} & {*verbs} for verbs in theirs)


def test_a_planner_may_scale_the_pools_of_its_deployment_and_no_other():
    rules = named(objects("pools: {a: {}, b: {}}\nplanner: {planner: hpa}"), "Role", "dynamo-planner")["rules"]
    [scale] = [rule for rule in rules if "deployments/scale" in rule["resources"]]
    assert (scale["verbs"], scale["resourceNames"]) == (["get", "patch"], ["dynamo-a", "dynamo-b"])
    changing = {name for rule in rules for name in rule["resources"] if "patch" in rule["verbs"]}
    assert changing == {"leases", "configmaps", "secrets", "deployments/scale", "pods"}


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("router_mode: mine.py+eps(5)\npools: {worker: {}}", "router_mode is 'mine.py+eps(5)'"),
        ("pools: {worker: {}}\nplanner: {planner: mine.py}", "planner is 'mine.py'"),
    ],
)
def test_classes_in_files_are_refused(text, setting, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import serving.planner, serving.router\n"
        "class Mode(serving.router.Policy): pass\n"
        "class Rule(serving.planner.Policy): default_interval_s = 1.0\n"
    )
    with pytest.raises(ValueError, match="your own files are not copied into the cluster") as refused:
        objects(text)
    assert str(refused.value).startswith(setting)


@pytest.mark.parametrize("name", ["two words.yaml", "a:b.yaml", "größe.yaml", "..yaml", "a" * 254])
def test_a_file_whose_name_a_config_map_does_not_take_is_refused(name, tmp_path):
    path = tmp_path / name
    path.write_text("{}")
    text = f"pools: {{p: {{engine: vllm, model: a/b, extra_engine_args: '{path}'}}}}"
    with pytest.raises(ValueError, match=r"pools\.p uses the file '/.*; expected a name of letters, digits"):
        objects(text, {str(path): path.read_bytes()})


def test_numbers_have_no_exponents():
    found = objects(EXTERNAL.replace("lease_ttl_s: 20", "lease_ttl_s: 86400"))
    assert environment(container(found, "dynamo-worker"))["ETCD_LEASE_TTL"] == "86400"
    for target, threshold in (("12345678", "12345678"), ("1.0e-7", "0.0000001"), ("2.5", "2.5")):
        found = objects(f"pools: {{worker: {{}}}}\nplanner: {{hpa_target: {target}}}", autoscaler="keda")
        [trigger] = named(found, "ScaledObject", "dynamo-worker")["spec"]["triggers"]
        assert trigger["metadata"]["threshold"] == threshold


def test_an_autoscaler_has_the_planners_limits():
    text = "pools: {worker: {}}\nplanner: {min_endpoint: 2, max_replicas: 7, hpa_target: 1.5, hpa_down_window_s: 60}"
    spec = named(objects(text, autoscaler="hpa"), "HorizontalPodAutoscaler", "dynamo-worker")["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 7)
    assert spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 60
    assert spec["metrics"][0]["external"] == {
        "metric": {
            "name": "dynamo_component_requests_waiting",
            "selector": {"matchLabels": {"model": "mock", "worker_type": "aggregated"}},
        },
        "target": {"type": "AverageValue", "averageValue": "1500m"},
    }
    spec = named(objects(text, autoscaler="keda"), "ScaledObject", "dynamo-worker")["spec"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 7)
    assert spec["triggers"][0]["metadata"]["query"] == (
        'sum(max by (instance, rank) (dynamo_component_requests_waiting{namespace="default",pod=~"dynamo-frontend-.*",'
        'model="mock",worker_type="aggregated"}))'
    )


def test_a_planner_gets_the_deployment_and_the_frontends_address():
    found = objects(PLANNED)
    [held] = of_kind(found, "ConfigMap")
    described = from_plain(yaml.safe_load(held["data"]["deployment.yaml"]))
    assert described.planner.max_replicas == 6
    assert "--url=http://dynamo-frontend:8080" in container(found, "dynamo-planner")["args"]
    assert pods(found)["dynamo-planner"][1]["serviceAccountName"] == "dynamo-planner"


def test_servers_of_the_file_are_used():
    found = objects(EXTERNAL)
    assert {each["metadata"]["name"] for each in of_kind(found, "Deployment", "StatefulSet")} == {
        "dynamo-frontend",
        "dynamo-worker",
    }
    given = environment(container(found, "dynamo-worker"))
    assert given["ETCD_ENDPOINTS"] == "https://etcd.infra:2379"
    assert given["NATS_SERVER"] == "nats://nats.infra:4222"
    assert given["ETCD_LEASE_TTL"] == "20"
    assert given["DYN_DISCOVERY_BACKEND"] == "auto"


def test_names_of_users_arrive_as_they_were_given():
    name = "$(POD_IP) $$ $HOME"
    found = objects(EXTERNAL.replace("lease_ttl_s: 20", f"nats_username: '{name}', etcd_username: '{name}'"))
    given = environment(container(found, "dynamo-worker"))
    for variable in ("NATS_AUTH_USERNAME", "ETCD_AUTH_USERNAME"):
        assert expanded(given[variable], {"POD_IP": "10.0.0.7"}) == name


names = st.from_regex(r"[a-z]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True).filter(
    lambda name: name not in ("frontend", "router", "kv-store", "planner", "etcd", "nats")
)
texts = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=12).filter(
    lambda text: text.lower() != "none" and text == text.strip()
)
POOLS = st.builds(
    Pool,
    name=names,
    replicas=st.integers(1, 50),
    mocker=st.builds(
        EngineConfig,
        block_size=st.just(16),
        max_num_seqs=st.integers(1, 4096),
        enable_prefix_caching=st.booleans(),
        async_scheduling=st.sampled_from([None, True, False]),
        watermark=st.floats(0, 0.99),
        dp_size=st.integers(1, 8),
    ),
    timing=st.builds(TimingConfig, speedup_ratio=st.floats(0, 1e6), decode_speedup_ratio=st.floats(0, 1e-6)),
    worker=st.builds(
        WorkerConfig,
        model_name=texts,
        migration_limit=st.integers(0, 9),
        kv_events=st.just(True),
        drain_s=st.floats(0, 1e4),
    ),
)
DEPLOYMENTS = st.builds(
    Deployment,
    name=names,
    pools=st.lists(POOLS, min_size=1, max_size=3, unique_by=lambda pool: pool.name).map(tuple),
    router_mode=st.sampled_from(["kv", "round-robin", "least-loaded"]),
    router=st.builds(
        RouterConfig,
        kv_overlap_score_weight=st.floats(0, 1e300),
        max_queue_depth=st.none() | st.floats(0, 1e3),
        use_kv_events=st.booleans(),
    ),
    frontend=st.builds(
        FrontendConfig,
        http_port=st.integers(1024, 65535).filter(lambda port: port != 9090),
        http_workers=st.integers(1, 4),
        migration_limit=st.none() | st.integers(0, 1023),
        cors_allow_origins=st.sampled_from(["", "*", "https://a.example.com, https://b.example.com"]),
        drain_s=st.floats(0, 1e4),
        allow_kv_transfer_params=st.booleans(),
    ),
)
FORMS = st.sampled_from(["manifests", "dynamo-v1alpha1", "dynamo-v1beta1"])


@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        ("sglang", SglangConfig(page_size=16, schedule_policy="lpm", enable_mixed_chunk=True)),
        ("trtllm", TrtllmConfig(capacity_scheduler_policy="MAX_UTILIZATION", enable_block_reuse=False)),
    ],
)
def test_mockers_with_another_scheduler_get_its_settings(kind, engine):
    deployment = Deployment(pools=(Pool(engine_type=kind, **{kind: engine}),))
    held = [each for file in manifests(deployment, ClusterConfig(), {}).values() for each in file]
    given = parsed(container(held, f"{deployment.name}-worker"))
    assert given["scheduler"].engine_type == kind
    assert given[kind] == engine
    assert given["timing"].host_times == kind


@settings(max_examples=worth(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(deployment=DEPLOYMENTS, form=FORMS, discovery=st.sampled_from(["kubernetes", "etcd"]), nats=st.booleans())
def test_whatever_is_deployed_is_valid_and_gets_its_settings(deployment, form, discovery, nats):
    config = ClusterConfig(form=form, discovery=discovery, nats=nats, secret="keys")
    found = manifests(deployment, config, {})
    assert found == manifests(deployment, config, {})
    held = [each for each_file in found.values() for each in each_file]
    validate(held)
    prefix = f"{deployment.name}-" if form == "manifests" else ""
    for pool in deployment.pools:
        given = parsed(container(held, prefix + pool.name))
        assert given.get("engine", EngineConfig()) == pool.mocker
        assert given.get("timing", TimingConfig()) == pool.timing
        worker = given["worker"]
        assert dataclasses.replace(worker, endpoint=pool.worker.endpoint) == pool.worker
    given = parsed(container(held, f"{prefix}frontend"))
    assert given.get("router", RouterConfig()) == deployment.router
    port = 8000 if form != "manifests" and deployment.frontend.http_port == 8080 else deployment.frontend.http_port
    changed = {"http_host": "0.0.0.0", "http_port": port, "namespace": deployment.name}
    wanted = dataclasses.replace(deployment.frontend, router_mode=deployment.router_mode, **changed)
    assert given["frontend"] == wanted
