"""Discovery in a Kubernetes cluster: who lives, what stands while the API server is away, and what it must allow."""

import asyncio
import logging
import random
import time
from base64 import b64decode, b64encode
from contextlib import asynccontextmanager

import pytest
import trustme
import uvloop
from kubernetes_asyncio import client as official
from kubernetes_asyncio import watch as official_watch
from kubernetes_asyncio.config.incluster_config import InClusterConfigLoader

from serving.runtime.address import EndpointAddress
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.kubernetes import api, reflector, registration
from serving.runtime.kubernetes.access import discovery
from serving.runtime.kubernetes.account import Account, ThisPod
from serving.runtime.kubernetes.names import APP, APP_NAME, PROCESS, TOKEN_SECRET, VERSION
from serving.runtime.kubernetes.objects import CONFIG_MAPS, LEASES, SECRETS, Data, Lease
from serving.runtime.kubernetes.presence import Presence
from serving.runtime.ports import RuntimeUnavailableError
from serving.runtime.world import World, within
from tests.support.cluster import EMPTY_TOKEN, Cluster, endpoint_slice
from tests.support.servers import free_port
from tests.support.waiting import in_time, until_async


@pytest.fixture
def cluster(monkeypatch):
    with Cluster() as server:
        enter(monkeypatch, server, server.pod())
        monkeypatch.setattr(api, "PAUSE_S", 0.01)
        yield server
        assert not server.invalid


def enter(monkeypatch, cluster, pod):
    for name, value in cluster.environment(pod).items():
        monkeypatch.setenv(name, value)


def run(main):
    async def limited():
        async with in_time():
            return await main

    return uvloop.run(limited())


def joined(ttl_s=2.0):
    return DistributedRuntime.connect(RuntimeConfig(nats_server="", etcd_endpoints="", lease_ttl_s=ttl_s))


def put_process(cluster, id, more=None, *, name="", version="1", keys="{}", **spec):
    """Make the Lease and the ConfigMap of a process that somebody invented."""
    metadata = {"name": name or f"dynabench-{id}", "labels": {PROCESS: id}, "annotations": {VERSION: version}} | (
        more or {}
    )
    cluster.put("configmaps", {"metadata": metadata, "data": {"keys": keys}})
    cluster.put("leases", {"metadata": metadata, "spec": {"renewTime": registration.now_text()} | spec})


class Seen(dict):
    """The keys that a watch reports."""

    def __call__(self, key, value):
        if value is None:
            self.pop(key, None)
        else:
            self[key] = value


@asynccontextmanager
async def two(ttl_s=2.0):
    """Give two processes of the cluster, and what the second sees."""
    async with await joined(ttl_s) as one, await joined(ttl_s) as other:
        seen = Seen()
        await other.discovery.watch("test/", seen)
        yield one, other, seen


@asynccontextmanager
async def in_a_pod(cluster, monkeypatch):
    """Give a pod, a process in it that has registered a key, and what one outside of it sees."""
    async with await joined(600.0) as other:
        seen = Seen()
        await other.discovery.watch("test/", seen)
        pod = cluster.pod("pod-1")
        enter(monkeypatch, cluster, pod)
        async with await joined(600.0) as one:
            await one.discovery.put("test/x", b"1")
            await until_async(lambda: seen == {"test/x": b"1"})
            yield pod, one, seen


def test_the_keys_of_a_pod_that_is_not_ready_go_at_once_and_come_back_with_it(cluster, monkeypatch):
    async def main():
        async with in_a_pod(cluster, monkeypatch) as (pod, one, seen):
            cluster.put("endpointslices", endpoint_slice("workers-1", (pod, False, False)))
            await until_async(lambda: seen == {})
            cluster.put("endpointslices", endpoint_slice("workers-1", (pod, True, True)))
            await until_async(lambda: seen == {"test/x": b"1"})
            # It ends, and still answers what it has: it leaves by itself, with what it takes no more.
            cluster.put("endpointslices", endpoint_slice("workers-1", (pod, False, True)))
            await one.discovery.put("test/y", b"2")
            await until_async(lambda: seen == {"test/x": b"1", "test/y": b"2"})
            # Of a Service that does not say who is ready, nothing follows.
            cluster.put("endpointslices", endpoint_slice("workers-2", (pod, None, None)))
            cluster.remove("endpointslices", "workers-1")
            await one.discovery.delete("test/x")
            await until_async(lambda: seen == {"test/y": b"2"})

    run(main())


