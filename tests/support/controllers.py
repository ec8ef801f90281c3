"""What makes pods of Deployments in the small cluster, runs processes in them, and says which are ready."""

import asyncio
import contextlib
import signal

from serving.runtime.kubernetes.names import APP, APP_NAME, DELETION_COST
from tests.support.cluster import endpoint_slice, pod, stamp


class Controllers:
    """The controllers of Deployments and of EndpointSlices, and a kubelet."""

    def __init__(self, cluster, start=None):
        """`start` returns a process for a pod; without it pods have none, and `make_ready` makes them ready."""
        self.quota = 1000
        self.grace_s = 0.05
        self._cluster = cluster
        self._start = start
        self._processes = {}
        self._running = {}
        self._number = 0
        cluster.on_change = self._on_change
        cluster.is_ending = self._is_ending

    def close(self):
        """End every process, as a node that is lost."""
        self._cluster.do(self._stop)
        for process in self._processes.values():
            process.kill()
            process.wait()

    # What tests do.

    def deploy(self, name, pool, replicas, instance="dynamo"):
        """Make a Deployment of a pool's workers."""
        labels = {APP: APP_NAME, "app.kubernetes.io/instance": instance, "dynabench.io/pool": pool}
        template = {"metadata": {"labels": labels}, "spec": pod("x")["spec"]}
        spec = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}
        return self._cluster.put("deployments", {"metadata": {"name": name, "labels": labels}, "spec": spec})

    def pods_of(self, name):
        return self._cluster.do(lambda: [each["metadata"]["name"] for each in self._pods(name)])

    def make_ready(self, name, is_ready=True):
        self._cluster.do(self._set_ready, name, is_ready)

    def replicas(self, name):
        return self._cluster.find("deployments", name)["spec"]["replicas"]

    # In the cluster's loop.

    def _stop(self):
        self._cluster.on_change = lambda *_: None
        for task in self._running.values():
            task.cancel()

    def _on_change(self, resource, name):
        if resource == "deployments" and self._cluster.objects.get((resource, name)):
            asyncio.get_running_loop().call_soon(self._reconcile, name)
        if resource == "pods":
            asyncio.get_running_loop().call_soon(self._write_slice)
        if resource == "configmaps":
            asyncio.get_running_loop().call_soon(self._probe)

    def _pods(self, deployment):
        found = self._cluster.objects.get(("deployments", deployment))
        uid = found["metadata"]["uid"] if found else ""
        return [
            each
            for (kind, _), each in self._cluster.objects.items()
            if kind == "pods"
            and any(owner["uid"] == uid for owner in each["metadata"].get("ownerReferences", ()))
            and "deletionTimestamp" not in each["metadata"]
        ]

    def _reconcile(self, name):
        deployment = self._cluster.objects.get(("deployments", name))
        if deployment is None:
            return
        pods, wanted = self._pods(name), deployment["spec"]["replicas"]
        for each in sorted(pods, key=_rank)[: max(len(pods) - wanted, 0)]:
            self._end(each)
        missing = wanted - len(pods)
        for _ in range(min(missing, self.quota - len(pods))):
            self._make(deployment)
        conditions = []
        if wanted > max(self.quota, len(pods)):
            conditions = [{"type": "ReplicaFailure", "status": "True", "message": f"exceeded quota: {self.quota} pods"}]
        status = {"replicas": min(wanted, self.quota), "conditions": conditions}
        if deployment.get("status") != status:
            self._cluster.write("deployments", deployment | {"status": status})

    def _make(self, deployment):
        self._number += 1
        name, template = f"{deployment['metadata']['name']}-{self._number}", deployment["spec"]["template"]
        owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "d", "uid": deployment["metadata"]["uid"]}
        metadata = {"name": name, "labels": template["metadata"]["labels"], "ownerReferences": [owner]}
        made = self._cluster.write("pods", {"metadata": metadata, "spec": template["spec"], "status": {}})
        if self._start is not None:
            self._running[name] = asyncio.get_running_loop().create_task(self._run(made))

    def _end(self, each):
        name = each["metadata"]["name"]
        metadata = each["metadata"] | {"deletionTimestamp": stamp()}
        self._cluster.write("pods", each | {"metadata": metadata})
        if name in self._processes:
            self._processes[name].send_signal(signal.SIGTERM)  # `_run` sees its end
        elif self._start is None:
            asyncio.get_running_loop().call_later(self.grace_s, self._erase, name)

    def _is_ending(self, each):
        self._end(each)
        return True

    def _erase(self, name):
        if ("pods", name) in self._cluster.objects:
            self._cluster.erase("pods", name)

    async def _run(self, made):
        """Run a pod's process until the pod is to end; start it again if it ends by itself."""
        name, restarts = made["metadata"]["name"], 0
        while True:
            process = self._processes[name] = self._start(made)
            while process.poll() is None:
                await asyncio.sleep(0.02)
            if "deletionTimestamp" in self._cluster.objects["pods", name]["metadata"]:
                self._processes.pop(name)
                self._erase(name)
                return
            restarts += 1
            self._set_ready(name, False, restarts)

    def _probe(self):
        """Make pods ready that serve: the test's readiness probe."""
        for (kind, name), each in list(self._cluster.objects.items()):
            if kind == "pods" and name in self._running and not _is_ready(each):
                uid = each["metadata"]["uid"]
                if any('"v1/instances/' in text for text in self._registered(uid)):
                    self._set_ready(name, True)

    def _registered(self, uid):
        for (kind, _), held in self._cluster.objects.items():
            if kind == "configmaps" and any(
                owner["uid"] == uid for owner in held["metadata"].get("ownerReferences", ())
            ):
                yield held.get("data", {}).get("keys", "")

    def _set_ready(self, name, is_ready, restarts=0):
        each = self._cluster.objects["pods", name]
        condition = {"type": "Ready", "status": str(is_ready), "lastTransitionTime": stamp()}
        container = {"name": "main", "image": "x", "imageID": "x", "ready": is_ready, "restartCount": restarts}
        status = {"phase": "Running", "conditions": [condition], "containerStatuses": [container]}
        self._cluster.write("pods", each | {"status": status})

    def _write_slice(self):
        pods = [
            (each, _is_ready(each) and "deletionTimestamp" not in each["metadata"], _is_ready(each))
            for (kind, _), each in self._cluster.objects.items()
            if kind == "pods" and each["metadata"].get("labels", {}).get(APP) == APP_NAME
        ]
        fresh = endpoint_slice("workers-1", *pods)
        held = self._cluster.objects.get(("endpointslices", "workers-1"), {})
        if held.get("endpoints") != fresh["endpoints"]:
            self._cluster.write("endpointslices", fresh)


def _is_ready(each):
    return any(
        condition["type"] == "Ready" and condition["status"] == "True"
        for condition in each.get("status", {}).get("conditions", ())
    )


def _rank(each):
    """Return which pod Kubernetes deletes first: one that is not ready, one of low cost, the newest."""
    cost = int((each["metadata"].get("annotations") or {}).get(DELETION_COST, "0"))
    return _is_ready(each), cost, -int(each["metadata"]["name"].rpartition("-")[2])


@contextlib.contextmanager
def controlled(cluster, start=None):
    controllers = Controllers(cluster, start)
    try:
        yield controllers
    finally:
        controllers.close()
