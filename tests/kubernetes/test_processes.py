"""Containers as they are written, run as processes whose addresses differ: what a cluster would start works together."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass

import httpx
import pytest

from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.kubernetes.access import Rule
from serving.runtime.kubernetes.names import TOKEN_SECRET
from serving.runtime.ports import RuntimeUnavailableError
from tests.kubernetes.cluster import container, expanded, objects, of_kind, pods
from tests.support import warm
from tests.support.cluster import Cluster, endpoint_slice, stamp
from tests.support.commands import BIN
from tests.support.servers import Etcd, free_port
from tests.support.waiting import PATIENCE_S, until

MOCK = "pools: {worker: {}}"
APART = """
router_mode: kv
frontend: {{http_port: {port}}}
pools:
  prefill: {{role: prefill, speedup_ratio: 100, block_size: 16}}
  decode: {{role: decode, speedup_ratio: 100, block_size: 16}}
kv_transfer: {{transfer: tcp}}
"""
ROUTED = """
router_mode: kv
standalone_router: true
frontend: {{http_port: {port}}}
pools: {{worker: {{speedup_ratio: 100}}, other: {{speedup_ratio: 100}}}}
"""
PLANNED = """
router_mode: kv
frontend: {{http_port: {port}}}
pools: {{worker: {{speedup_ratio: 100}}}}
planner: {{planner: hpa, planner_interval_s: 1}}
"""
STORED = """
router_mode: kv
frontend: {{http_port: {port}}}
pools: {{worker: {{speedup_ratio: 100, block_size: 16, kv_offloading_size: 1}}}}
kv_transfer: {{kv_bytes_scale: 0.001}}
kv_store: {{kv_store_size: 64}}
"""


@dataclass
class Pod:
    """A process that stands for a pod."""

    name: str
    address: str
    probes: int
    process: subprocess.Popen

    def asks(self, path):
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{self.probes}{path}").status_code
        return None


@contextlib.contextmanager
def in_etcd(found):
    """Give the environment of a pod by its name and address, with an etcd server for all."""
    with Etcd() as etcd:
        yield lambda name, address: {"ETCD_ENDPOINTS": etcd.url}


@contextlib.contextmanager
def in_cluster(found):
    """The same with a cluster that allows what the roles do, and holds the Deployments."""
    rules = [
        Rule(group, resource, tuple(each["verbs"]), tuple(each.get("resourceNames", ())))
        for role in of_kind(found, "Role")
        for each in role["rules"]
        for group in each["apiGroups"]
        for resource in each["resources"]
    ]
    with Cluster(rules=rules) as cluster:
        cluster.remove("secrets", TOKEN_SECRET)
        for each in of_kind(found, "Secret"):
            cluster.apply("secrets", each)
        for each in of_kind(found, "Deployment"):
            cluster.put(
                "deployments",
                {
                    "metadata": {"name": each["metadata"]["name"], "labels": each["metadata"]["labels"]},
                    "spec": each["spec"],
                },
            )

        def of_pod(name, address):
            labels = pods(found)[name][0]
            ready = {"type": "Ready", "status": "True", "lastTransitionTime": stamp()}
            status = {"phase": "Running", "conditions": [ready]}
            pod = cluster.put("pods", cluster.pod(f"{name}-0", labels) | {"status": status})
            cluster.put("endpointslices", endpoint_slice(f"{name}-0", (pod, True, True), service=name, labels=labels))
            return cluster.environment(pod) | {"POD_IP": address, "POD_NAMESPACE": cluster.namespace}

        yield of_pod
        assert not cluster.invalid


@contextlib.contextmanager
def running(text, tmp_path, port, network=in_etcd):
    """Run the containers of a deployment, each at an address of its own, until the block ends."""
    found = objects(text.format(port=port), discovery="etcd" if network is in_etcd else "kubernetes")
    with network(found) as of_pod, contextlib.ExitStack() as stack:
        mains = {name: pod["containers"][0] for name, (_, pod) in pods(found).items() if name != "dynamo-etcd"}
        addresses = {name: f"127.0.0.{number}" for number, name in enumerate(mains, 2)}
        for held in of_kind(found, "ConfigMap"):
            for name, content in held["data"].items():
                (tmp_path / name).write_text(content)
        started = {}
        for name, main in mains.items():
            words = [expanded(word, {"POD_IP": addresses[name]}) for word in main["args"]]
            words = [word.replace("/etc/dynabench", str(tmp_path)) for word in words]
            for other, address in addresses.items():
                words = [
                    word.replace(f"={other}:", f"={address}:").replace(f"//{other}:", f"//{address}:") for word in words
                ]
            probes = free_port()
            fields = {"status.podIP": addresses[name]}
            given = {
                each["name"]: each["value"]
                if "value" in each
                else fields.get(each["valueFrom"]["fieldRef"]["fieldPath"], name)
                for each in main["env"]
            }
            given |= of_pod(name, addresses[name]) | {"DYN_SYSTEM_PORT": str(probes), "HOME": os.environ["HOME"]}
            clean = {key: value for key, value in os.environ.items() if not key.startswith(("DYN_", "ETCD_", "NATS_"))}
            log = stack.enter_context((tmp_path / f"{name}.log").open("wb"))
            process = warm.start([sys.executable, *words], env=clean | given, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            started[name] = Pod(name, addresses[name], probes, process)
        try:
            for pod in started.values():
                until(lambda pod=pod: pod.asks("/health") == 200, pod.process)
            until(lambda: is_well(port))
            yield started
            for pod in started.values():
                pod.process.send_signal(signal.SIGTERM)
            for pod in started.values():
                assert pod.process.wait(timeout=PATIENCE_S) == 0, pod.name
        except AssertionError as error:
            logs = "\n".join(path.read_text()[-1500:] for path in sorted(tmp_path.glob("*.log")))
            raise AssertionError(f"{error}\n{logs}") from error


def is_well(port):
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    return False


def answer(port, prompt):
    body = {"model": "mock", "prompt": prompt, "max_tokens": 8}
    response = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    return response


def metric(port, name, **labels):
    """Return the sum of a metric's samples that have these labels."""
    lines = httpx.get(f"http://127.0.0.1:{port}/metrics").text.splitlines()
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith(name) and all(each in line for each in wanted)
    )


