"""Step times fitted to what a client measured: here, to simulations with known step times."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from dynabench.arm import Arm, ClientConfig, Run, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.experiment.manifest import manifest_of
from dynabench.experiment.settings import ExperimentConfig
from dynabench.experiment.step_times import describe_step_times
from dynabench.experiment.workload_file import write_workload
from dynabench.fidelity.from_runs import contents, described, fit_runs
from dynabench.fidelity.least_squares import fit
from dynabench.fidelity.measured_loads import read_loads
from dynabench.terminal import Terminal
from dynabench.virtual.run import simulate
from foundation.errors import UserError
from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from reports import folder
from tests.support.commands import dynabench
from workloads import Request, Workload
from workloads.pacing import LoadConfig

TRUE = np.array([0.004, 3e-4, 5e-5, 1e-8, 0.002])
"""Step, sequence, prompt token, pair of tokens, request outside the engine (s)."""
ENGINE = EngineConfig(num_gpu_blocks=1000, max_num_seqs=16, max_num_batched_tokens=512)
LENGTHS = [(40 + 37 * number % 300, 6 + number % 5) for number in range(20)]
REQUESTS = [
    Request(0.0, isl, osl, tuple(range(100 * number, 100 * number - isl // -16)))
    for number, (isl, osl) in enumerate(LENGTHS)
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Return what writes the folder of a run at a concurrency against an engine with the true step times."""
    base = tmp_path_factory.mktemp("measured")
    file = base / "w.jsonl"
    workload = Workload("w", 16, REQUESTS)
    write_workload(workload, file)
    times = base / "true.json"
    times.write_text(json.dumps(contents(TRUE, ENGINE, 1)))

    def run_at(concurrency, *, is_live=True, change=None, url="http://server:8000", model=""):
        of = re.sub(r"[^\w]+", "-", f"{url} {model}" * ((url, model) != ("http://server:8000", "")))
        out = base / f"{concurrency}-{is_live}-{change.__name__ if change else ''}{of}"
        if not out.exists():
            pool = Pool(replicas=1, mocker=ENGINE, timing=TimingConfig(timing_file=str(times)))
            load = LoadConfig(concurrency=concurrency)
            settings = Settings(Deployment(pools=(pool,)), load=load)
            record = simulate(Run.alone(settings), workload)
            record = dataclasses.replace(record, is_live=is_live, facts={}, arm="endpoint")
            record = change(record) if change else record
            pool = dataclasses.replace(pool, worker=dataclasses.replace(pool.worker, model_name=model))
            settings = Settings(Deployment(pools=(pool,)), load=load, client=ClientConfig(url=url))
            arms = [Arm("endpoint", settings, {})]
            manifest = manifest_of("wall", (file,), workload, ExperimentConfig(), settings, arms, [record])
            folder.write(out, manifest | {"left_out": []}, [record], with_charts=False)
        return out

    return run_at


def fitted(tmp_path, *folders):
    return fit_runs(folders, ENGINE, 1, tmp_path / "c.json", Terminal())


def test_what_is_fitted_at_two_loads_predicts_a_third(measured, tmp_path):
    found = fitted(tmp_path, measured(8), measured(1))
    for load in found["covers"]:
        assert abs(load["ttft_error_percent"]) < 2, load
        assert abs(load["tpot_error_percent"]) < 2, load
    assert [load["in_flight"] for load in found["covers"]] == pytest.approx([1, 8], rel=0.3)
    assert found["held_out_percent"] == {}
    lines = described(found, tmp_path / "c.json")
    assert "measure a third between the two" in " ".join(lines)
    assert lines[-1].endswith("c.json --workers 1 --max-num-seqs 16 --max-num-batched-tokens 512")
    pool = Pool(replicas=1, mocker=ENGINE, timing=TimingConfig(timing_file=str(tmp_path / "c.json")))
    settings = Settings(Deployment(pools=(pool,)), load=LoadConfig(concurrency=4))
    again = simulate(Run.alone(settings), Workload("w", 16, REQUESTS)).requests
    [third] = read_loads((measured(4),))
    assert (again.first_token_s - again.sent_s).mean() == pytest.approx(np.nanmean(third.ttft_s), rel=0.05)
    assert describe_step_times([settings.deployment]) == "fitted to what a client saw of http://server:8000"


@pytest.mark.long
def test_a_load_between_two_others_is_held_out(measured, tmp_path):
    found = fitted(tmp_path, measured(1), measured(4), measured(8))
    assert found["held_out_percent"]["ttft"] < 5
    assert found["held_out_percent"]["tpot"] < 5
    assert "held out, each load between two others predicted from them" in " ".join(described(found, tmp_path / "c"))


def test_a_run_of_a_server_is_validated_with_what_was_fitted(measured, tmp_path):
    fitted(tmp_path, measured(8), measured(1))
    words = ("--real", measured(4), "--concurrency", "4", "--timing-file", tmp_path / "c.json")
    workload = measured(4).parent / "w.jsonl"
    done = dynabench("validate", workload, *words, "--fail-if", "tpot.mean > 5%", "--out", tmp_path / "v")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "round-robin" in done.stdout