def test_with_a_pod_goes_what_its_processes_registered(cluster, monkeypatch):
    async def main():
        async with in_a_pod(cluster, monkeypatch) as (_, one, seen):
            name = f"dynabench-{one.instance_id:x}"
            assert cluster.find("configmaps", name) is not None
            cluster.remove("pods", "pod-1")
            await until_async(lambda: seen == {})
            assert cluster.find("configmaps", name) is None

    run(main())


def test_who_leaves_takes_out_all_that_it_had_but_the_token(cluster):
    async def main():
        async with await joined() as one:
            await one.discovery.put("test/x", b"1")
            assert len(cluster.names("leases")) == len(cluster.names("configmaps")) == 1

    run(main())
    assert cluster.names("leases") == cluster.names("configmaps") == []
    assert cluster.names("secrets") == [TOKEN_SECRET]


def test_while_the_api_server_is_away_what_was_known_stands_and_what_changes_counts_once_it_is_back(cluster):
    async def main():
        async with two() as (one, other, seen):
            await one.discovery.put("test/before", b"1")
            await until_async(lambda: seen == {"test/before": b"1"})
            await asyncio.to_thread(cluster.stop)
            await one.discovery.put("test/during", b"2")
            late = Seen()
            await other.discovery.watch("test/d", late)
            await asyncio.sleep(2.5)  # longer than a lease
            assert seen == {"test/before": b"1"}
            assert late == {}
            assert [str(outages).startswith("the API server at ") for outages in other.outages] == [True]
            await asyncio.to_thread(cluster.start)
            await until_async(lambda: seen == {"test/before": b"1", "test/during": b"2"})
            await until_async(lambda: late == {"test/during": b"2"})
            assert [(outages.name, outages.is_away) for outages in other.outages] == [("kubernetes", False)]

    run(main())


@pytest.mark.parametrize("happens", ["drop_watches", "mute_watches", "compact and drop"])
def test_nothing_is_missed_when_a_watch_ends_hangs_or_is_too_old(cluster, happens):
    async def main():
        # Only silence is noticed by what does not come back, within a third of a lease.
        async with two(2.0 if happens == "mute_watches" else 3600.0) as (one, _, seen):
            await one.discovery.put("test/a", b"1")
            await until_async(lambda: seen == {"test/a": b"1"})
            if happens == "compact and drop":
                cluster.fail("watch", "*", 503, times=2)
                cluster.drop_watches()
                await one.discovery.delete("test/a")
                cluster.compact()
            else:
                getattr(cluster, happens)()
            await one.discovery.put("test/b", b"2")
            await until_async(lambda: seen.get("test/b") == b"2")
            assert ("test/a" in seen) == (happens != "compact and drop")

    run(main())


@pytest.mark.parametrize("verb", ["patch", "create", "get", "list", "watch", "*"])
@pytest.mark.parametrize("what", [429, 500, 503, "drop"])
def test_failures_that_pass_are_seen_by_nobody(cluster, verb, what):
    async def main():
        cluster.fail(verb, "*", what, times=2, retry_after="0")
        async with two() as (one, _, seen):
            cluster.fail(verb, "*", what, times=2)
            await one.discovery.put("test/x", b"1")
            await until_async(lambda: seen == {"test/x": b"1"})
            assert await one.discovery.claim("planner") is not None

    run(main())


def test_a_call_that_hangs_is_given_up_and_made_again(cluster, monkeypatch):
    monkeypatch.setattr(api, "TIMEOUT", api.aiohttp.ClientTimeout(total=0.3))

    async def main():
        async with two() as (one, _, seen):
            cluster.fail("patch", "configmaps", "hang")
            await one.discovery.put("test/x", b"1")
            await until_async(lambda: seen == {"test/x": b"1"})

    run(main())


def test_the_server_is_left_alone_for_as_long_as_it_asks(cluster, monkeypatch):
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    async def main():
        calls = api.KubernetesApi(Account.of_this_pod())
        monkeypatch.setattr(api.asyncio, "sleep", sleep)
        cluster.fail("list", "configmaps", 429, retry_after="3")
        cluster.fail("list", "configmaps", 429, retry_after="999999")
        await calls.list(CONFIG_MAPS, Data)
        await calls.close()

    run(main())
    assert slept == [3.0, api.MAX_PAUSE_S]


def test_a_token_that_was_replaced_is_read_again_and_never_logged(cluster, caplog):
    caplog.set_level(logging.DEBUG)

    async def main():
        async with two() as (one, _, seen):
            (cluster.folder / "token").write_text("second\n")
            cluster.tokens = {"second"}
            await one.discovery.put("test/x", b"1")
            await until_async(lambda: seen == {"test/x": b"1"})
            cluster.tokens = {"third"}
            cluster.drop_watches()
            with pytest.raises(
                RuntimeUnavailableError, match=r"does not accept the token of this pod's service account \(401\)"
            ):
                await one.discovery.claim("planner")
            (cluster.folder / "token").write_text("third")
            assert await one.discovery.claim("planner") is not None

    run(main())
    assert "second" not in caplog.text.replace("seconds", "")
    assert "third" not in caplog.text


