"""What a live planner sees and says, and what its hands do, without the processes."""

import asyncio
from contextlib import asynccontextmanager

import msgspec
import uvloop
from aiohttp import web

from dynabench.deployment.description import Deployment, Pool
from dynabench.planner.hands import Hands
from dynabench.planner.history import cut, fleet_use
from dynabench.planner.messages import Orders, ReportedFleet, ReportedWorker, WantedWorkers, fleets, orders
from dynabench.planner.roster import PoolOfWorkers, Roster
from dynabench.planner.seen import STALE_S, Reports, counts_of
from dynabench.planner.service import PlannerService, PlannerServiceConfig
from mocker import EngineConfig
from reports.record.fleet import Headcount
from serving.planner import PlannerConfig, traffic_between
from serving.runtime.address import EndpointAddress
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.ports import RuntimeUnavailableError
from serving.supervision.group import ProcessReady
from serving.worker.engine import RankWork
from serving.worker.load_reports import TOPIC, LoadReport
from tests.support.waiting import until_async

FULL = RankWork(decode_kv_tokens=10_000)


def roster(num_ready=2):
    made = Roster([PoolOfWorkers("worker", "aggregated", 2)])
    for number in range(num_ready):
        made.on_ready(1.0 + number, made.begin(0.0, "worker"), f"{number:x}")
    return made


def wanted(replicas, number=1, leaving=()):
    return {"worker": WantedWorkers(number, replicas, "reason", leaving)}


def report(instance, work=FULL, running=1):
    return LoadReport(instance, 0, 0, 0, running, 0, 10, 100, 256, work=work)


def test_the_worker_with_the_fewest_requests_leaves():
    made = roster(3)
    assert made.obey(5.0, 1, wanted(2, leaving=("1", "0", "2"))) == (["worker-1"], [])
    assert [member.state for member in made.members.values()] == ["ready", "draining", "ready"]


def test_a_start_is_cancelled_before_a_ready_worker_leaves_and_the_oldest_start_first():
    made = roster(1)
    made.obey(5.0, 1, wanted(2))
    made.obey(6.0, 1, wanted(3, number=2))
    assert made.obey(7.0, 1, wanted(2, number=3, leaving=("0",))) == (["worker-1"], [])


def test_the_newest_leaves_where_no_load_is_known():
    made = roster(1)
    [name] = made.obey(5.0, 1, wanted(2))[1]
    made.on_ready(6.0, name, "a")
    assert made.obey(7.0, 1, wanted(1, number=2)) == (["worker-1"], [])


def test_each_decision_is_obeyed_once_and_none_of_an_earlier_planner():
    made = roster(1)
    assert made.obey(5.0, 2, wanted(2)) == ([], ["worker-1"])
    assert made.obey(6.0, 2, wanted(2)) == ([], [])
    made.on_ended(7.0, "worker-1", was_ready=False, is_kept=False)
    assert made.obey(8.0, 2, wanted(2)) == ([], [])
    assert made.obey(8.0, 1, wanted(5, number=9)) == ([], [])
    assert made.obey(9.0, 3, wanted(2)) == ([], ["worker-2"])


def test_the_past_that_is_remembered_is_bounded_however_long_workers_come_and_go(monkeypatch):
    monkeypatch.setattr("dynabench.planner.roster.MAX_PAST", 5)
    made = roster()
    for number in range(1, 21):
        made.obey(100.0 + number, 1, wanted(2 + number % 2, number))
    assert (len(made.history["worker"]), len(made.changes)) == (5, 5)
    assert made.changes[-1].time_s == made.history["worker"][-1].time_s == 120.0