def longer(record):
    """A server whose tokenizer makes half as many tokens again of each prompt."""
    return dataclasses.replace(record, requests=record.requests.replace(isl=record.requests.isl * 3 // 2))


def hitting(record):
    """A server that found half of each prompt in its cache, although prompts share nothing."""
    return dataclasses.replace(record, requests=record.requests.replace(cached_tokens=record.requests.isl // 2))


def failing(record):
    """A server that refused everything."""
    return dataclasses.replace(record, requests=record.requests.replace(error=["no"] * len(record.requests)))


def test_prompts_of_another_length_are_the_server_s(measured):
    [load] = read_loads((measured(1, change=longer),))
    assert load.shares_nothing
    assert load.workload.requests[0].input_length == 60
    [load] = read_loads((measured(1),))
    assert not load.shares_nothing
    assert load.workload.requests[0].hash_ids == REQUESTS[0].hash_ids


def test_one_load_is_not_enough(measured, tmp_path):
    for folders in ((measured(4),), (measured(4), measured(4))):
        with pytest.raises(UserError, match="at one load only: 4-True-: 4 requests at a time"):
            fitted(tmp_path, *folders)


def test_runs_of_several_servers_or_models_are_not_fitted_together(measured, tmp_path):
    ours, theirs = measured(1), measured(8, url="http://127.0.0.1:8000")
    with pytest.raises(UserError) as caught:
        fitted(tmp_path, ours, theirs)
    assert str(caught.value) == (
        f"--from names runs of 2 servers, and step times are those of one: http://server:8000 ({ours}) and "
        f"http://127.0.0.1:8000 ({theirs}); give --from only folders of the same server"
    )
    one, other = measured(1, model="a"), measured(8, model="b")
    with pytest.raises(
        UserError, match=re.escape(f"runs of 2 models, and step times are those of one: a ({one}) and b")
    ):
        fitted(tmp_path, one, other)
    with pytest.raises(UserError, match=r"runs of 2 servers.*1-True-, \S+2-True-, \S+4-True- and 1 more\)"):
        fitted(tmp_path, *map(measured, (8, 4, 1, 2)), theirs)


def test_a_server_is_known_by_where_it_is_and_the_model_by_its_name(measured):
    [load] = read_loads((measured(1, url="http://server:8000/v1/", model="m"),))
    assert (load.server, load.model) == ("http://server:8000", "m")


def test_only_live_runs_with_answers_are_fitted_to(measured):
    with pytest.raises(UserError, match="has no live run; expected the folder of dynabench run --url"):
        read_loads((measured(1, is_live=False),))
    with pytest.raises(UserError, match="endpoint has no answers"):
        read_loads((measured(1, change=failing),))


def test_another_cache_than_the_server_s_is_said():
    covered = {"load": "at-4", "in_flight": 4.0, "isl": [1, 2], "ttft_error_percent": 0.0, "tpot_error_percent": None}
    found = {"fitted_to": "x", "held_out_percent": {}, "workers": 1, "engine": {}}

    def lines(real, simulated):
        loads = [covered | {"hit_share": real, "simulated_hit_share": simulated}] * 2
        return " ".join(described(found | {"covers": loads}, Path("c.json")))

    assert "at-4: the server found 50% of the prompt tokens in its cache, the simulation 0%: do --enable" in lines(
        0.5, 0.0
    )
    assert "in its cache" not in lines(0.5, 0.48) + lines(None, 0.5)


def test_the_share_of_hits_is_what_answers_say(measured):
    [load] = read_loads((measured(1, change=hitting),))
    assert load.hit_share == pytest.approx(0.5, abs=0.01)


def test_a_file_is_not_replaced(measured, tmp_path):
    (tmp_path / "c.json").write_text("mine")
    with pytest.raises(UserError, match="choose another file, or remove it"):
        fitted(tmp_path, measured(1), measured(8))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "calibrate needs a model to run here, or live runs of a server: --from FOLDER --from FOLDER"),
        (["m", "--from", "x"], "--from fits step times to past runs; leave out m, which would be run"),
        (["m", "--block-size", "8"], "settings of a simulated engine apply to --from"),
        (["--from", "/no/such"], "/no/such: not a results folder"),
    ],
)
def test_a_model_is_run_or_past_runs_are_fitted(words, why):
    done = dynabench("calibrate", *words)
    assert done.returncode == 2
    assert why in " ".join(done.stderr.split())


def test_coefficients_that_are_not_linear_are_found_and_never_negative():
    at = np.linspace(0, 3, 20)
    target = 2 * np.exp(-0.7 * at)

    def residuals(x):
        return x[0] * np.exp(-x[1] * at) + x[2] - target

    assert fit(residuals, np.array([1.0, 0.3, 0.5]), rounds=40) == pytest.approx([2, 0.7, 0], abs=0.02)
