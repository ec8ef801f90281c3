"""vLLM is recorded synchronously and asynchronously, and the mocker takes the same steps."""

import json
import random

import pytest

from tests.support import commands

pytestmark = pytest.mark.timeout(300)
ENGINE = {
    "num_gpu_blocks": 15,
    "block_size": 32,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 96,
    "max_model_len": 384,
}


def scenario(rng, **engine):
    """Long prompts in a small cache; the model says a prompt's last token again as its second one, so some stop there."""
    shared = rng.choices(range(2, 2048), k=70)
    requests = []
    for number in range(20):
        prompt = rng.choices(range(2, 2048), k=rng.randrange(8, 150))
        request = {"id": f"r{number}", "max_tokens": rng.randrange(4, 60), "arrival_step": number // 2}
        match number % 4:
            case 0:
                request |= {"prompt": shared + prompt}
            case 1:
                request |= {"prompt": prompt, "stop_token_ids": [prompt[-1], 5]}
            case 2:
                request |= {"prompt": prompt}
            case 3:
                request |= {"prompt": [1] * len(prompt), "ignore_eos": False}  # 1 is the end token
        requests.append(request)
    requests[1]["max_tokens"] = 2  # it stops where its length ends it
    return {"name": "stops", "engine": ENGINE | engine, "requests": requests}


def dynabench(home, *arguments):
    environment = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return commands.dynabench(*arguments, cwd=home, timeout=200, env=environment)


@pytest.fixture(params=[None, True], ids=["default", "asynchronous"])
def recorded(tmp_path, request):
    """A recording as vLLM does by default, which on CPUs is synchronously, and one made asynchronously."""
    engine = {} if request.param is None else {"async_scheduling": request.param}
    (tmp_path / "scenario.json").write_text(json.dumps(scenario(random.Random(3), **engine)))
    done = dynabench(tmp_path, "record", "--scenario", "scenario.json", "--out", "steps.jsonl")
    assert done.returncode == 0, done.stderr[-3000:]
    return tmp_path


def test_what_is_recorded_verifies_with_chunks_preemptions_and_stops(recorded):
    head, *rows = [json.loads(line) for line in (recorded / "steps.jsonl").read_text().splitlines()]
    is_async = head["scenario"]["resolved"]["async_scheduling"]
    assert is_async == head["scenario"]["engine"].get("async_scheduling", False)
    assert all(row["updated"] == (row["step"] - 1 if is_async else row["step"]) for row in rows[1:])
    reasons = [reason for row in rows for reason in row["finished"].values()]
    assert sorted(set(reasons)) == ["length", "stop"]
    assert len(reasons) == 20
    assert any(row["preempted"] for row in rows if "preempted" in row)
    assert any(any(row.get("wasted", ())) for row in rows) == is_async
    done = dynabench(recorded, "verify", "steps.jsonl")
    assert "matches vLLM" in done.stdout, done.stdout


def test_settings_that_vllm_refuses_are_one_line(tmp_path):
    refused = scenario(random.Random(3), max_model_len=100_000)
    (tmp_path / "scenario.json").write_text(json.dumps(refused))
    done = dynabench(tmp_path, "record", "--scenario", "scenario.json", "--out", "steps.jsonl")
    assert done.returncode == 2
    assert "rejects the settings of the scenario" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "steps.jsonl").exists()