def test_what_somebody_removed_is_made_again(cluster, monkeypatch):
    monkeypatch.setattr(registration, "LOOK_S", 0.0)

    async def main():
        async with two(1.0) as (one, _, seen):
            await one.discovery.put("test/x", b"1")
            await until_async(lambda: seen == {"test/x": b"1"})
            name = f"dynabench-{one.instance_id:x}"
            cluster.remove("leases", name)
            await until_async(lambda: seen == {})
            await until_async(lambda: seen == {"test/x": b"1"})
            cluster.remove("configmaps", name)
            await until_async(lambda: cluster.find("configmaps", name) is not None)
            assert seen == {"test/x": b"1"}

    run(main())


def test_a_lease_that_somebody_removed_comes_back_with_its_keys(cluster, monkeypatch):
    monkeypatch.setattr(registration, "LOOK_S", 3600.0)

    async def main():
        async with two(1.0) as (one, _, seen):
            await one.discovery.put("test/x", b"1")
            name = f"dynabench-{one.instance_id:x}"
            cluster.remove("configmaps", name)
            cluster.remove("leases", name)
            await until_async(lambda: cluster.find("configmaps", name) is not None)
            await until_async(lambda: seen == {"test/x": b"1"})

    run(main())


def test_a_lease_that_somebody_changed_is_restored_with_its_next_renewal(cluster):
    async def main():
        async with await joined(1.0) as one:
            await one.discovery.put("test/x", b"1")
            name = f"dynabench-{one.instance_id:x}"
            before = cluster.find("leases", name)
            cluster.put("leases", {"metadata": {"name": name}, "spec": {"leaseDurationSeconds": 2**31 - 1}})
            await until_async(lambda: "labels" in cluster.find("leases", name)["metadata"])
            after = cluster.find("leases", name)
            changes = {"spec": before["spec"] | {"renewTime": after["spec"]["renewTime"]}}
            volatile = {"metadata": before["metadata"] | {"resourceVersion": after["metadata"]["resourceVersion"]}}
            assert after == before | changes | volatile

    run(main())


def spoil(cluster, runtime):
    """Replace what a process registered, with a version that it will not reach."""
    put_process(cluster, f"{runtime.instance_id:x}", version="999999999", keys='{"test/evil": "1"}')


def test_a_process_whose_keys_somebody_replaced_is_still_heard(cluster):
    async def main():
        async with two(600.0) as (one, _, seen):
            await one.discovery.put("test/x", b"1")
            spoil(cluster, one)
            await until_async(lambda: seen == {"test/evil": b"1"})
            await one.discovery.put("test/y", b"2")
            await until_async(lambda: seen == {"test/x": b"1", "test/y": b"2"})

    run(main())


def test_a_process_writes_its_keys_again_if_somebody_replaced_them(cluster, monkeypatch):
    monkeypatch.setattr(registration, "LOOK_S", 0.0)

    async def main():
        async with two(1.0) as (one, _, seen):
            await one.discovery.put("test/x", b"1")
            spoil(cluster, one)
            name = f"dynabench-{one.instance_id:x}"
            await until_async(lambda: cluster.find("configmaps", name)["data"] == {"keys": '{"test/x":"1"}'})
            await until_async(lambda: seen == {"test/x": b"1"})

    run(main())


def test_a_process_cannot_register_what_ends_in_the_id_of_another(cluster):
    async def main():
        async with await joined() as one, await joined() as two:
            seen = {}
            await one.discovery.watch("test/", lambda key, value: seen.update({key: value}))
            await two.discovery.put(f"test/{one.instance_id:x}", b"forged")
            await two.discovery.put(f"test/{two.instance_id:x}", b"own")
            await until_async(lambda: seen == {f"test/{two.instance_id:x}": b"own"})
            await one.discovery.put(f"test/{one.instance_id:x}", b"own")
            await until_async(lambda: len(seen) == 2)
            assert set(seen.values()) == {b"own"}

    run(main())


def test_objects_of_other_names_do_not_speak_for_a_process(cluster):
    async def main():
        async with await joined(600.0) as one, await joined(600.0) as late:
            await one.discovery.put("test/x", b"1")
            put_process(cluster, f"{one.instance_id:x}", name="zz", version="2", keys='{"test/x": "evil"}')
            await late.discovery.watch("test/", seen := Seen())
            assert seen == {"test/x": b"1"}

    run(main())


