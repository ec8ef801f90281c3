"""LoRA adapters in virtual time: who shares KV, how often adapters are loaded, and what a report says of it."""

from dataclasses import replace

import pytest

from dynabench.arm import Run, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.engines import refuse_idle_settings
from dynabench.experiment.no_effect import no_effect
from dynabench.live.run import serving_adapters
from mocker import EngineConfig
from reports.summarize import summarize
from reports.tables.adapters import adapter_grid
from tests.support.commands import dynabench
from tests.support.simulated import deployed, simulate_pool
from workloads import Request, Workload, WorkloadError, formats

LORA = EngineConfig(enable_lora=True, max_loras=1, lora_load_ms=50.0, lora_read_ms=200.0, block_size=16)


def workload(*adapters):
    """Return requests with one prompt, the next long after the one before."""
    return Workload("w", 16, [Request(10.0 * n, 33, 4, (7, 8, n), adapter=name) for n, name in enumerate(adapters)])


def test_requests_share_the_kv_of_their_adapter_only():
    run = simulate_pool(workload("", "a", "b", "a", ""), engine=LORA)
    assert run.requests.cached_tokens.tolist() == [0, 0, 0, 32, 32]
    assert run.requests.endless_tokens.tolist() == [0, 0, 0, 32, 32]
    assert run.requests.adapter.tolist() == ["", "a", "b", "a", ""]


@pytest.mark.parametrize(("mode", "hits"), [("kv", [0, 0, 32, 32]), ("round-robin", [0, 0, 0, 0])])
def test_a_router_knows_whose_adapter_a_prefix_belongs_to(mode, hits):
    run = simulate_pool(workload("a", "b", "a", "b"), mode, workers=4, engine=LORA)
    assert run.requests.cached_tokens.tolist() == hits
    if mode == "kv":
        assert run.requests.predicted_tokens.tolist() == hits


def test_the_first_request_of_an_adapter_waits_for_it():
    ttft_s = {}
    for adapters in (("", "", ""), ("a", "a", "b")):
        requests = simulate_pool(workload(*adapters), engine=LORA).requests
        ttft_s[adapters] = requests.first_token_s - requests.intended_s
    waits = ttft_s["a", "a", "b"] - ttft_s["", "", ""]
    assert waits[:2].tolist() == pytest.approx([0.25, 0.0], abs=1e-6)
    assert waits[2] > 0.25  # and it finds no KV


def test_a_run_counts_requests_and_loads_of_each_adapter():
    run = simulate_pool(workload("a", "b", "a", "a", ""), engine=LORA)
    found = {use.adapter: (use.requests, use.loads, use.reads, round(use.stall_s, 6)) for use in run.adapters}
    assert found == {"a": (3, 2, 2, 0.5), "b": (1, 1, 1, 0.25)}
    grid = adapter_grid(summarize([run]))
    rows = {label.split(": ")[1]: [cells[0], *cells[2:]] for label, cells in grid.rows}
    assert rows == {
        "all 2 adapters": ["4", "3", "3", "0.75"],
        "a": ["3", "2", "2", "0.50"],
        "b": ["1", "1", "1", "0.25"],
    }
    assert adapter_grid(summarize([simulate_pool(workload("", ""))])) is None


def test_a_workload_with_adapters_needs_engines_that_serve_them():
    with pytest.raises(WorkloadError, match="the first for 'a', and enable_lora is false; expected --enable-lora"):
        simulate_pool(workload("", "a"))


def test_settings_of_adapters_without_adapters_are_refused():
    with pytest.raises(ValueError, match="max_loras is 3, but there are no adapters; expected enable_lora with it"):
        refuse_idle_settings([deployed(engine=EngineConfig(max_loras=3))])
    refuse_idle_settings([deployed(engine=EngineConfig(max_loras=3, enable_lora=True))])


def test_adapters_that_nobody_asks_for_are_said_to_change_nothing():
    assert (
        "enable_lora, because no request"
        in no_effect("virtual", workload("", ""), [deployed(engine=LORA)])["No effect"]
    )
    assert "lora" not in no_effect("virtual", workload("a"), [deployed(engine=LORA)]).get("No effect", "")


def test_from_the_synthesizer_to_the_report(tmp_path):
    made = tmp_path / "made.jsonl"
    dynabench("workload", "synth", made, "--requests", 60, "--rate", 20, "--adapters", 6)
    done = dynabench(
        "simulate", made, "--enable-lora", "--router-mode", "kv+adapter(1)", "--workers", 2, "--out", tmp_path / "out"
    )
    assert done.returncode == 0, done.stderr
    assert "Which LoRA adapters were asked for?" in done.stdout
    assert f"all {len({request.adapter for request in formats.read(made)})}" in done.stdout
    assert "Which LoRA adapters" in (tmp_path / "out" / "report.html").read_text()
    assert [r.adapter for r in formats.read(tmp_path / "out")] == [r.adapter for r in formats.read(made)]


def test_live_mockers_serve_the_adapters_that_requests_name_unless_some_are_given():
    def served(pool):
        run = serving_adapters(Run.alone(Settings(Deployment(pools=(pool,)))), workload("b", "", "a"))
        return run.deployment.pools[0].mocker.adapter_names

    assert served(Pool(mocker=LORA)) == ("b", "a")
    assert served(Pool(mocker=replace(LORA, lora_modules="a, b,c"))) == ("a", "b", "c")
    assert served(Pool()) == ()  # and check_fits refuses it
    with pytest.raises(WorkloadError, match="workers with engine vllm serve none; expected --url"):
        served(Pool(engine="vllm"))
