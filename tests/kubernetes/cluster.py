"""Manifests as a cluster reads them."""

import re

import jsonschema
import kubernetes_validate
import yaml

from dynabench.deployment.file import from_plain
from dynabench.kubernetes.manifests import manifests
from dynabench.kubernetes.settings import ClusterConfig
from dynabench.planner import __main__ as planner
from serving.cli import commands
from tests.kubernetes.schemas import CUSTOM, KUSTOMIZATION, resource

APPS = {
    "serving.frontend": commands.frontend_app,
    "serving.mocker": commands.mocker_app,
    "serving.echo": commands.echo_app,
    "serving.router_service": commands.router_app,
    "serving.kv_store": commands.store_app,
    "dynabench.planner": planner.app,
    **{f"serving.{entry.command}": commands.engine_app(name) for name, entry in commands.ENGINES.items()},
}
VERSIONS = ("1.36", "1.37")


def files(text, contents=None, **settings):
    """Return what is written for a deployment in YAML, by file."""
    return manifests(from_plain(yaml.safe_load(text)), ClusterConfig(**settings), contents or {})


def objects(text, contents=None, **settings):
    """Return all objects but the kustomization."""
    found = files(text, contents, **settings)
    return [each for name, held in found.items() if name != "kustomization.yaml" for each in held]


def of_kind(found, *kinds):
    return [each for each in found if each["kind"] in kinds]


def named(found, kind, name):
    [one] = [each for each in of_kind(found, kind) if each["metadata"]["name"] == name]
    return one


def pods(found):
    """Return the pods of all workloads and graphs, by name: (labels, specification)."""
    held = {}
    for each in of_kind(found, "Deployment", "StatefulSet"):
        template = each["spec"]["template"]
        held[each["metadata"]["name"]] = template["metadata"]["labels"], template["spec"]
    for graph in of_kind(found, "DynamoGraphDeployment"):
        for name, service in graph["spec"].get("services", {}).items():
            extra = dict(service["extraPodSpec"])
            container = {"name": "main", **extra.pop("mainContainer")}
            probes = {key: service[key] for key in ("livenessProbe", "readinessProbe")}
            held[name] = service["labels"], {**extra, "containers": [container | probes]}
        for component in graph["spec"].get("components", []):
            template = component["podTemplate"]
            held[component["name"]] = template["metadata"]["labels"], template["spec"]
    return held


def annotations(found, name):
    """Return the annotations of pods."""
    for each in of_kind(found, "Deployment"):
        if each["metadata"]["name"] == name:
            return each["spec"]["template"]["metadata"].get("annotations", {})
    [graph] = of_kind(found, "DynamoGraphDeployment")
    services = graph["spec"].get("services", {})
    templates = {one["name"]: one["podTemplate"]["metadata"] for one in graph["spec"].get("components", [])}
    templates |= {each: service["extraPodMetadata"] for each, service in services.items()}
    return templates[name].get("annotations", {})


def container(found, name):
    [main] = pods(found)[name][1]["containers"]
    return main


def environment(main):
    return {each["name"]: each.get("value") for each in main["env"]}


def validate(found):
    """Check every object, and the pods within custom ones, as strictly as a cluster or more so."""
    for each in found:
        custom = CUSTOM.get((each["apiVersion"], each["kind"]))
        if custom is not None:
            jsonschema.validate(each, resource(each["apiVersion"], each["kind"], custom))
        elif each["kind"] == "Kustomization":
            jsonschema.validate(each, KUSTOMIZATION)
        else:
            for version in VERSIONS:
                kubernetes_validate.validate(each, version, strict=True)
    for name, (labels, pod) in pods(found).items():
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": pod}
        kubernetes_validate.validate(whole, VERSIONS[-1], strict=True)


def expanded(text, variables):
    """Return a text as Kubernetes puts variables into it."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda hit: "$" if hit[0] == "$$" else variables.get(hit[1], hit[0]), text)


def parsed(main, ip="10.0.0.7"):
    """Return what the command line of a container's process makes of its arguments."""
    assert main["command"] == ["python"]
    dash, module, *words = (expanded(word, {"POD_IP": ip}) for word in main["args"])
    assert dash == "-m"
    words, arguments = commands.split_arguments(words)
    _, bound, _ = APPS[module].parse_args(words, exit_on_error=False, print_error=False)
    return bound.arguments | ({"arguments": arguments} if arguments else {})
