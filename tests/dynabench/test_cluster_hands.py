"""A planner's hands in a Kubernetes cluster: what they set, what they see, and what they say."""

import asyncio

import msgspec
import pytest
import uvloop

from dynabench.planner import cluster_hands
from dynabench.planner import pods as cluster_hands_pods
from dynabench.planner.cluster_hands import ClusterHands
from dynabench.planner.messages import Orders, ReportedFleet, WantedWorkers, fleets, orders
from serving.runtime.address import EndpointAddress, Instance
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.kubernetes import api
from serving.runtime.kubernetes.access import scaling
from serving.runtime.kubernetes.names import DELETION_COST
from tests.support.cluster import Cluster
from tests.support.controllers import controlled
from tests.support.waiting import in_time, until_async

POOLS = ("prefill", "decode")
RULES = scaling(f"dynamo-{pool}" for pool in POOLS)
ADDRESS = EndpointAddress("dynamo", "backend", "generate")


class World:
    """A deployment of two pools in a cluster, and hands that a test gives orders."""

    def __init__(self, cluster, controllers, runtime):
        self.cluster = cluster
        self.controllers = controllers
        self.runtime = runtime
        self.fleet = ReportedFleet({})
        self.number = 0
        self.wanted = {}

    def on_fleet(self, key, value):
        self.fleet = ReportedFleet({}) if value is None else msgspec.json.decode(value, type=ReportedFleet)

    def states(self, pool):
        return sorted(worker.state for worker in self.fleet.pools.get(pool, ()))

    async def order(self, term=1, fleet=None, by=None, leaving=(), **replicas):
        """Order as a planner does, whose earlier orders stand; `by` is its id, that of this process if none is given."""
        self.number += 1
        by = by or f"{self.runtime.instance_id:x}"
        wanted = self.wanted.setdefault(by, {})
        wanted |= {pool: WantedWorkers(self.number, count, "so it is", leaving) for pool, count in replicas.items()}
        given = Orders(fleet or f"{self.runtime.instance_id:x}", term, self.number, wanted)
        await self.runtime.discovery.put(f"{orders('dynamo')}{by}", msgspec.json.encode(given))

    async def grown(self, count):
        """Order so many decode workers, and return their pods once they serve."""
        await self.order(decode=count)
        await until_async(lambda: len(self.controllers.pods_of("dynamo-decode")) == count)
        pods = self.controllers.pods_of("dynamo-decode")
        for id, pod in enumerate(pods, 10):
            await self.serve(pod, id)
        return pods

    async def serve(self, pod, id):
        """Register as the worker in a pod does, and let it be ready."""
        instance = Instance(*ADDRESS, id, "tcp:127.0.0.1:1", pod)
        await self.runtime.discovery.put(instance.key, msgspec.json.encode(instance))
        self.controllers.make_ready(pod)

    def hands(self, is_advisory=False):
        return ClusterHands(
            self.runtime, POOLS, [ADDRESS], name="dynamo", namespace="dynamo", is_advisory=is_advisory
        ).at_work()

    async def until_replicas(self, **replicas):
        for pool, count in replicas.items():
            await until_async(lambda pool=pool, count=count: self.controllers.replicas(f"dynamo-{pool}") == count)


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Give what calls a test with a world; the planner's discovery is a folder, as hands need none of the cluster's."""
    monkeypatch.setattr(api, "PAUSE_S", 0.01)
    monkeypatch.setattr(cluster_hands, "AGAIN_S", 0.05)
    with Cluster() as cluster, controlled(cluster) as controllers:
        for name, value in (cluster.environment(cluster.pod("planner")) | {"DYN_DISCOVERY_BACKEND": "auto"}).items():
            monkeypatch.setenv(name, value)
        for pool in POOLS:
            controllers.deploy(f"dynamo-{pool}", pool, 1)
        config = RuntimeConfig(etcd_endpoints="", nats_server="", discovery_dir=str(tmp_path / "d"))

        def call(main):
            async def limited():
                async with in_time(), await DistributedRuntime.connect(config) as runtime:
                    made = World(cluster, controllers, runtime)
                    await runtime.discovery.watch(fleets("dynamo"), made.on_fleet)
                    await main(made)

            uvloop.run(limited())
            assert not cluster.invalid

        yield call


def autoscaler(name, deployment):
    target = {"kind": "Deployment", "name": deployment, "apiVersion": "apps/v1"}
    return {"metadata": {"name": name}, "spec": {"maxReplicas": 9, "scaleTargetRef": target}}


def test_pods_are_starting_ready_and_draining_as_the_cluster_shows_them(world):
    async def main(here):
        here.controllers.grace_s = 1.0
        async with here.hands():
            await until_async(lambda: here.states("decode") == ["starting"])
            [pod] = here.controllers.pods_of("dynamo-decode")
            here.controllers.make_ready(pod)
            await until_async(lambda: here.states("decode") == ["starting"])  # nobody can call it yet
            await here.serve(pod, 10)
            await until_async(lambda: here.states("decode") == ["ready"])
            [worker] = here.fleet.pools["decode"]
            assert (worker.name, worker.instance) == (pod, "a")
            assert worker.startup_s >= 0
            here.controllers.make_ready(pod, False)
            await until_async(lambda: here.states("decode") == ["starting"])
            await here.order(decode=2)
            await until_async(lambda: here.states("decode") == ["starting", "starting"])
            await here.order(decode=0)
            await until_async(lambda: "draining" in here.states("decode"))
            await until_async(lambda: here.states("decode") == [])

    world(main)


def test_each_pool_gets_what_is_ordered_whoever_changes_its_deployment_meanwhile(world):
    async def main(here):
        here.cluster.fail("patch", "deployments/scale", 409, times=3)
        async with here.hands():
            await here.order(prefill=2, decode=3)
            await here.until_replicas(prefill=2, decode=3)
            await here.order(decode=1)
            await here.until_replicas(prefill=2, decode=1)

    world(main)


def test_a_number_that_somebody_else_changes_meanwhile_is_read_again_before_it_is_set(world, monkeypatch, caplog):
    caplog.set_level("INFO", logger="dynabench")

    async def main(here):
        async with here.hands():
            whole = here.cluster.find("deployments", "dynamo-decode")
            get, num_asked = api.KubernetesApi.get, []

            async def asked(self, resource, kind, *names):
                found = await get(self, resource, kind, *names)
                if names[-1] == "scale" and not num_asked:
                    num_asked.append(1)
                    changed = whole | {"spec": whole["spec"] | {"replicas": 5}}
                    await asyncio.to_thread(here.cluster.put, "deployments", changed)
                return found

            monkeypatch.setattr(api.KubernetesApi, "get", asked)
            await here.order(decode=2)
            await here.until_replicas(decode=2)
            await until_async(lambda: "decode: " in caplog.text)

    world(main)
    assert "decode: 5 -> 2 workers (so it is)" in caplog.text


def test_a_pool_that_cannot_be_scaled_holds_up_no_other_and_is_said_once(world, caplog):
    async def main(here):
        here.cluster.remove("deployments", "dynamo-prefill")
        here.cluster.fail("patch", "deployments/scale", 500, times=10)
        async with here.hands():
            await here.order(prefill=2, decode=2)
            await here.until_replicas(decode=2)
            await until_async(lambda: "prefill is unchanged; trying again" in caplog.text)
            here.controllers.deploy("dynamo-prefill", "prefill", 1)
            await here.until_replicas(prefill=2)

    world(main)
    missing = "there is no Deployment dynamo-prefill in namespace here; expected one for pool prefill"
    assert caplog.text.count(missing) == 1
    assert caplog.text.count("prefill is unchanged; trying again: there is no Deployment dynamo-prefill") == 1


def test_a_role_that_does_not_let_it_scale_is_said_in_one_line(world, caplog):
    async def main(here):
        here.cluster.rules = [rule for rule in RULES if rule.resource != "deployments/scale"]
        async with here.hands():
            await here.order(decode=2)
            await until_async(lambda: "(403)" in caplog.text)
            here.cluster.rules = None
            await here.until_replicas(decode=2)

    world(main)
    assert (
        "does not let this pod get deployments/scale in namespace here (403); expected a Role that allows get on "
        "deployments/scale of API group 'apps'"
    ) in caplog.text


def test_orders_of_others_and_of_a_planner_that_has_lost_its_claim_are_not_obeyed(world):
    async def main(here):
        async with here.hands():
            await here.order(term=2, decode=2)
            await here.until_replicas(decode=2)
            await here.order(term=3, by="b", fleet="another", decode=9)
            await here.order(term=2, decode=7)  # it hung, and wakes up
            await here.order(term=4, by="c", prefill=5)  # any pod can write that
            here.wanted.clear()
            await here.order(term=5, prefill=3)
            await here.until_replicas(prefill=3)
            assert here.controllers.replicas("dynamo-decode") == 2

    world(main)


def test_each_decision_is_obeyed_once(world):
    async def main(here):
        async with here.hands():
            await here.order(decode=2)
            await here.until_replicas(decode=2)
            here.controllers.deploy("dynamo-decode", "decode", 4)  # somebody scales by hand
            await here.order(prefill=2)
            await here.until_replicas(prefill=2)
            await until_async(lambda: len(here.states("decode")) == 4)
            assert here.controllers.replicas("dynamo-decode") == 4

    world(main)


def test_the_worker_that_should_leave_first_does(world):
    async def main(here):
        async with here.hands():
            pods = await here.grown(3)
            await until_async(lambda: here.states("decode") == ["ready"] * 3)
            await here.order(decode=2, leaving=("b", "a", "c"))
            await until_async(lambda: here.states("decode") == ["ready"] * 2)
            assert here.controllers.pods_of("dynamo-decode") == [pods[0], pods[2]]
            await here.order(decode=1, leaving=("c", "a"))
            await until_async(lambda: here.states("decode") == ["ready"])
            assert here.controllers.pods_of("dynamo-decode") == [pods[0]]

    world(main)


def test_a_pod_that_was_to_leave_and_stayed_is_not_the_first_for_ever(world):
    async def main(here):
        async with here.hands():
            pods = await here.grown(2)
            marked = here.cluster.find("pods", pods[0])
            marked = marked | {"metadata": marked["metadata"] | {"annotations": {DELETION_COST: "-1"}}}
            here.cluster.put("pods", marked)
            await until_async(lambda: here.states("decode") == ["ready"] * 2)
            await here.order(decode=1, leaving=("b", "a"))
            await until_async(lambda: here.states("decode") == ["ready"])
            assert here.controllers.pods_of("dynamo-decode") == [pods[0]]
            assert not here.cluster.find("pods", pods[0])["metadata"]["annotations"]

    world(main)


def test_an_autoscaler_of_the_same_deployment_is_refused_in_one_line(world):
    async def main(here):
        here.cluster.put("horizontalpodautoscalers", autoscaler("web", "web"))
        async with here.hands():
            pass
        here.cluster.put("horizontalpodautoscalers", autoscaler("keda-hpa", "dynamo-decode"))
        async with here.hands(is_advisory=True):
            await until_async(lambda: here.states("decode") == ["starting"])
        text = (
            r"HorizontalPodAutoscaler keda-hpa also scales dynamo-decode; expected either it or a planner "
            r"\(kubectl delete hpa keda-hpa, or --advisory\)"
        )
        with pytest.raises(ValueError, match=text):
            async with here.hands():
                pass

    world(main)


def test_an_autoscaler_that_comes_later_has_the_pool_until_it_is_gone(world, caplog):
    async def main(here):
        async with here.hands():
            await here.order(decode=2)
            await here.until_replicas(decode=2)
            here.cluster.put("horizontalpodautoscalers", autoscaler("late", "dynamo-decode"))
            await until_async(lambda: "HorizontalPodAutoscaler late also scales dynamo-decode" in caplog.text)
            await here.order(decode=3, prefill=3)
            await here.until_replicas(prefill=3)
            assert here.controllers.replicas("dynamo-decode") == 2
            here.cluster.remove("horizontalpodautoscalers", "late")
            await here.until_replicas(decode=3)

    world(main)
    assert caplog.text.count("HorizontalPodAutoscaler late") == 1


def test_pods_that_cannot_be_made_count_as_starting_and_the_reason_is_said(world, caplog):
    async def main(here):
        here.controllers.quota = 1
        async with here.hands():
            await here.order(decode=3)
            await until_async(lambda: here.states("decode") == ["starting"] * 3)
            await until_async(lambda: "dynamo-decode cannot start all its pods: exceeded quota: 1 pods" in caplog.text)

    world(main)


def test_a_ready_pod_that_discovery_does_not_name_is_said(world, caplog, monkeypatch):
    monkeypatch.setattr(cluster_hands, "NAMELESS_S", 0.05)

    async def main(here):
        async with here.hands():
            [pod] = here.controllers.pods_of("dynamo-decode")
            here.controllers.make_ready(pod)
            text = f"{pod} is ready but not in discovery; expected POD_NAME in its environment"
            await until_async(lambda: text in caplog.text)

    world(main)


def test_the_cluster_must_allow_what_hands_call_and_nothing_more(world):
    async def main(here):
        here.cluster.rules = RULES
        async with here.hands():
            await here.order(decode=2)
            await until_async(lambda: len(here.controllers.pods_of("dynamo-decode")) == 2)
            for id, pod in enumerate(here.controllers.pods_of("dynamo-decode"), 10):
                await here.serve(pod, id)
            await until_async(lambda: here.states("decode") == ["ready"] * 2)
            await here.order(decode=1, leaving=("a", "b"))
            await here.until_replicas(decode=1)
        made = {(group, resource, verb) for verb, group, resource, _ in here.cluster.calls}
        assert made == {(rule.group, rule.resource, verb) for rule in RULES for verb in rule.verbs}

    world(main)


def test_a_planner_whose_hands_fail_ends(world, monkeypatch, caplog):
    async def main(here):
        async with here.hands():
            monkeypatch.setattr(cluster_hands.Pods, "trouble", lambda *_: 1 / 0)
            here.controllers.deploy("dynamo-decode", "decode", 2)
            await here.runtime.stopping.wait()

    world(main)
    assert "decisions can no longer be carried out: ZeroDivisionError" in caplog.text


def test_a_deployment_of_absurd_size_is_reported_as_the_largest_that_may_be(world, monkeypatch):
    monkeypatch.setattr(cluster_hands_pods, "MOST_WORKERS", 5)

    async def main(here):
        here.controllers.quota = 1
        async with here.hands():
            here.controllers.deploy("dynamo-decode", "decode", 2**31 - 1)
            await until_async(lambda: len(here.states("decode")) == 5)

    world(main)
