"""`dynabench plan`: the question of how many GPUs, from the command line to the answer."""

import json
import re
from pathlib import Path

import pytest
import yaml

from dynabench.capacity.model_error import KNOWN, model_error
from dynabench.capacity.settings import PlanConfig
from dynabench.deployment.file import read
from mocker.timing.config import TimingConfig
from tests.support.commands import dynabench

MODEL = ("--model", "Qwen/Qwen3-8B", "--gpu", "h100", "--rate-scale", "3", "--max-requests", "300")
SMALL = (*MODEL, "--vary", "max_num_batched_tokens=512,2048", "--tensor-parallel-size", "1", "--loads", "1,2")
LIMITS = ("--slo", "ttft.p90 <= 400ms", "--slo", "tpot.p90 <= 14ms")


def planned(out, *flags):
    done = dynabench("plan", *flags, "--out", out, env={"COLUMNS": "160"})
    return done, json.loads((out / "plan.json").read_text()) if (out / "plan.json").exists() else None


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    out = tmp_path_factory.mktemp("plan") / "out"
    done, answer = planned(out, *SMALL, *LIMITS)
    assert done.returncode == 0, done.stderr
    return out, done.stdout, answer


def test_the_fewest_gpus_are_named_with_what_binds_and_how_sure_it_is(small):
    _, text, answer = small
    best = answer["layouts"][0]
    assert answer["verdict"].startswith(f"{best['gpus']} GPUs (workers {best['workers']}, TP 1, chunk")
    assert all(outcome["state"] == "met" and outcome["margin"] >= 0 for outcome in best["outcomes"])
    assert [sure["limit"] for sure in answer["sureness"]] == ["ttft.p90 <= 400 ms", "tpot.p90 <= 14 ms"]
    assert answer["sureness"][0]["low"] < answer["sureness"][0]["value"] < answer["sureness"][0]["high"]
    assert (
        "(simulated means were 2.6% off for meta-llama/Llama-3.1-70B fp8 on vllm and h100)"
        in answer["sureness"][1]["text"]
    )
    assert re.search(r"vllm serve Qwen/Qwen3-8B .*--max-num-batched-tokens (512|2048) .*# \d+ of them", text)
    assert [at["load"] for at in answer["loads"]] == [1.0, 2.0]
    assert answer["loads"][1]["gpus"] > answer["loads"][0]["gpus"] == best["gpus"]


def test_one_worker_fewer_misses_the_limits(small):
    _, _, answer = small
    best = answer["layouts"][0]
    fewer = (*MODEL, "--workers", str(best["workers"] - 1), "--tensor-parallel-size", "1", "--router-mode", "kv")
    flags = (*fewer, "--max-num-batched-tokens", str(best["changes"]["max_num_batched_tokens"]), *LIMITS)
    done = dynabench("simulate", *flags, "--out", small[0].parent / "fewer")
    assert done.returncode == 0, done.stderr
    assert " missed by " in done.stdout


def test_what_it_names_is_a_deployment_that_is_read(small):
    out, _, answer = small
    deployment = read(out / "deployment.yaml")
    assert deployment.num_workers == answer["layouts"][0]["workers"]
    assert deployment.pools[0].timing.gpu == "h100"
    assert deployment.router_mode == "kv"
    assert yaml.safe_load((out / "deployment.yaml").read_text())["pools"]


def test_the_same_plan_again_simulates_nothing(small):
    out, _, answer = small
    done, again = planned(out, *SMALL, *LIMITS, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout) == {"folder": str(out)} | again
    assert again["simulated"] == 0
    assert again["layouts"] == answer["layouts"]
    other = dynabench("plan", *SMALL, "--slo", "ttft.p90 <= 401ms", "--out", out)
    assert (other.returncode, "holds a plan with other settings" in other.stderr) == (2, True)


def test_the_cheapest_of_several_gpus_is_found(tmp_path):
    flags = (*MODEL[:2], *MODEL[4:], "--tensor-parallel-size", "1", "--max-num-batched-tokens", "2048", "--loads", "1")
    done, answer = planned(tmp_path / "out", *flags, *LIMITS, "--price", "h100=2.5", "--price", "h200=3.9")
    assert done.returncode == 0, done.stderr
    known = [layout for layout in answer["layouts"] if layout["gpus"]]
    assert known[0]["cost"] == min(layout["cost"] for layout in known)
    assert f"It costs {known[0]['cost']:,.4g}" in answer["verdict"]
    assert {layout["changes"]["gpu"] for layout in answer["layouts"]} == {"h100", "h200"}


