"""A real vLLM is measured, recorded with times, and held against what is simulated of it."""

import json
from itertools import pairwise

import pytest

from tests.support import commands

pytestmark = pytest.mark.timeout(600)
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "num_gpu_blocks_override": 120,
    "gpu_memory_utilization": 0.2,
    "max_num_seqs": 8,
    "block_size": 32,
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,
}


def dynabench(home, *arguments):
    environment = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return commands.dynabench(*arguments, cwd=home, timeout=500, env=environment)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    path = tmp_path_factory.mktemp("times")
    (path / "engine.json").write_text(json.dumps(ENGINE))
    rows = [
        {"timestamp": 400 * n, "input_length": 65 + n, "output_length": 8, "hash_ids": [n % 3, 10 + n, 100 + n]}
        for n in range(12)
    ]
    (path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def calibration(home, folder):
    flags = ["--extra-engine-args", "engine.json", "--duration-s", 12, "--steps", "steps"]
    done = dynabench(home, "calibrate", folder, *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "use it: dynabench simulate --timing-file calibration.json --block-size 32" in done.stdout
    return json.loads((home / "calibration.json").read_text())


def test_a_calibration_tells_what_was_measured_and_how_well_it_fits(home, calibration):
    engine = calibration["engine"]
    assert (engine["name"], engine["num_gpu_blocks"], engine["max_num_seqs"]) == ("vllm", 120, 8)
    assert engine["async_scheduling"] is False  # as vLLM's default is on CPUs
    assert calibration["held_out_percent"]["steps"] > 300
    assert abs(calibration["held_out_percent"]["total"]) < 25
    assert 0 < calibration["overhead"]["request_ms"] < 1000
    assert len(list((home / "steps").iterdir())) == 1
    again = dynabench(home, "calibrate", "nothing")
    assert again.returncode == 2
    assert "calibration.json exists; choose another file, or remove it" in again.stderr


def test_real_and_simulated_runs_stand_side_by_side(home, folder, calibration):
    flags = ["--engine", "vllm", "--model", folder, "--extra-engine-args", "engine.json", "--workers", 1]
    flags += ["--timing-file", "calibration.json", "--trace-block-size", 32, "--router-mode", "round-robin"]
    done = dynabench(home, "validate", "trace.jsonl", *flags, "--repeats", 2, "--out", "held")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((home / "held" / "experiment.json").read_text())["fidelity"]["arms"]["round-robin"]
    rows = {row["name"]: row for row in found["deviations"]}
    # Whatever the times: what is cached and preempted is exact.
    assert rows["hit_share"]["real"] == rows["hit_share"]["simulated"] > 0
    assert rows["preemptions"]["real"] == rows["preemptions"]["simulated"] == 0
    assert rows["e2e.mean"]["spread"] is not None
    assert abs(rows["e2e.mean"]["error"]) < 1


def test_an_asynchronous_engine_is_measured_and_simulated_as_such(home, folder, calibration):
    (home / "ahead.json").write_text(json.dumps(ENGINE | {"async_scheduling": True}))
    engine = ["--extra-engine-args", "ahead.json"]
    done = dynabench(
        home, "calibrate", folder, *engine, "--duration-s", 6, "--steps", "ahead", "--out", "ahead-times.json"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "asynchronous scheduling" in done.stdout
    assert json.loads((home / "ahead-times.json").read_text())["engine"]["async_scheduling"] is True
    (log,) = (home / "ahead").iterdir()
    steps = [row for kind, row in map(json.loads, log.read_text().splitlines()) if kind == "step"]
    num_ahead = sum(after[0] < before[1] for before, after in pairwise(steps))
    assert num_ahead > len(steps) / 2  # scheduled before the result of the step before was there
    held = ["--engine", "vllm", "--model", folder, *engine, "--trace-block-size", 32, "--router-mode", "round-robin"]
    done = dynabench(home, "validate", "trace.jsonl", *held, "--timing-file", "calibration.json", "--out", "held-ahead")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "those of an engine that schedules synchronously" in " ".join(done.stdout.split())
    manifest = (home / "held-ahead" / "experiment.json").read_text()
    assert '"async_scheduling":true' in manifest.replace(" ", "").replace("\n", "")


def test_a_recording_keeps_the_time_of_each_step(home, calibration):
    requests = [
        {"id": f"r{n}", "prompt": [n + 2] * (20 + 30 * n), "max_tokens": 6, "arrival_step": n} for n in range(5)
    ]
    engine = {
        "num_gpu_blocks": 20,
        "block_size": 32,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 512,
    }
    (home / "scenario.json").write_text(json.dumps({"name": "times", "engine": engine, "requests": requests}))
    done = dynabench(home, "record", "--scenario", "scenario.json", "--out", "times.jsonl")
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (home / "times.jsonl").read_text().splitlines()]
    assert all(row["duration_ms"] > 0 for row in rows[1:])
    assert dynabench(home, "verify", "times.jsonl").returncode == 0
    compared = dynabench(home, "validate", "--real", "times.jsonl", "--timing-file", "calibration.json")
    assert compared.returncode == 0, compared.stderr[-3000:]
    assert "with prefill" in compared.stdout
    assert "decode only" in compared.stdout