def test_the_past_of_a_run_counts_from_its_start():
    made = roster(1)
    made.obey(10.0, 1, wanted(2))
    made.on_ready(12.0, "worker-1", "a")
    made.obey(20.0, 1, wanted(1, number=2, leaving=("a",)))
    made.forget(21.0, "worker-1")
    given = [Orders("x", 1, decisions=4, notes={"blind": 1}), Orders("x", 2, decisions=3, notes={"blind": 2})]
    use = fleet_use(made, "hpa", given, start_s=5.0, end_s=25.0)
    [pool] = use.pools
    assert pool.history == (
        Headcount(0.0, 0, 0, 1, 0),
        Headcount(5.0, 0, 1, 1, 0),
        Headcount(7.0, 0, 0, 2, 0),
        Headcount(15.0, 0, 0, 1, 1),
        Headcount(16.0, 0, 0, 1, 0),
    )
    assert pool.gpu_s == 2 * (20 + 11)
    assert [(change.time_s, change.before, change.after) for change in use.changes] == [(5.0, 1, 2), (15.0, 2, 1)]
    assert (use.decisions, use.notes) == (7, {"blind": 3})
    assert cut([], 5.0, 6.0) == (Headcount(0.0, 0, 0, 0, 0),)


def test_traffic_is_the_growth_of_the_frontends_counts():
    before = counts_of('dynamo_frontend_input_sequence_tokens_count{model="a"} 2.0\n')
    after = counts_of(
        'dynamo_frontend_input_sequence_tokens_bucket{le="50",model="a"} 9.0\n'
        'dynamo_frontend_input_sequence_tokens_count{model="a"} 6.0\n'
        'dynamo_frontend_input_sequence_tokens_sum{model="a"} 400.0\n'
        'dynamo_frontend_ended_input_tokens_total{model="a"} 200.0\n'
        'dynamo_frontend_cached_tokens_total{model="a"} 50.0\n'
    )
    traffic = traffic_between(before, after, 2.0)
    assert (traffic.num_requests, traffic.isl, traffic.hit_share, traffic.ttft_s) == (4, 100.0, 0.25, None)
    assert traffic_between(after, before, 2.0) is None  # the frontend was started again


def test_reports_that_are_old_or_say_nothing_of_the_work_are_missing():
    reports = Reports()
    workers = [
        ReportedWorker("worker-0", "ready", "a"),
        ReportedWorker("worker-1", "ready", "b"),
        ReportedWorker("worker-2", "starting"),
    ]
    reports.add(1.0, report(0xA))
    reports.add(2.0, report(0xB, work=None))
    state = reports.state(workers, num_ranks=1, block_size=16)
    assert (state.num_ready, state.num_starting) == (2, 1)
    assert [load.kv_tokens for load in state.loads] == [160]
    reports.keep(1.5 + STALE_S)
    assert reports.state(workers, num_ranks=1, block_size=16).loads == ()


class World:
    """A planner service, and all that it sees: a frontend's metrics, the hands' key, the workers' reports."""

    def __init__(self, runtime):
        self.runtime = runtime
        self.namespace = "dynamo"
        self.is_up = True
        self.num_asked = 0
        self.given = None
        self.subject = EndpointAddress().subject(TOPIC)

    async def metrics(self, request):
        self.num_asked += 1
        return web.Response(text="", status=200 if self.is_up else 503)

    def on_orders(self, key, value):
        self.given = None if value is None else msgspec.json.decode(value, type=Orders)

    async def begin(self):
        await self.runtime.discovery.watch(orders(self.namespace), self.on_orders)
        await self.runtime.events.announce(self.subject)
        fleet = ReportedFleet({"worker": (ReportedWorker("worker-0", "ready", "a", 1.0),)})
        await self.runtime.discovery.put(
            f"{fleets(self.namespace)}{self.runtime.instance_id:x}", msgspec.json.encode(fleet)
        )

    async def reporting(self):
        while True:
            await self.runtime.events.publish(self.subject, msgspec.msgpack.encode(report(0xA)))
            await asyncio.sleep(0.02)


@asynccontextmanager
async def planned(tmp_path):
    """Give a world whose one worker has more than its KV cache holds."""
    config = RuntimeConfig(etcd_endpoints="", nats_server="", discovery_dir=str(tmp_path / "d"))
    planner = PlannerConfig(planner="dynamo-load", planner_interval_s=0.05)
    deployment = Deployment(pools=(Pool(mocker=EngineConfig(num_gpu_blocks=100, block_size=16)),), planner=planner)
    async with await DistributedRuntime.connect(config) as ours, await DistributedRuntime.connect(config) as theirs:
        world = World(ours)
        app = web.Application()
        app.router.add_get("/metrics", world.metrics)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        await world.begin()
        serving = asyncio.create_task(PlannerService(theirs, PlannerServiceConfig(url=url), deployment).run())
        world.make = lambda: DistributedRuntime.connect(config)
        world.second = lambda runtime: PlannerService(runtime, PlannerServiceConfig(url=url), deployment).run()
        try:
            yield world
        finally:
            theirs.stopping.set()
            await serving
            await runner.cleanup()