def test_prefill_and_decode_apart_are_tried_beside_the_others(tmp_path):
    flags = (*MODEL, "--tensor-parallel-size", "1", "--max-num-batched-tokens", "2048", "--loads", "1")
    done, answer = planned(tmp_path / "out", *flags, "--vary", "prefill_workers=1,2", *LIMITS)
    assert done.returncode == 0, done.stderr
    apart = [layout for layout in answer["layouts"] if "prefill_workers" in layout["changes"]]
    assert len(apart) == 2
    assert len(answer["layouts"]) == 3


def test_what_cannot_be_is_listed_and_what_cannot_be_met_is_said(tmp_path):
    done, answer = planned(
        tmp_path / "out", "--model", "meta-llama/Llama-3.1-70B", "--gpu", "h100", "--max-requests", "50",
        "--tensor-parallel-size", "1", "--slo", "ttft.p50 <= 1s",
    )  # fmt: skip
    assert done.returncode == 1
    assert answer["verdict"] == "No layout can meet the limits; the reasons are below."
    assert "the weights need 131.4 GiB on each GPU" in done.stdout
    tight, answer = planned(tmp_path / "tight", *MODEL, "--slo", "tpot.p50 <= 1ms")
    assert tight.returncode == 1
    assert "less than a decode step of a single sequence takes" in tight.stdout
    few, answer = planned(
        tmp_path / "few", *MODEL, "--tensor-parallel-size", "1", "--max-num-batched-tokens", "2048",
        "--slo", "tpot.p90 <= 7ms", "--max-gpus", "2",
    )  # fmt: skip
    assert few.returncode == 1
    assert answer["verdict"] == "No layout of up to 2 GPUs meets the limits (--max-gpus 2)."


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ((), "a plan needs limits"),
        (("--slo", "ttft.p99 <= 1s"), "slo 'ttft.p99 <= 1000 ms' cannot be told from 300 requests; a p99 takes 368"),
        (("--price", "h100"), "price 'h100' is not understood; expected a GPU and its price, such as h100=2.5"),
        (("--loads", "1,x"), "loads is '1,x'; expected multiples of the rate"),
        (("--slo", "ttft.p90 <= 1s", "--vary", "chunk=1"), "chunk is not a setting that can be varied"),
        (("--slo", "ttft.p90 <= 1s", "--vary", "max_num_batched_token=1"), "did you mean max_num_batched_tokens?"),
    ],
)
def test_what_makes_no_sense_is_one_line(tmp_path, flags, problem):
    done = dynabench("plan", *MODEL, *flags, "--out", tmp_path / "x")
    assert done.returncode == 2
    assert problem in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_prices_are_read():
    assert PlanConfig(price=("h100=2.5", "b200=4")).prices == {"h100": 2.5, "b200": 4.0}


def test_known_errors_are_those_of_the_page_on_fidelity():
    page = (Path(__file__).parents[2] / "docs/fidelity.md").read_text()
    for known in KNOWN:
        rows = [row for row in page.splitlines() if row.startswith("|") and f"| {known.points} |" in row]
        name = known.model.rpartition("/")[2].replace("-", " ").lower()[:9]
        cells = [row for row in rows if name in row.replace("-", " ").lower() and known.gpu in row.lower()]
        assert any(f"{known.tpot * 100:.1f} / " in row and f"{known.ttft * 100:.1f} / " in row for row in cells), known


def test_the_known_error_is_that_of_the_model_most_like_it():
    assert model_error(TimingConfig(model="meta-llama/Llama-3.1-70B", gpu="b200", quantization="fp4")).points == 60
    assert model_error(TimingConfig(model="meta-llama/Llama-3.1-70B", gpu="b200", quantization="fp4")).tpot == 0.045
    assert model_error(TimingConfig(model="Qwen/Qwen3-8B", gpu="h100")).model == "meta-llama/Llama-3.1-70B"
    assert model_error(TimingConfig(model="Qwen/Qwen3-8B", gpu="l40s")) is None
    assert model_error(TimingConfig()) is None
