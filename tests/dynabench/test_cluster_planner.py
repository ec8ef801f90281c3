"""A planner in a Kubernetes cluster, with real frontends, planners and workers, and a small server in place of the cluster's.

The long ones load a stack for many of the planner's intervals; tests/dynabench/test_cluster_hands.py tests the same hands without
processes, and tests/dynabench/test_live_planner.py loads one stack in every run.
"""

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import yaml

from serving.runtime.kubernetes.access import discovery, scaling
from tests.dynabench.test_live_planner import Served
from tests.support import warm
from tests.support.cluster import Cluster
from tests.support.commands import run
from tests.support.controllers import controlled
from tests.support.servers import free_port
from tests.support.waiting import PATIENCE_S, instances, until

ENGINE = {"num_gpu_blocks": 200, "block_size": 16, "timing": "constant", "constant_decode_ms": 20}
PLANNER = {"planner": "dynamo-load", "planner_interval_s": 0.3, "max_replicas": 2}
DEPLOYMENT = {"name": "chat", "pools": {"worker": ENGINE}, "planner": PLANNER}
FLAGS = [word for name, value in ENGINE.items() for word in (f"--{name.replace('_', '-')}", str(value))]


class Deployed(Served):
    """A frontend, a planner and the pods of one pool."""

    def __init__(self, cluster, controllers, folder, url):
        super().__init__(None, folder / "log", url, "mock")
        self.cluster = cluster
        self.controllers = controllers
        self.processes = []
        self.file = folder / "chat.yaml"

    def until(self, condition, *, patience_s=PATIENCE_S):
        return until(condition, patience_s=patience_s)

    def start(self, pod, *command):
        """Start a process in a pod."""
        made = self.cluster.pod(pod)
        process = self._start(made, *command)
        self.processes.append(process)
        return process

    def plan(self, *flags, pod="planner"):
        hands = ["-m", "dynabench.planner", "--hands", "kubernetes"]
        return self.start(pod, *hands, "--deployment", self.file, "--url", self.url, *flags)

    def work(self, pod):
        """Start a worker in a pod, as its container does."""
        return self._start(pod, "-m", "serving.mocker", "--endpoint", "dyn://chat.backend.generate", *FLAGS, "-v")

    def _start(self, pod, *command):
        environment = os.environ | self.cluster.environment(pod) | {"ETCD_LEASE_TTL": str(self.lease_s)}
        with self._log.open("a") as log:
            return warm.start([sys.executable, *map(str, command)], env=environment, stdout=log, stderr=log)

    def close(self):
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


@contextmanager
def deployed(tmp_path, lease_s=5):
    """Give a deployment of one worker; the cluster allows what our roles do."""
    port = free_port()
    with Cluster(rules=[*discovery(), *scaling(["chat-worker"])]) as cluster:
        with controlled(cluster, lambda pod: served.work(pod)) as controllers:
            served = Deployed(cluster, controllers, tmp_path, f"http://127.0.0.1:{port}")
            served.lease_s = lease_s
            served.file.write_text(yaml.safe_dump(DEPLOYMENT))
            try:
                frontend = ["-m", "serving.frontend", "--namespace", "chat", "--http-port", port]
                served.start("frontend", *frontend, "--max-queue-depth", "none", "--router-mode", "round-robin")
                controllers.deploy("chat-worker", "worker", 1, instance="chat")
                served.wait_for(1)
                yield served
            finally:
                served.close()
        assert not cluster.invalid
    assert "Traceback" not in served.log, served.log


@pytest.mark.long
def test_pods_come_under_load_and_leave_after_it_without_losing_a_token(tmp_path):
    prompts = ("a" * 300, "b" * 300)
    with deployed(tmp_path) as served, ThreadPoolExecutor() as asking:
        served.plan()
        served.until_says("planning worker with dynamo-load")
        with served.load():
            served.wait_for(2)
            assert len(served.controllers.pods_of("chat-worker")) == 2
            answers = [asking.submit(served.ask, prompt, 300) for prompt in prompts]  # one goes to each
            served.until(lambda: served.num_inflight() == 5)
        served.wait_for(1)
        texts = [answer.result() for answer in answers]
        assert texts == [served.ask(prompt, 300) for prompt in prompts]
        served.until(lambda: len(served.cluster.names("pods")) == 3)  # frontend, planner, worker
        served.until_says("worker: 2 -> 1 workers (KV usage of all ranks is at most ")
    assert "worker: 1 -> 2 workers (KV usage of a rank is " in served.log


@pytest.mark.long
def test_an_advisory_planner_logs_what_it_would_do_and_changes_nothing(tmp_path):
    with deployed(tmp_path) as served:
        served.plan("--advisory")
        served.until_says("planning worker with dynamo-load")
        with served.load():
            served.until_says(": worker: 1 -> 2 (KV usage of a rank is ", 3)
            served.until_says(": advice ")
            assert served.controllers.replicas("chat-worker") == 1
        assert not [verb for verb, _, resource, _ in served.cluster.calls if resource == "deployments/scale"]


@pytest.mark.long
def test_a_planner_that_hangs_is_replaced_and_not_obeyed_when_it_wakes_up(tmp_path):
    with deployed(tmp_path) as served:
        first = served.plan()
        served.until_says("planning worker with dynamo-load")
        served.plan(pod="planner-2")
        served.until_says("another planner is running in chat; this one waits until it stops")
        first.send_signal(signal.SIGSTOP)
        served.until_says("planning worker with dynamo-load", 2)
        with served.load():
            served.wait_for(2)
            first.send_signal(signal.SIGCONT)
            served.until_says("another planner is running in chat; this one waits until it stops", 2)
            assert len(instances(served.url)) == 2


def test_a_worker_that_is_killed_is_gone_long_before_its_lease_and_back_once_its_container_is(tmp_path):
    with deployed(tmp_path, lease_s=3600) as served:
        [before] = instances(served.url)
        [process] = served.controllers._processes.values()
        process.kill()
        served.until(lambda: before not in instances(served.url))
        served.until(lambda: [id for id in instances(served.url) if id != before])


def test_one_pool_scaled_by_two_is_refused_in_one_line(tmp_path):
    with deployed(tmp_path) as served:
        target = {"kind": "Deployment", "name": "chat-worker", "apiVersion": "apps/v1"}
        spec = {"maxReplicas": 9, "scaleTargetRef": target}
        served.cluster.put("horizontalpodautoscalers", {"metadata": {"name": "old"}, "spec": spec})
        assert served.plan().wait(PATIENCE_S) == 2
        assert "dynabench.planner: HorizontalPodAutoscaler old also scales chat-worker; expected either" in served.log


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set; expected a pod in a cluster"),
        (
            {"planner": {"planner": "static"}},
            "planner.planner is 'static'; expected one that changes the number of workers",
        ),
        ({"pools": {"worker": {"engine": "echo_core"}}}, "expected 'mocker': a planner cannot start and stop other"),
    ],
)
def test_a_planner_that_cannot_plan_is_refused_in_one_line(tmp_path, changed, message):
    file = tmp_path / "chat.yaml"
    file.write_text(yaml.safe_dump(DEPLOYMENT | changed))
    environment = {"DYN_DISCOVERY_DIR": str(tmp_path / "d"), "KUBERNETES_SERVICE_HOST": ""}
    command = [sys.executable, "-m", "dynabench.planner", "--hands", "kubernetes", "--deployment", file]
    done = run(*command, env=environment)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
