"""Containers as they are written, run as processes whose addresses differ: what a cluster would start works together."""

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass

import httpx

from tests.kubernetes.cluster import expanded, objects, pods
from tests.support.servers import Etcd, free_port
from tests.support.waiting import PATIENCE_S, until

APART = """
router_mode: kv
frontend: {{http_port: {port}}}
pools:
  prefill: {{role: prefill, speedup_ratio: 100, block_size: 16}}
  decode: {{role: decode, speedup_ratio: 100, block_size: 16}}
kv_transfer: {{transfer: tcp, kv_bytes_scale: 0.001}}
"""
ROUTED = """
router_mode: kv
standalone_router: true
frontend: {{http_port: {port}}}
pools: {{worker: {{speedup_ratio: 100}}, other: {{speedup_ratio: 100}}}}
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
def running(text, tmp_path, port):
    """Run the containers of a deployment, each at an address of its own, until the block ends."""
    with Etcd() as etcd, contextlib.ExitStack() as stack:
        held = pods(objects(text.format(port=port), discovery="etcd"))
        mains = {name: pod["containers"][0] for name, (_, pod) in held.items() if name != "dynamo-etcd"}
        addresses = {name: f"127.0.0.{number}" for number, name in enumerate(mains, 2)}
        started = {}
        for name, main in mains.items():
            variables = {"POD_IP": addresses[name]}
            words = [expanded(word, variables) for word in main["args"]]
            for other, address in addresses.items():
                words = [word.replace(f"={other}:", f"={address}:") for word in words]
            probes = free_port()
            fields = {"status.podIP": addresses[name]}
            given = {
                each["name"]: each["value"]
                if "value" in each
                else fields.get(each["valueFrom"]["fieldRef"]["fieldPath"], name)
                for each in main["env"]
            }
            given |= {"ETCD_ENDPOINTS": etcd.url, "DYN_SYSTEM_PORT": str(probes), "HOME": str(tmp_path)}
            clean = {key: value for key, value in os.environ.items() if not key.startswith(("DYN_", "ETCD_", "NATS_"))}
            log = stack.enter_context((tmp_path / f"{name}.log").open("wb"))
            process = subprocess.Popen([sys.executable, *words], env=clean | given, stdout=log, stderr=log)
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


def test_prefill_and_decode_pods_hand_requests_and_kv_over_by_their_addresses(tmp_path):
    port = free_port()
    with running(APART, tmp_path, port) as started:
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