def ordered(world):
    return world.given is not None and "worker" in world.given.wanted


def test_nothing_changes_without_reports_and_it_is_said_once(tmp_path, caplog):
    caplog.set_level("INFO", logger="dynabench")

    async def main():
        async with planned(tmp_path) as world:
            await until_async(lambda: world.given is not None and world.given.decisions >= 3)
            assert not ordered(world)
            reporting = asyncio.create_task(world.reporting())
            await until_async(lambda: ordered(world))
            assert world.given.wanted["worker"].replicas == 2
            reporting.cancel()

    uvloop.run(main())
    assert caplog.text.count("nothing changes: the loads of 1 of 1 ranks of worker are missing") == 1


def test_nothing_changes_while_the_frontend_does_not_answer_and_it_is_said_once(tmp_path, caplog):
    async def main():
        async with planned(tmp_path) as world:
            world.is_up = False
            reporting = asyncio.create_task(world.reporting())
            await until_async(lambda: "does not return its metrics (Service Unavailable)" in caplog.text)
            asked = world.num_asked
            await until_async(lambda: world.num_asked >= asked + 5)
            assert not ordered(world)
            world.is_up = True
            await until_async(lambda: ordered(world))
            reporting.cancel()

    uvloop.run(main())
    assert caplog.text.count("does not return its metrics") == 1


def test_a_second_planner_waits_and_says_so_once(tmp_path, caplog):
    caplog.set_level("INFO", logger="dynabench")

    async def main():
        async with planned(tmp_path) as world:
            await until_async(lambda: world.given is not None)
            term = world.given.term
            async with await world.make() as runtime:
                waiting = asyncio.create_task(world.second(runtime))
                await until_async(lambda: "another planner is running in dynamo; this one waits" in caplog.text)
                assert world.given.term == term
                runtime.stopping.set()
                await waiting

    uvloop.run(main())
    assert caplog.text.count("another planner is running") == 1


def test_a_planner_does_not_choose_among_several_hands(tmp_path, caplog):
    async def main():
        async with planned(tmp_path) as world, await world.make() as other:
            world.runtime = other
            await world.begin()
            await until_async(lambda: "in dynamo, but found 2" in caplog.text)

    uvloop.run(main())


def test_a_start_slower_than_the_timeout_does_not_keep_a_planner_from_planning():
    planner = PlannerConfig(planner="dynamo-load", startup_timeout_s=5.0)
    service = PlannerService(None, PlannerServiceConfig(), Deployment(planner=planner))
    service._begin(ReportedFleet({"worker": (ReportedWorker("worker-0", "ready", "a", startup_s=40.0),)}))
    assert service._planner is not None


class Refusing:
    """Discovery that takes a key only the third time, as an etcd that was short of space."""

    instance_id = 1

    def __init__(self):
        self.discovery = self
        self.num_asked = 0
        self.fleet = None

    async def put(self, key, value):
        self.num_asked += 1
        if self.num_asked < 3:
            raise RuntimeUnavailableError("etcd refuses the key")
        self.fleet = msgspec.json.decode(value, type=ReportedFleet)


def test_hands_whose_report_is_refused_say_so_once_and_try_again(monkeypatch):
    monkeypatch.setattr("dynabench.planner.hands.AGAIN_S", 0.01)
    said = []

    async def main():
        hands, network = Hands(Deployment(), {}, namespace="dynamo", say=said.append), Refusing()
        obeying = asyncio.create_task(hands._obey_forever(None, network))
        hands.on_event(ProcessReady("worker-0", "a"))
        await until_async(lambda: network.fleet is not None)
        obeying.cancel()
        assert network.fleet.pools["worker"][0].state == "ready"

    uvloop.run(main())
    assert said == ["cannot report the workers to the planner; trying again: etcd refuses the key"]