@pytest.mark.parametrize("network", [in_etcd, in_cluster])
def test_prefill_and_decode_pods_hand_requests_and_kv_over_by_their_addresses(tmp_path, network):
    port = free_port()
    with running(APART, tmp_path, port, network) as started:
        assert len({pod.address for pod in started.values()}) == 3
        prompt = list(range(1, 161))
        answer(port, prompt)
        # The second time the router knows from KV events what workers hold.
        until(lambda: int(answer(port, prompt).headers["x-overlap-tokens"]) == 160)
        assert metric(port, "dynamo_frontend_kv_transfer_seconds_count") >= 2
        assert metric(port, "dynamo_component_kv_transfer_failures_total") == 0


def test_pods_reach_the_kv_store_by_its_address(tmp_path):
    port = free_port()
    with running(STORED, tmp_path, port):
        answer(port, list(range(1, 161)))
        until(lambda: metric(port, "dynamo_component_kv_offload_tiering_used_bytes", tier="store") > 0)


def test_a_frontend_reaches_workers_through_a_router_pod(tmp_path):
    port = free_port()
    with running(ROUTED, tmp_path, port) as started:
        assert set(started) == {"dynamo-frontend", "dynamo-router", "dynamo-worker", "dynamo-other"}
        answer(port, list(range(1, 161)))


def test_a_planner_pod_sees_the_workers_of_its_cluster(tmp_path):
    port = free_port()
    with running(PLANNED, tmp_path, port, in_cluster):
        answer(port, list(range(1, 161)))
        until(lambda: "planning worker with hpa" in (tmp_path / "dynamo-planner.log").read_text())


@contextlib.contextmanager
def served(name, tmp_path, *flags, ports, **variables):
    """Run the etcd or NATS server of a deployment as its container does, on ports of this host."""
    main = container(objects(MOCK, discovery="etcd", nats=True, secret="keys"), name)
    words = [expanded(word, variables).replace("/data", str(tmp_path)) for word in main["args"]]
    for before, port in ports.items():
        words = [word.replace(f"{before}", f"{port}") for word in words]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([BIN / main["command"][0], *words, *flags], stdout=log, stderr=log)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def answers(url):
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url).status_code == 200
    return False


def test_nats_lets_in_who_has_the_token_and_nobody_else(tmp_path):
    port, probes = free_port(), free_port()

    async def joins(token):
        config = RuntimeConfig(
            nats_server=f"nats://127.0.0.1:{port}",
            nats_token=token,
            etcd_endpoints="",
            discovery_dir=str(tmp_path / "d"),
        )
        async with await DistributedRuntime.connect(config):
            pass

    with served("dynamo-nats", tmp_path, f"--port={port}", ports={8222: probes}, NATS_AUTH_TOKEN="right"):
        until(lambda: answers(f"http://127.0.0.1:{probes}/healthz"))
        asyncio.run(joins("right"))
        for token in ("wrong", ""):
            with pytest.raises(RuntimeUnavailableError, match="NATS does not answer"):
                asyncio.run(joins(token))


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_etcd_and_nats_are_reached_over_ipv4_and_ipv6(tmp_path, host):
    port, probes = free_port(), free_port()
    flags = (f"--listen-peer-urls=http://127.0.0.1:{free_port()}",)
    with served("dynamo-etcd", tmp_path, *flags, ports={2379: port}):
        until(lambda: answers(f"http://{host}:{port}/health"))
    with served("dynamo-nats", tmp_path, f"--port={port}", ports={8222: probes}, NATS_AUTH_TOKEN="right"):
        until(lambda: answers(f"http://{host}:{probes}/healthz"))
        with socket.create_connection((host.strip("[]"), port)):
            pass