def in_pod(uid):
    return {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "pod-0", "uid": uid}]}


def test_what_died_in_this_pod_before_is_removed_once_its_lease_has_run_out(cluster, monkeypatch):
    monkeypatch.setattr(registration, "LOOK_S", 0.0)
    uid = cluster.find("pods", "pod-0")["metadata"]["uid"]
    put_process(cluster, "a", in_pod(uid), leaseDurationSeconds=1)
    put_process(cluster, "b", in_pod("another"), leaseDurationSeconds=1)

    async def main():
        async with await joined(1.0):
            assert "dynabench-a" in cluster.names("leases")
            await until_async(lambda: "dynabench-a" not in cluster.names("leases"))
            assert "dynabench-b" in cluster.names("leases")
            assert cluster.names("configmaps") == ["dynabench-b"]

    run(main())


def test_a_process_of_the_same_pod_gets_time_to_renew_after_we_were_cut_off(cluster):
    class Clock(World):
        now_s = 0.0

        def now(self):
            return self.now_s

    clock = Clock()
    uid = cluster.find("pods", "pod-0")["metadata"]["uid"]
    put_process(cluster, "a", in_pod(uid), leaseDurationSeconds=10)

    async def main():
        calls = api.KubernetesApi(Account.of_this_pod())
        own = registration.Registration(calls, ThisPod("pod-0", uid), "b", lease_ttl_s=10.0)
        await own.begin()
        clock.now_s = 100.0
        await own.renew()
        assert cluster.names("leases") == ["dynabench-a", "dynabench-b"]
        for clock.now_s in (105.0, 110.0, 115.0, 120.0, 125.0, 130.0, 135.0):
            await own.renew()
        assert cluster.names("leases") == ["dynabench-b"]
        await calls.close()

    with within(clock):
        run(main())


@pytest.mark.parametrize("duration", [{}, {"leaseDurationSeconds": 3600}])
def test_a_process_of_the_same_pod_is_not_removed_for_what_its_clock_says(cluster, monkeypatch, duration):
    monkeypatch.setattr(registration, "LOOK_S", 0.0)
    uid = cluster.find("pods", "pod-0")["metadata"]["uid"]
    put_process(cluster, "a", in_pod(uid), renewTime="2020-01-01T00:00:00.000000Z", **duration)

    async def main():
        async with await joined(1.0) as one:
            name = f"dynabench-{one.instance_id:x}"
            first = cluster.find("leases", name)["spec"]["renewTime"]
            await until_async(lambda: cluster.find("leases", name)["spec"]["renewTime"] != first)
            assert "dynabench-a" in cluster.names("leases")

    run(main())


def test_a_claim_is_taken_from_who_does_not_renew_it_however_long_it_was_to_last(cluster):
    spec = {"holderIdentity": "x", "leaseDurationSeconds": 2**31 - 1}
    cluster.put("leases", {"metadata": {"name": "dynabench-claim-planner-x"}, "spec": spec})

    async def main():
        async with await joined(1.0) as one:
            assert await one.discovery.claim("planner-x") is None
            async with in_time():
                while await one.discovery.claim("planner-x") is None:
                    await asyncio.sleep(0.1)

    run(main())


def test_keys_put_while_others_are_read_are_seen_before_the_lease_is_renewed(cluster):
    async def main():
        async with two(600.0) as (one, _, seen):
            for number in range(20):
                await one.discovery.put(f"test/{number}", b"1")
            await until_async(lambda: len(seen) == 20)

    run(main())


def test_of_many_who_claim_at_once_one_gets_it(cluster):
    async def main():
        async with await joined() as one, await joined() as another, await joined() as third:
            all = (one, another, third)
            terms = await asyncio.gather(*(each.discovery.claim("planner-x") for each in all))
            assert len([term for term in terms if term is not None]) == 1
            [holder] = [each for each, term in zip(all, terms, strict=True) if term is not None]
            await asyncio.sleep(2.5)  # it is renewed
            terms = [await each.discovery.claim("planner-x") for each in all]
            assert [each for each, term in zip(all, terms, strict=True) if term is not None] == [holder]

    run(main())


def test_of_many_who_claim_what_was_given_up_one_gets_it(cluster):
    async def main():
        async with await joined() as one, await joined() as another, await joined() as third:
            async with await joined() as before:
                term = await before.discovery.claim("planner-x")
            terms = await asyncio.gather(*(each.discovery.claim("planner-x") for each in (one, another, third)))
            assert sorted(terms, key=lambda each: each or 0) == [None, None, term + 1]

    run(main())


