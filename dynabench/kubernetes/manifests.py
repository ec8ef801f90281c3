"""Render a deployment as the files of a kustomization: each has a name and objects.

access.yaml             accounts, roles and role bindings
etcd.yaml, nats.yaml    servers, if requested
files.yaml              ConfigMaps with files of this machine
frontend.yaml, router.yaml, kv-store.yaml, planner.yaml
pool-NAME.yaml          workers: Deployment, Service, disruption budget, and autoscaler
network.yaml            network policies
monitor.yaml            what Prometheus scrapes, if requested
graph.yaml              a DynamoGraphDeployment, which replaces the components
kustomization.yaml      lists all of these
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import PurePosixPath

import yaml

from dynabench.deployment.description import Deployment
from dynabench.deployment.file import as_plain
from dynabench.kubernetes import access, names, servers
from dynabench.kubernetes.components import ClusterComponent, components_of, labels_of, selector_of
from dynabench.kubernetes.contract import (
    API_KEY,
    BACKEND,
    COMPONENT,
    ETCD_PASSWORD,
    FILES_DIGEST,
    NATS_PASSWORD,
    NATS_TOKEN,
    ours,
)
from dynabench.kubernetes.graph import graph_of
from dynabench.kubernetes.names import check_names
from dynabench.kubernetes.objects import Manifest, digits
from dynabench.kubernetes.pods import pod_of
from dynabench.kubernetes.policies import policies
from dynabench.kubernetes.scaling import autoscaler_of, scaler_of
from dynabench.kubernetes.settings import Autoscaler, ClusterConfig
from serving.runtime.config import RuntimeConfig, masked
from serving.runtime.kubernetes.access import Rule, discovery, scaling
from serving.runtime.kubernetes.names import TOKEN_SECRET_VARIABLE, deployment_of

Files = dict[str, list[Manifest]]

KUSTOMIZATION = "kustomization.yaml"
MOST_BYTES = 1_000_000
"""Approximate size limit of a ConfigMap."""

LOCAL = ("etcd_ca", "etcd_client_cert", "etcd_client_key", "nats_ca", "nats_credentials", "discovery_dir")
"""Network settings that are files on one host."""

SECRETS = {
    "etcd_password": ETCD_PASSWORD,
    "nats_password": NATS_PASSWORD,
    "nats_token": NATS_TOKEN,
}
"""Network settings that no manifest may contain, and the variables that a Secret sets instead."""


def manifests(deployment: Deployment, config: ClusterConfig, contents: Mapping[str, bytes]) -> Files:
    """Return the files of a deployment, by name.

    Args:
        deployment: the deployment.
        config: how to put it into the cluster.
        contents: contents of the local files that it names, by path.

    Raises:
        ValueError: it cannot run in a cluster; the message says why.
    """
    check_names(deployment, config)
    _check_secrets(deployment, config)
    if config.monitor == "service" and config.form != "manifests":
        raise ValueError(
            f"monitor is 'service' and form {config.form!r}; expected 'pod': Dynamo's operator makes the Services, without our labels"
        )
    runtime = deployment.runtime or RuntimeConfig()
    kind = autoscaler_of(deployment, config)
    components = components_of(deployment, config, runtime, has_planner=kind == "planner")
    writer = _Writer(deployment, config, runtime, kind, contents)
    found: Files = {"access.yaml": writer.access(), "network.yaml": policies(deployment.name, config.namespace)}
    if config.discovery == "etcd":
        found["etcd.yaml"] = servers.etcd(deployment.name, config.namespace)
    if config.nats:
        found["nats.yaml"] = servers.nats(deployment.name, config.namespace, config.secret)
    if carried := writer.carried(components):
        found["files.yaml"] = carried
    if config.form == "manifests":
        for component in components:
            prefix = "pool-" if component.is_worker else ""
            found[f"{prefix}{component.name}.yaml"] = writer.component(component)
    else:
        found["graph.yaml"] = [writer.graph(components)]
    if config.monitor != "none":
        found["monitor.yaml"] = writer.monitor()
    return found | {KUSTOMIZATION: [_kustomization(config, sorted(found))]}


def _kustomization(config: ClusterConfig, files: list[str]) -> Manifest:
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": config.namespace,
        "resources": files,
    }


def _check_secrets(deployment: Deployment, config: ClusterConfig) -> None:
    """Refuse settings that a manifest may not, or cannot, contain."""
    given = {"frontend.api_key": (deployment.frontend.api_key, API_KEY)}
    if deployment.runtime is not None:
        given |= {f"runtime.{name}": (getattr(deployment.runtime, name), key) for name, key in SECRETS.items()}
        for name in LOCAL:
            if path := getattr(deployment.runtime, name):
                raise ValueError(
                    f"runtime.{name} is {path!r}; expected none in a cluster: pods cannot see files on this machine"
                )
        for name in ("etcd_endpoints", "nats_server"):
            if masked(address := getattr(deployment.runtime, name)) != address:
                raise ValueError(
                    f"runtime.{name} is {masked(address)!r}; expected no password in it: manifests are not secret; "
                    "put it in a Secret and name that with --secret"
                )
        if config.discovery and deployment.runtime.etcd_endpoints:
            raise ValueError(
                f"discovery is {config.discovery!r}, but the file also names etcd servers in runtime.etcd_endpoints; "
                "expected only one of them"
            )
        if config.nats and deployment.runtime.nats_server:
            raise ValueError(
                "nats is true, but the file also names a NATS server in runtime.nats_server; expected only one of them"
            )
    if config.nats and not config.secret:
        raise ValueError(
            f"nats is true, but no Secret is named; expected --secret with a Secret that contains {NATS_TOKEN}"
        )
    for path, (value, key) in given.items():
        if value and not config.secret:
            raise ValueError(
                f"{path} is secret, but manifests are not; expected --secret with a Secret that contains it as {key}"
            )


class _Writer:
    """Makes the objects of one deployment."""

    def __init__(
        self,
        deployment: Deployment,
        config: ClusterConfig,
        runtime: RuntimeConfig,
        kind: Autoscaler,
        contents: Mapping[str, bytes],
    ) -> None:
        self._deployment = deployment
        self._config = config
        self._runtime = runtime
        self._autoscaler = kind
        self._contents = contents

    @property
    def _uses_cluster(self) -> bool:
        """Whether processes discover each other through Kubernetes' own objects."""
        return self._config.discovery == "kubernetes" or not (self._config.discovery or self._runtime.etcd_endpoints)

    @property
    def _network(self) -> dict[str, str]:
        """Return the environment variables for discovery."""
        name = self._deployment.name
        found: dict[str, str] = {}
        if self._uses_cluster:
            found |= {BACKEND: "kubernetes", TOKEN_SECRET_VARIABLE: self._name(names.TOKEN)}
        else:
            own = f"http://{name}-{names.ETCD}:{servers.ETCD_PORT}"
            found[BACKEND] = "auto"
            found["ETCD_ENDPOINTS"] = self._runtime.etcd_endpoints or own
            if self._runtime.etcd_username:
                found["ETCD_AUTH_USERNAME"] = self._runtime.etcd_username
        if self._config.nats or self._runtime.nats_server:
            own = f"nats://{name}-{names.NATS}:{servers.NATS_PORT}"
            found["NATS_SERVER"] = self._runtime.nats_server or own
            if self._runtime.nats_username:
                found["NATS_AUTH_USERNAME"] = self._runtime.nats_username
        return found | {"ETCD_LEASE_TTL": digits(self._runtime.lease_ttl_s)}

    def _secrets(self, component: ClusterComponent) -> dict[str, bool]:
        """Return the Secret keys that a component's processes need, and whether each is required."""
        if not self._config.secret:
            return {}
        found = {}
        if component.kind in (names.FRONTEND, names.PLANNER):  # a planner reads the frontends' metrics
            found[API_KEY] = True
        found |= {
            key: bool(getattr(self._runtime, name))
            for name, key in SECRETS.items()
            if getattr(self._runtime, "etcd_endpoints" if name.startswith("etcd") else "nats_server")
        }
        if self._config.nats:
            found[NATS_TOKEN] = True
        return found

    @property
    def _is_scaled(self) -> bool:
        """Whether something changes the number of workers; an advisory planner does not."""
        return self._autoscaler != "none" and not (self._autoscaler == "planner" and self._deployment.planner.advisory)

    def access(self) -> list[Manifest]:
        token = self._name(names.TOKEN)
        rules = discovery(token) if self._uses_cluster else ()
        where = {"deployment": self._deployment.name, "namespace": self._config.namespace}
        found = [access.token_secret(token, **where)] if self._uses_cluster else []
        found += access.account(self._deployment.name, rules, **where)
        if self._autoscaler == "planner":
            pools = [deployment_of(self._deployment.name, pool.name) for pool in self._deployment.pools]
            needed = scaling(pools) if self._is_scaled else map(_looking, scaling(pools))
            found += access.account(self._name(names.PLANNER), (*rules, *needed), **where)
        return found

    def carried(self, components: list[ClusterComponent]) -> list[Manifest]:
        """Return ConfigMaps with the files that components read."""
        return [
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": self._metadata(self._files(component), component),
                **self._data(component),
            }
            for component in components
            if component.files
        ]

    def _data(self, component: ClusterComponent) -> Manifest:
        """Return the files that a component reads, as a ConfigMap contains them."""
        # Discovery is configured in the environment.
        described = yaml.safe_dump(as_plain(replace(self._deployment, runtime=None)), sort_keys=False).encode()
        data = {
            PurePosixPath(path).name: described if component.kind == names.PLANNER else self._contents[path]
            for path in component.files
        }
        if len(data) < len(component.files):
            raise ValueError(f"pools.{component.name} uses two files with the same name; expected different names")
        if (size := sum(map(len, data.values()))) > MOST_BYTES:
            raise ValueError(
                f"{', '.join(component.files)} of pools.{component.name} have {size:,} bytes; expected at most {MOST_BYTES:,}, "
                "the limit of a ConfigMap"
            )
        return _as_data(data)

    def _pod_metadata(self, component: ClusterComponent) -> Manifest:
        """Return labels, and a digest of the files: pods read files only once, so changed files need new pods."""
        found: Manifest = {"labels": labels_of(self._deployment.name, component)}
        if component.files:
            digest = sha256(json.dumps(self._data(component), sort_keys=True).encode()).hexdigest()
            found["annotations"] = {FILES_DIGEST: digest[:16]}
        return found

    def component(self, component: ClusterComponent) -> list[Manifest]:
        """Return the objects that run a component, make it reachable and limit its disruption."""
        name = self._name(component.name)
        metadata, selector = self._metadata(name, component), selector_of(self._deployment.name, component)
        is_scaled = component.is_worker and self._is_scaled
        spec: Manifest = {
            **({} if is_scaled else {"replicas": component.replicas}),  # applying it again would undo the scaling
            "selector": {"matchLabels": selector},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            # A change counts as failed only after twice the time that a pod may take to start.
            "progressDeadlineSeconds": 600 + 2 * int(component.startup_s),
            "template": {"metadata": self._pod_metadata(component), "spec": self._pod(component)},
        }
        if component.kind in (names.STORE, names.PLANNER):  # there must never be two
            spec["strategy"] = {"type": "Recreate"}
        budget = {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": selector},
        }
        return [
            {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec},
            self._service(component, metadata, selector),
            {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata, "spec": budget},
            *(self._scaler(component, metadata) if is_scaled else []),
        ]

    def graph(self, components: list[ClusterComponent]) -> Manifest:
        pods = {component.name: self._pod(component) for component in components}
        pod_metadata = {component.name: self._pod_metadata(component) for component in components}
        name = self._deployment.name
        metadata = {"name": name, "namespace": self._config.namespace, "labels": ours(name)}
        return graph_of(self._config.form, metadata, components, pods, pod_metadata)

    def monitor(self) -> list[Manifest]:
        """Return what Prometheus scrapes: the frontends, which report every worker."""
        labels = ours(self._deployment.name)
        selector = {"matchLabels": labels | {COMPONENT: names.FRONTEND}}
        endpoint: Manifest = {"port": "http", "path": "/metrics", "interval": "15s", "honorLabels": True}
        if secret := self._config.secret:
            endpoint["authorization"] = {"credentials": {"name": secret, "key": API_KEY}}
        metadata = {"name": self._name(names.FRONTEND), "namespace": self._config.namespace, "labels": labels}
        is_pod = self._config.monitor == "pod"
        spec = {"selector": selector, "podMetricsEndpoints" if is_pod else "endpoints": [endpoint]}
        kind = "PodMonitor" if is_pod else "ServiceMonitor"
        return [{"apiVersion": "monitoring.coreos.com/v1", "kind": kind, "metadata": metadata, "spec": spec}]

    def _service(self, component: ClusterComponent, metadata: Manifest, selector: dict[str, str]) -> Manifest:
        """Return the Service of a component; it has no address for workers, because each is called individually."""
        ports = [{"name": name, "port": port, "targetPort": name} for name, port in component.ports.items()]
        spec: Manifest = {"selector": selector, "ports": ports}
        if component.is_worker:
            spec = {"clusterIP": "None", **spec}
        return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}

    def _scaler(self, component: ClusterComponent, metadata: Manifest) -> list[Manifest]:
        pool = self._deployment.pool(component.name)
        return scaler_of(self._deployment, self._config, pool, self._autoscaler, metadata)

    def _pod(self, component: ClusterComponent) -> Manifest:
        is_planner = component.kind == names.PLANNER
        account = self._name(names.PLANNER) if is_planner else self._deployment.name
        return pod_of(
            component,
            self._config,
            self._network,
            self._secrets(component),
            account=account,
            files=self._files(component),
            labels=selector_of(self._deployment.name, component),
        )

    def _files(self, component: ClusterComponent) -> str:
        return f"{self._name(component.name)}-files"

    def _metadata(self, name: str, component: ClusterComponent) -> Manifest:
        return {
            "name": name,
            "namespace": self._config.namespace,
            "labels": labels_of(self._deployment.name, component),
        }

    def _name(self, part: str) -> str:
        return f"{self._deployment.name}-{part}"


def _as_data(files: Mapping[str, bytes]) -> Manifest:
    """Return files as a ConfigMap contains them, with texts unchanged."""
    texts, others = {}, {}
    for name, content in files.items():
        try:
            texts[name] = content.decode()
        except UnicodeDecodeError:
            others[name] = base64.b64encode(content).decode()
    return {key: value for key, value in (("data", texts), ("binaryData", others)) if value}


def _looking(rule: Rule) -> Rule:
    """Return the read-only verbs of a rule."""
    return rule._replace(verbs=tuple(verb for verb in rule.verbs if verb in ("get", "list", "watch")))
