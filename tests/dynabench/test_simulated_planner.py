"""A planner at work on a simulated fleet."""

from dataclasses import replace

import pytest

from dynabench.arm import Run, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.virtual.planner import SimulatedPlanner, load_of
from dynabench.virtual.run import cluster_of, simulate
from reports.figures import fleet as fleet_figures
from reports.figures import slo
from serving.life import DisaggregationConfig
from serving.planner import PLANNERS, PlannerConfig
from tests.dynabench.test_fleet import aggregated
from tests.dynabench.test_handover import apart, workload

BUSY = workload(*[(0.05 * place, 320, 100) for place in range(400)])


def planned(planner="hpa", deployment=None, **settings):
    """Return the record of a run of a deployment with a planner that looks every second."""
    config = PlannerConfig(planner=planner, planner_interval_s=1.0, **settings)
    return simulate(Run.alone(Settings(replace(deployment or aggregated(startup_s=2.0), planner=config))), BUSY)


def test_a_planner_adds_workers_while_requests_wait():
    fleet = planned(hpa_target=1.0, max_replicas=6).fleet
    assert fleet.planner == "hpa"
    assert fleet.changes[0].before == 2
    assert max(change.after for change in fleet.changes) == 6
    [pool] = fleet.pools
    first = fleet.changes[0]
    assert [row.time_s for row in pool.history][:3] == [0.0, first.time_s, first.time_s + 2.0]
    assert fleet.decisions == int(fleet.length_s)


def test_gpu_hours_are_those_of_the_workers_that_the_history_shows():
    record = planned(hpa_target=1.0, max_replicas=6)
    found = fleet_figures.figures([record], [slo.parse_slo("ttft <= 1s")], fleet_figures.windows([record]))
    assert found.mean_workers * record.fleet.length_s / 3600 == pytest.approx(found.gpu_h)
    assert found.busy_gpu_h < found.gpu_h < found.peak_gpu_h
    assert found.most_workers == 6
    assert 2 + found.added - found.removed == record.fleet.changes[-1].after


def test_the_fleet_stays_as_it_is_without_a_planner():
    fleet = planned("static").fleet
    assert (fleet.planner, fleet.changes, fleet.decisions) == ("static", (), 0)
    assert fleet.gpu_s == pytest.approx(2 * fleet.length_s)


def test_a_planner_never_has_more_than_its_gpus():
    fleet = planned(hpa_target=0.1, max_gpu_budget=3).fleet
    assert max(row.on_gpus for row in fleet.pools[0].history) == 3


def test_an_advisory_planner_changes_nothing_and_notes_what_it_would():
    fleet = planned(hpa_target=1.0, max_replicas=6, advisory=True).fleet
    assert fleet.changes == ()
    assert {row.ready for row in fleet.pools[0].history} == {2}
    assert any(note.startswith("advisory: worker would have ") for note in fleet.notes)
    assert not any("not the" in note for note in fleet.notes)


def test_a_missing_limit_of_a_planner_is_named():
    with pytest.raises(ValueError, match="planner dynamo-sla needs a TTFT limit"):
        planned("dynamo-sla")


@pytest.mark.parametrize("planner", ["hpa", "kpa", "wva", "dynamo-load", "dynamo-sla", "dynamo-sla-2025", "lead-time"])
def test_every_planner_keeps_every_request_of_prefill_and_decode_workers(planner):
    record = planned(planner, apart(2, 2), planner_ttft_ms=2000.0, planner_itl_ms=50.0, max_replicas=5)
    assert record.requests.succeeded.all()
    assert len(record.requests) == len(BUSY)


def test_a_load_has_the_work_of_a_rank():
    made = cluster_of(
        Run.alone(Settings(aggregated(replicas=1))), workload((0.0, 96, 100), (0.0, 320, 100), (1.0, 96, 5))
    )
    made.resume(0.7)
    [rank] = made.ranks
    load = load_of(rank, 0.7)
    assert load.num_requests == 2
    assert load.queued_prefill_tokens == 0
    assert load.decode_kv_tokens == 96 + 320 + 2 * 51


def test_a_cluster_is_observed_at_the_planners_interval():
    config = PlannerConfig(planner="hpa", planner_interval_s=5.0)
    made = cluster_of(Run.alone(Settings(aggregated())), BUSY)
    planning = SimulatedPlanner(config, made)
    made.run()
    assert planning.num_decisions == int(max(made.log.last_token_s) / 5)


YEAR_S = 3.2e7


def with_gap(planner, gap_s, deployment=None, **settings):
    """Return a cluster and its planner, after two bursts of requests with a gap between them."""
    config = PlannerConfig(
        planner=str(planner), planner_ttft_ms=2000.0, planner_itl_ms=50.0, max_replicas=5, **settings
    )
    bursts = workload(*[(start + 0.05 * place, 320, 100) for start in (0.0, gap_s) for place in range(100)])
    made = cluster_of(Run.alone(Settings(replace(deployment or aggregated(startup_s=2.0), planner=config))), bursts)
    planner = SimulatedPlanner(config, made)
    made.run()
    return made, planner


@pytest.mark.parametrize("planner", [name for name in PLANNERS if name != "dynamo-sla-2025"])
def test_the_work_of_a_planner_in_a_year_without_requests_follows_its_memory_and_not_its_interval(planner):
    made, planner = with_gap(planner, YEAR_S)
    assert made.num_ended == 200
    assert planner.num_decisions == int(max(made.log.last_token_s) / planner.planner.interval_s)
    assert made.clock.num_events < 20_000


OWN = """
from serving.planner.policies.named import PLANNERS

class Own(PLANNERS["{}"]):
    rest = None
"""


@pytest.mark.parametrize("interval_s", [None, 3.5])
@pytest.mark.parametrize("planner", PLANNERS)
def test_looks_that_are_left_out_change_no_decision(planner, interval_s, tmp_path):
    own = tmp_path / "own.py"  # of the same policy, that does not say when it repeats itself
    own.write_text(OWN.format(planner))
    deployment = apart(2, 2) if planner == "dynamo-sla-2025" else None
    (made, skipping), (whole, looking) = (
        with_gap(name, 4000.0, deployment, planner_interval_s=interval_s, startup_timeout_s=60.0, lead_memory_s=600.0)
        for name in (planner, own)
    )
    assert skipping.changes == looking.changes
    assert (skipping.num_decisions, skipping.notes) == (looking.num_decisions, looking.notes)
    assert list(made.log.last_token_s) == list(whole.log.last_token_s)
    assert made.clock.num_events < whole.clock.num_events


@pytest.mark.parametrize(
    ("kind", "flow"), [("vllm", "source-first"), ("vllm", "destination-first"), ("sglang", None), ("trtllm", None)]
)
def test_a_planner_sees_when_first_tokens_came_also_with_the_kv(kind, flow):
    pools = tuple(Pool(name=name, role=name, replicas=2, engine_type=kind) for name in ("prefill", "decode"))
    disaggregation = DisaggregationConfig() if flow is None else DisaggregationConfig(flow=flow)
    run = Run.alone(Settings(Deployment(pools=pools, disaggregation=disaggregation)))
    answers = workload(*[(0.05 * place, 256, 1 + place % 7) for place in range(100)])
    cluster = cluster_of(run, answers)
    SimulatedPlanner(PlannerConfig(planner="hpa", advisory=True), cluster)
    cluster.run()
    counts = cluster.arrivals.counter.counts
    assert counts.num_first_tokens == counts.num_ended == 100
    requests = simulate(run, answers).requests
    assert counts.ttft_s == pytest.approx(float((requests.first_token_s - requests.intended_s).sum()))