def test_who_hangs_loses_its_claim_and_hears_of_it(cluster):
    async def main():
        async with await joined(1.0) as one, await joined(1.0) as other:
            term = await one.discovery.claim("planner-x")
            one.discovery._beating.cancel()  # it hangs
            later = []

            async def takes():
                later.append(await other.discovery.claim("planner-x"))
                return later[-1]

            async with in_time():
                while not await takes():
                    await asyncio.sleep(0.1)
            assert later[0] is None
            assert later[-1] > term
            assert await one.discovery.claim("planner-x") is None

    run(main())


def test_terms_grow_also_if_somebody_removed_the_lease(cluster):
    async def main():
        async with await joined() as one:
            term = await one.discovery.claim("planner-x")
            cluster.remove("leases", "dynabench-claim-planner-x")
            await asyncio.sleep(1.0)  # terms without a Lease are seconds
            assert await one.discovery.claim("planner-x") > term

    run(main())


def test_long_lists_are_read_page_by_page(cluster):
    cluster.page_size = 2

    async def main():
        async with await joined() as reader:
            runtimes = [await joined() for _ in range(5)]
            for number, runtime in enumerate(runtimes):
                await runtime.discovery.put(f"test/{number}", b"1")
            seen = Seen()
            await reader.discovery.watch("test/", seen)
            assert sorted(seen) == [f"test/{number}" for number in range(5)]
            await asyncio.gather(*(runtime.close() for runtime in runtimes))

    run(main())


def test_what_others_leave_in_the_namespace_is_ignored(cluster, caplog):
    cluster.put("leases", {"metadata": {"name": "dynabench-zz", "labels": {PROCESS: "zz"}}})
    cluster.put("configmaps", {"metadata": {"name": "dynabench-zz", "labels": {PROCESS: "zz"}}, "data": {"keys": "{["}})
    cluster.put(
        "configmaps", {"metadata": {"name": "other", "labels": {PROCESS: "other"}}, "data": {"keys": '{"test/o": "1"}'}}
    )
    cluster.put("endpointslices", endpoint_slice("empty") | {"endpoints": None})

    async def main():
        async with two() as (one, _, seen):
            cluster.put("leases", {"metadata": {"name": "kube", "labels": {PROCESS: "kube", "x": "y"}}, "spec": {}})
            await one.discovery.put("test/x", b"1")
            await until_async(lambda: seen == {"test/x": b"1"})

    run(main())
    assert "ConfigMap dynabench-zz has no valid keys and is ignored" in caplog.text


@pytest.mark.parametrize(
    "strange",
    [
        {"version": "9" * 5000},
        {"holderIdentity": "\x01" * 400_000},  # a line of a watch that is too long
    ],
)
def test_nobody_is_lost_through_what_others_register(cluster, strange):
    async def main():
        async with two(600.0) as (one, _, seen), await joined(600.0) as late:
            put_process(cluster, "strange", **strange)
            await one.discovery.put("test/x", b"1")
            await until_async(lambda: seen == {"test/x": b"1"})
            await late.discovery.watch("test/", newcomer := Seen())
            assert newcomer == {"test/x": b"1"}

    run(main())


@asynccontextmanager
async def following(on_change=lambda *_: None):
    """Follow the Leases; give the names that the lists showed."""
    calls, listed = api.KubernetesApi(Account.of_this_pod()), []

    async def on_list(found):
        listed.append(sorted(found))

    leases = reflector.Reflector(calls, LEASES, Lease, on_list=on_list, on_change=on_change)
    await leases.start()
    yield listed
    await leases.close()
    await calls.close()


def test_objects_are_listed_again_after_a_change_that_could_not_be_processed(cluster):
    def fail(name, lease):
        raise KeyError(name)

    async def main():
        async with following(fail) as listed:
            cluster.put("leases", {"metadata": {"name": "a"}})
            await until_async(lambda: listed == [[], ["a"]])

    run(main())


def test_changes_that_come_at_once_are_weighed_at_once(cluster, monkeypatch):
    living, nums_known = Presence.living, []

    def counted(self):
        nums_known.append(len(self.processes))
        return living(self)

    monkeypatch.setattr(Presence, "living", counted)
    lease = (
        b'{"type":"ADDED","object":{"metadata":{"name":"dynabench-new%d","labels":{"dynabench.io/process":"new%d"}}}}\n'
    )
    cluster.fail("watch", "leases", b"".join(lease % (number, number) for number in range(200)))

    async def main():
        async with two(600.0):
            await until_async(lambda: nums_known[-1:] == [202])

    run(main())
    assert len(nums_known) < 50


