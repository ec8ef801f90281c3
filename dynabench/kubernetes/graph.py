"""Write a deployment as a DynamoGraphDeployment, for clusters with NVIDIA Dynamo's operator.

v1alpha1   spec.services, by name: componentType, subComponentType, resources,
           extraPodSpec with the container as mainContainer
v1beta1    spec.components, a list: name, type, podTemplate with the container `main`
"""

from collections.abc import Mapping

from dynabench.kubernetes.components import ClusterComponent
from dynabench.kubernetes.objects import Manifest
from dynabench.kubernetes.pods import GPU
from dynabench.kubernetes.settings import Form

GROUP = "nvidia.com"
MOST = 25
"""The most components that a graph may have."""


def graph_of(
    form: Form,
    metadata: Manifest,
    components: list[ClusterComponent],
    pods: Mapping[str, Manifest],
    pod_metadata: Mapping[str, Manifest],
) -> Manifest:
    """Return the graph of some components.

    Raises:
        ValueError: there are too many components.
    """
    if len(components) > MOST:
        raise ValueError(
            f"form is {form!r} and the deployment has {len(components)} components; expected at most {MOST}"
        )
    version = form.removeprefix("dynamo-")
    if version == "v1alpha1":
        services = {each.name: _service(each, pods[each.name], pod_metadata[each.name]) for each in components}
        spec: Manifest = {"services": services}
    else:
        spec = {"components": [_component(each, pods[each.name], pod_metadata[each.name]) for each in components]}
    return {"apiVersion": f"{GROUP}/{version}", "kind": "DynamoGraphDeployment", "metadata": metadata, "spec": spec}


def _service(component: ClusterComponent, pod: Manifest, metadata: Manifest) -> Manifest:
    """Return a component in v1alpha1 form, with resources and probes outside the pod specification."""
    [main] = pod["containers"]
    container = {
        key: value for key, value in main.items() if key not in ("name", "resources", "livenessProbe", "readinessProbe")
    }
    role = {"subComponentType": component.role} if component.role in ("prefill", "decode") else {}
    return {
        "componentType": component.kind if component.kind in ("frontend", "worker") else "main",
        **role,
        "replicas": component.replicas,
        "labels": metadata["labels"],
        "extraPodMetadata": metadata,
        "resources": {name: _item(amounts) for name, amounts in main["resources"].items()},
        "livenessProbe": main["livenessProbe"],
        "readinessProbe": main["readinessProbe"],
        "extraPodSpec": {
            **{key: value for key, value in pod.items() if key != "containers"},
            "mainContainer": container,
        },
    }


def _item(amounts: Mapping[str, str]) -> dict[str, str]:
    return {"gpu" if name == GPU else name: amount for name, amount in amounts.items()}


def _component(component: ClusterComponent, pod: Manifest, metadata: Manifest) -> Manifest:
    kind = component.role if component.role in ("prefill", "decode") else component.kind
    return {
        "name": component.name,
        **({"type": kind} if kind in ("frontend", "worker", "prefill", "decode") else {}),
        "replicas": component.replicas,
        "podTemplate": {"metadata": metadata, "spec": pod},
    }