DEEP = b"[" * 50_000 + b"]" * 50_000


def test_answers_that_are_nested_too_deeply_are_refused(cluster):
    async def main():
        calls = api.KubernetesApi(Account.of_this_pod())
        cluster.fail("*", "leases", b'{"metadata":{"x":%s}}' % DEEP, times=2 * api.ATTEMPTS)
        with pytest.raises(api.ApiError, match="JSON is nested too deeply"):
            await calls.list(LEASES, Lease)
        with pytest.raises(api.ApiError, match="JSON is nested too deeply"):
            await calls.get(LEASES, Lease, "a")
        await calls.close()

    run(main())


def test_a_servers_message_is_shown_without_what_a_terminal_would_obey(cluster):
    async def main():
        calls = api.KubernetesApi(Account.of_this_pod())
        cluster.fail("list", "leases", 400, message="\x1b[31mred\nand more")
        with pytest.raises(api.ApiError, match=r"\(400: \\x1b\[31mred and more\)"):
            await calls.list(LEASES, Lease)
        await calls.close()

    run(main())


BARE_BOOKMARK = b'{"type":"BOOKMARK","object":{"metadata":{}}}\n'


@pytest.mark.parametrize(
    ("answer", "num_lists"), [(302, 1), (503, 1), (b"", 1), (BARE_BOOKMARK, 1), (410, 8), (b"<html>", 8)]
)
def test_the_server_is_asked_less_and_less_often_while_watches_end_at_once(cluster, monkeypatch, answer, num_lists):
    pauses, enough = [], asyncio.Event()

    class Longest(random.Random):
        def uniform(self, a, b):
            return b

    async def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 8:
            enough.set()
            await asyncio.Event().wait()

    async def main():
        cluster.fail("watch", "leases", answer, times=1000)
        monkeypatch.setattr(reflector.asyncio, "sleep", sleep)
        async with following() as listed:
            await enough.wait()
            assert len(listed) == num_lists

    with within(World(Longest())):
        run(main())
    assert pauses == [0.3, 0.6, 1.2, 2.4, 4.8, 5.0, 5.0, 5.0]


@pytest.mark.parametrize("num_bytes", [3_000, 12_000])
def test_pages_are_smaller_if_objects_are_large(cluster, monkeypatch, num_bytes):
    monkeypatch.setattr(api, "MAX_ANSWER_BYTES", 16_000)
    for number in range(20):
        put_process(cluster, f"large{number}", keys=f'{{"test/{number}": "{"x" * num_bytes}"}}')

    async def main():
        async with two() as (_, _, seen):
            assert len(seen) == 20

    run(main())


def test_a_list_that_never_ends_is_given_up(cluster, monkeypatch):
    monkeypatch.setattr(api, "MAX_PAGES", 3)
    cluster.page_size = 1

    async def main():
        calls = api.KubernetesApi(Account.of_this_pod())
        for name in ("a", "b", "c", "d"):
            cluster.put("leases", {"metadata": {"name": name}})
        with pytest.raises(api.ApiError, match="lists leases without end"):
            await calls.list(LEASES, Lease)
        await calls.close()

    run(main())


def held_token(cluster):
    return b64decode(cluster.find("secrets", TOKEN_SECRET).get("data", {}).get("value", ""))


def test_the_token_in_the_secret_is_followed_and_put_back_where_it_is_empty(cluster):
    async def main():
        async with await joined() as one:
            token = await one.cluster_token()
            cluster.put(
                "secrets", {"metadata": {"name": TOKEN_SECRET}, "data": {"value": b64encode(b"x" * 20).decode()}}
            )
            await until_async(lambda: token() == b"x" * 20)
            cluster.put("secrets", EMPTY_TOKEN)
            await until_async(lambda: held_token(cluster) == b"x" * 20)
            cluster.remove("secrets", TOKEN_SECRET)
            cluster.apply("secrets", EMPTY_TOKEN)
            await until_async(lambda: held_token(cluster) == b"x" * 20)
            assert token() == b"x" * 20

    run(main())


def test_applying_the_manifests_again_leaves_the_token(cluster):
    async def main():
        async with await joined() as one:
            token = await one.cluster_token()
            before = held_token(cluster)
            cluster.apply("secrets", EMPTY_TOKEN)
            assert token() == before == held_token(cluster)

    run(main())


def test_of_processes_that_fill_the_secret_at_once_one_does(cluster, monkeypatch):
    get, num_seen = api.KubernetesApi.get, []

    async def seen(self, resource, kind, *names):
        """Let each see the Secret empty before any of them fills it."""
        found = await get(self, resource, kind, *names)
        if resource is SECRETS:
            num_seen.append(names)
            while len(num_seen) < 3:
                await asyncio.sleep(0.01)
        return found

    monkeypatch.setattr(api.KubernetesApi, "get", seen)

    async def main():
        runtimes = await asyncio.gather(*(joined() for _ in range(3)))
        assert {(await each.cluster_token())() for each in runtimes} == {held_token(cluster)}
        await asyncio.gather(*(each.close() for each in runtimes))

    run(main())


def test_a_secret_that_changes_whenever_it_is_filled_is_given_up(cluster, monkeypatch):
    monkeypatch.setattr("serving.runtime.kubernetes.secret.FILLING_PAUSES_S", (0.0, 0.0, 0.0))
    cluster.fail("patch", "secrets", 409, times=1000)
    with pytest.raises(RuntimeUnavailableError, match="Secret dynabench-cluster-token in namespace here is empty, but"):
        run(joined())


def test_nobody_makes_the_secret_as_a_stranger_could(cluster):
    cluster.remove("secrets", TOKEN_SECRET)
    text = (
        "there is no Secret dynabench-cluster-token in namespace here; expected an empty one "
        r"\(kubectl create secret generic dynabench-cluster-token\)"
    )
    with pytest.raises(RuntimeUnavailableError, match=text):
        run(joined())
    assert cluster.names("secrets") == []


def test_a_secret_that_holds_no_token_is_refused_in_one_line(cluster):
    cluster.put("secrets", {"metadata": {"name": TOKEN_SECRET}, "data": {"value": b64encode(b"short").decode()}})
    text = (
        "Secret dynabench-cluster-token holds 5 bytes; expected at least 16 "
        r"\(kubectl patch secret dynabench-cluster-token -p '{\"data\":null}' lets"
    )
    with pytest.raises(RuntimeUnavailableError, match=text):
        run(joined())


def test_what_a_config_map_cannot_hold_is_refused(cluster):
    async def main():
        async with await joined() as one:
            await one.discovery.put("test/x", b"1")
            with pytest.raises(
                RuntimeUnavailableError, match="test/y is 1000000 bytes long; expected at most 1000000 for"
            ):
                await one.discovery.put("test/y", b"1" * 1_000_000)
            await one.discovery.put("test/z", b"1")

    run(main())


def without(name):
    return lambda cluster, patch: patch.delenv(name)


def emptied(name):
    return lambda cluster, patch: (cluster.folder / name).write_text("")


def nobody_there(cluster, patch):
    patch.setenv("KUBERNETES_SERVICE_PORT", str(free_port()))


def no_rights(cluster, patch):
    cluster.rules = [rule for rule in discovery() if rule.resource != "leases"]


def redirected(cluster, patch):
    cluster.fail("*", "*", 302, times=1000)


def another_authority(cluster, patch):
    trustme.CA().cert_pem.write_to_path(cluster.folder / "ca.crt")


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (
            without("KUBERNETES_SERVICE_HOST"),
            "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set; expected a pod",
        ),
        (without("POD_UID"), "POD_UID is not set; expected POD_NAME and POD_UID in the pod's environment"),
        (
            lambda cluster, _: (cluster.folder / "token").unlink(),
            r"token cannot be read \(No such file or directory\); expected",
        ),
        (emptied("namespace"), "namespace is empty; expected the namespace of a service account"),
        (emptied("ca.crt"), "ca.crt is empty; expected"),
        (lambda cluster, _: (cluster.folder / "ca.crt").write_text("x"), "is not a certificate in PEM format"),
        (nobody_there, r"the API server at https://127.0.0.1:\d+ cannot be reached \("),
        (another_authority, r"cannot be reached \(.*certificate verify failed"),
        (
            no_rights,
            r"does not let this pod list leases in namespace here \(403\); expected a Role that allows list on leases of",
        ),
        (redirected, r"redirects to another address \(302\), which is not followed"),
        (lambda _, patch: patch.setenv("POD_NAMESPACE", "away"), r"has no namespace away \(404"),
        (
            lambda _, patch: patch.setenv("ETCD_ENDPOINTS", "e:1"),
            "etcd_endpoints is 'e:1'; expected none with discovery_backend",
        ),
    ],
)
def test_who_cannot_join_is_told_why_in_one_line(cluster, monkeypatch, break_it, message):
    break_it(cluster, monkeypatch)
    with pytest.raises((RuntimeUnavailableError, ValueError), match=message) as refused:
        run(DistributedRuntime.connect(RuntimeConfig(nats_server="")))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_processes_reach_each_other_at_the_address_of_their_pod(cluster, monkeypatch, address):
    monkeypatch.setenv("POD_IP", address)
    place = EndpointAddress("here", "backend", "generate")

    async def echo(request):
        yield request

    async def main():
        async with await joined() as one, await joined() as other:
            serving = asyncio.create_task(one.endpoint(place).serve_endpoint(echo))
            client = await other.client(place)
            await client.wait_for_instances()
            [instance] = client._known.values()
            assert (instance.pod, instance.transport.rpartition(":")[0]) == ("pod-0", f"tcp:{address}")
            assert [item async for item in client.generate("hello")] == ["hello"]
            heard = []
            await other.events.subscribe("s", heard.append)
            while not heard:
                await one.events.publish("s", b"event")
                await asyncio.sleep(0.02)
            one.stopping.set()
            await serving

    run(main())


def test_the_cluster_must_allow_what_is_called_and_nothing_more(cluster):
    async def main():
        async with two() as (one, other, seen):
            await one.discovery.put("test/x", b"1")
            await one.discovery.put("test/x", b"2")
            await until_async(lambda: seen == {"test/x": b"2"})
            await one.discovery.claim("planner")
            await other.discovery.claim("planner")
            await one.discovery.delete("test/x")
            cluster.put("secrets", EMPTY_TOKEN)
            await until_async(lambda: held_token(cluster))
            await (await joined()).close()

    run(main())
    made = {(group, resource, verb) for verb, group, resource, _ in cluster.calls}
    assert made == {(rule.group, rule.resource, verb) for rule in discovery() for verb in rule.verbs}
    assert {name for verb, _, resource, name in cluster.calls if resource == "secrets"} == {TOKEN_SECRET}


def test_the_official_client_finds_the_stand_in_to_be_a_cluster(cluster):
    """The stand-in is ours; another reading of the API than ours must find nothing strange in it."""

    async def main():
        settings = official.Configuration()
        InClusterConfigLoader(
            token_filename=str(cluster.folder / "token"), cert_filename=str(cluster.folder / "ca.crt")
        ).load_and_set(settings)
        async with official.ApiClient(settings) as client, await joined() as runtime:
            await runtime.discovery.put("test/x", b"1")
            await runtime.discovery.claim("planner")
            leases, core = official.CoordinationV1Api(client), official.CoreV1Api(client)
            held = await leases.list_namespaced_lease("here", label_selector=PROCESS)
            assert [lease.spec.holder_identity for lease in held.items] == [f"pod-0_{runtime.instance_id:x}"]
            assert held.items[0].metadata.owner_references[0].kind == "Pod"
            claim = await leases.read_namespaced_lease("dynabench-claim-planner", "here")
            assert claim.spec.holder_identity == f"{runtime.instance_id:x}"
            assert abs(claim.spec.renew_time.timestamp() - time.time()) < 3600
            maps = await core.list_namespaced_config_map("here", label_selector=f"{APP}={APP_NAME}")
            assert maps.items[0].data == {"keys": '{"test/x":"1"}'}
            await conflicts(leases, claim)
            await is_watched(core)
            made = official.V1ConfigMap(metadata=official.V1ObjectMeta(name="theirs"), data={"a": "b"})
            assert (await core.create_namespaced_config_map("here", made)).metadata.uid
            with pytest.raises(official.ApiException) as refused:
                await core.create_namespaced_config_map("here", made)
            assert (refused.value.status, refused.value.reason) == (409, "Conflict")
            await core.delete_namespaced_config_map("theirs", "here")
            with pytest.raises(official.ApiException) as gone:
                await core.read_namespaced_config_map("theirs", "here")
            assert gone.value.status == 404

    async def conflicts(leases, claim):
        stale = claim.metadata.resource_version
        claim.spec.lease_transitions += 1
        claim = await leases.replace_namespaced_lease("dynabench-claim-planner", "here", claim)
        claim.metadata.resource_version = stale
        with pytest.raises(official.ApiException) as refused:
            await leases.replace_namespaced_lease("dynabench-claim-planner", "here", claim)
        assert refused.value.status == 409

    async def is_watched(core):
        watch = official_watch.Watch()
        listed = await core.list_namespaced_pod("here")
        cluster.pod("pod-9")
        stream = watch.stream(
            core.list_namespaced_pod, "here", resource_version=listed.metadata.resource_version, timeout_seconds=20
        )
        async for event in stream:
            assert (event["type"], event["object"].metadata.name) == ("ADDED", "pod-9")
            break
        await watch.close()

    run(main())
