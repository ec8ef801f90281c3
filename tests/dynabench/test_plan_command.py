"""`dynabench plan`: the question of how many GPUs, from the command line to the answer."""

import contextlib
import json
import os
import pty
import random
import re
import shutil
import signal
import subprocess
import sys
import threading

import pytest
import yaml

from dynabench.capacity.settings import PlanConfig
from dynabench.deployment.file import read_deployment
from tests.support.commands import dynabench
from tests.support.waiting import PATIENCE_S, until

MODEL = ("--model", "Qwen/Qwen3-8B", "--gpu", "h100", "--rate-scale", "3", "--max-requests", "300")
SMALL = (*MODEL, "--vary", "max_num_batched_tokens=512,2048", "--tensor-parallel-size", "1")
COLUMNS = "arrival=arrival,input=input,output=output"
LIMITS = ("--slo", "ttft.p90 <= 400ms", "--slo", "tpot.p90 <= 14ms")


def planned(out, *flags):
    done = dynabench("plan", *flags, "--out", out, env={"COLUMNS": "160"})
    return done, json.loads((out / "plan.json").read_text()) if (out / "plan.json").exists() else None


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    out = tmp_path_factory.mktemp("plan") / "out"
    done, answer = planned(out, *SMALL, *LIMITS, "--loads", "1,2")
    assert done.returncode == 0, done.stderr
    return out, done.stdout, answer


def test_the_fewest_gpus_are_named_with_what_binds_and_how_sure_it_is(small):
    _, text, answer = small
    best = answer["layouts"][0]
    assert answer["verdict"].startswith(f"{best['gpus']} GPUs (workers {best['workers']}, TP 1, chunk")
    assert all(outcome["state"] == "met" and outcome["margin"] >= 0 for outcome in best["outcomes"])
    assert [sure["limit"] for sure in answer["sureness"]] == ["ttft.p90 <= 400 ms", "tpot.p90 <= 14 ms"]
    assert answer["sureness"][0]["low"] < answer["sureness"][0]["value"] < answer["sureness"][0]["high"]
    sure = answer["sureness"][1]
    assert 0.1 < sure["chance"] < 0.9
    assert sure["real_low"] < sure["value"] < sure["real_high"]
    assert "only a hint, because that is far away, and a p90 was not measured; " in sure["text"]
    assert re.search(r"vllm serve Qwen/Qwen3-8B .*--max-num-batched-tokens (512|2048) .*# start \d+", text)
    assert [at["load"] for at in answer["loads"]] == [1.0, 2.0]
    assert answer["loads"][1]["gpus"] > answer["loads"][0]["gpus"] == best["gpus"]


def test_a_workload_that_is_too_short_for_a_steady_load_is_said_in_words_in_json_and_in_the_report(tmp_path):
    out, flags = tmp_path / "out", ("--tensor-parallel-size", "1", "--max-num-batched-tokens", "2048", "--loads", "1")
    done, answer = planned(out, *MODEL[:-1], "100", *flags, *LIMITS)
    text = done.stdout
    said = "so the load was never steady: use a trace of at least "
    assert said in answer["too_little"][-1]
    page = (out / "report.html").read_text()
    for shown in (text.replace("\n", " "), answer["verdict"], page):
        assert f" workers {answer['layouts'][0]['workers']}: {'; '.join(answer['too_little'])}." in shown
    assert f"Not certain: {answer['too_little'][0]}" in page


def test_one_worker_fewer_misses_the_limits(small):
    _, _, answer = small
    best = answer["layouts"][0]
    fewer = (*MODEL, "--workers", str(best["workers"] - 1), "--tensor-parallel-size", "1", "--router-mode", "kv")
    flags = (*fewer, "--max-num-batched-tokens", str(best["changes"]["max_num_batched_tokens"]), *LIMITS)
    done = dynabench("simulate", *flags, "--out", small[0].parent / "fewer")
    assert done.returncode == 0, done.stderr
    assert " missed by " in done.stdout


def test_why_not_fewer_and_the_headroom_to_each_limit_are_told(small):
    _, text, answer = small
    best = answer["layouts"][0]
    missed = [outcome for outcome in best["fewer"] if outcome["state"] == "missed"]
    assert f": {missed[0]['limit']} missed by " in answer["verdict"].partition("The nearest cheaper one is ")[2]
    for head in ("ttft.p90 headroom", "tpot.p90 headroom", "binds", "one worker fewer"):
        assert head in text
    assert "over " not in text.replace(" over it", "")
    unmet = [layout for layout in answer["layouts"] if layout["gpus"] is None]
    assert (": needs at least " in text) is bool(unmet)


def test_where_the_fewest_gpus_are_in_doubt_the_fewest_without_doubt_are_named(tmp_path):
    flags = (*MODEL, "--max-num-batched-tokens", "512", "--tensor-parallel-size", "1", "--loads", "1")
    done, answer = planned(tmp_path / "out", *flags, "--slo", "tpot.p90 <= 20ms")
    assert done.returncode == 0, done.stderr
    assert "This is not certain: " in answer["verdict"]
    certainly = "The cheapest one tried that certainly meets the limits is "
    [line] = [note for note in answer["notes"] if note.startswith(certainly)]
    assert line in done.stdout.replace("\n", " ")
    assert int(line.removeprefix(certainly).split()[0]) > answer["layouts"][0]["gpus"]


def test_the_file_it_names_gives_the_same_figures(small):
    out, _, answer = small
    flags = ("--rate-scale", "3", "--max-requests", "300", *LIMITS)
    done = dynabench("simulate", "-f", out / "deployment.yaml", *flags, "--out", out.parent / "again", "--json")
    assert done.returncode == 0, done.stderr
    [arm] = json.loads(done.stdout)["arms"].values()
    assert arm["outcomes"] == answer["layouts"][0]["outcomes"]


def test_the_load_to_which_it_holds_is_where_a_simulation_of_it_misses_a_limit(small):
    out, _, answer = small
    held = answer["held"]
    assert f"holds to {held['holds_to']:g}x of this traffic" in answer["verdict"]
    assert held["holds_to"] < held["misses_at"] <= 1.05 * held["holds_to"]
    for times, is_met in ((held["holds_to"], True), (held["misses_at"], False)):
        flags = ("--rate-scale", f"{3 * times:.4f}", "--max-requests", "300", *LIMITS, "--json")
        done = dynabench("simulate", "-f", out / "deployment.yaml", *flags, "--out", out.parent / f"at {times}")
        [arm] = json.loads(done.stdout)["arms"].values()
        assert all(outcome["state"] == "met" for outcome in arm["outcomes"]) is is_met


def test_what_it_names_is_a_deployment_that_is_read(small):
    out, _, answer = small
    deployment = read_deployment(out / "deployment.yaml")
    assert deployment.num_workers == answer["layouts"][0]["workers"]
    assert deployment.pools[0].timing.gpu == "h100"
    assert deployment.router_mode == "kv"
    assert yaml.safe_load((out / "deployment.yaml").read_text())["pools"]


def test_the_same_plan_again_simulates_nothing(small):
    out, _, answer = small
    done, again = planned(out, *SMALL, *LIMITS, "--loads", "1,2", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout) == {"folder": str(out)} | again
    assert again["simulated"] == 0
    assert (again["layouts"], again["held"]) == (answer["layouts"], answer["held"])
    less, fewer = planned(out, *SMALL, *LIMITS, "--loads", "1", "--max-gpus", "63", "--json")
    assert (less.returncode, fewer["simulated"], len(fewer["loads"])) == (0, 0, 1)
    planned(out, *SMALL, *LIMITS, "--loads", "1,2", "--json")
    other = dynabench("plan", *SMALL, "--slo", "ttft.p90 <= 401ms", "--loads", "1,2", "--out", out)
    assert (other.returncode, "contains another plan: " in other.stderr) == (2, True)


def test_limits_of_each_request_are_answered_with_a_chart_over_fleet_sizes(tmp_path):
    flags = ("--model", "meta-llama/Llama-3.1-8B", "--gpu", "h100", "--loads", "1", "--max-num-batched-tokens", "2048")
    limits = ("--slo", "ttft <= 800ms", "--slo", "e2e <= 60s")
    done, answer = planned(tmp_path / "out", *flags, "--tensor-parallel-size", "1", *limits)
    assert done.returncode == 0, done.stderr
    assert "ttft <= 800 ms and e2e <= 60000 ms in 99% met with " in answer["verdict"]
    assert "ttft and e2e headroom" in done.stdout.replace("\n", " ")
    assert (tmp_path / "out" / "charts" / "limits.svg").exists()


def test_an_answer_is_kept_and_printed_if_its_report_cannot_be_drawn(tmp_path):
    flags = (*MODEL, "--tensor-parallel-size", "1", "--max-num-batched-tokens", "2048", "--loads", "1", *LIMITS)
    planned(out := tmp_path / "out", *flags)
    shutil.rmtree(out / "charts")
    (out / "charts").write_text("not a folder\n")
    (out / "plan.json").unlink()
    done, answer = planned(out, *flags)
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (2, 1)
    assert answer["verdict"] in done.stdout.replace("\n", " ")
    assert answer["commands"][0] in done.stdout


def test_the_cheapest_of_several_gpus_is_found(tmp_path):
    flags = (*MODEL[:2], *MODEL[4:], "--tensor-parallel-size", "1", "--max-num-batched-tokens", "2048", "--loads", "1")
    done, answer = planned(tmp_path / "out", *flags, *LIMITS, "--price", "h100=2.5", "--price", "h200=3.9")
    assert done.returncode == 0, done.stderr
    known = [layout for layout in answer["layouts"] if layout["gpus"]]
    assert known[0]["cost"] == min(layout["cost"] for layout in known)
    assert f"It costs {known[0]['cost']:,.4g}" in answer["verdict"]
    assert answer["loads"][0]["cost"] == known[0]["cost"]
    assert {layout["changes"]["gpu"] for layout in answer["layouts"]} == {"h100", "h200"}
    [other] = {"h100", "h200"} - {known[0]["changes"]["gpu"]}
    assert [note.partition(",")[0] for note in answer["notes"] if note.startswith("Of ")] == [f"Of layouts on {other}"]


def test_prefill_and_decode_apart_are_tried_beside_the_others(tmp_path):
    flags = (*MODEL, "--tensor-parallel-size", "1", "--max-num-batched-tokens", "2048", "--loads", "1")
    done, answer = planned(tmp_path / "out", *flags, "--vary", "prefill_workers=1,2", *LIMITS)
    assert done.returncode == 0, done.stderr
    apart = [layout for layout in answer["layouts"] if "prefill_workers" in layout["changes"]]
    assert [layout["name"].startswith("split: prefill workers ") for layout in apart] == [True, True]
    assert sorted(layout["prefill_workers"] for layout in apart) == [1, 2]
    assert "2+3: 2 workers prefill and 3 decode." in done.stdout
    [whole] = [layout for layout in answer["layouts"] if layout not in apart]
    assert (whole["name"], whole["prefill_workers"]) == ("TP 1, chunk 2048", None)
    [note] = [note for note in answer["notes"] if note.startswith("Of ")]
    assert note.startswith("Of layouts that are not split, " if answer["layouts"][0] in apart else "Of split layouts, ")


def test_where_two_prefill_and_one_decodes_router_modes_are_compared(tmp_path):
    flags = (*MODEL[:4], "--max-requests", "60", "--tensor-parallel-size", "1", "--max-num-batched-tokens", "2048")
    limits = ("--vary", "prefill_workers=2", "--slo", "itl.max <= 20ms", "--max-gpus", "3", "--loads", "1")
    done, answer = planned(tmp_path / "out", *flags, *limits)
    assert done.returncode == 0, done.stderr
    assert "(split: decode workers 1, prefill workers 2" in answer["verdict"]
    assert [mode["name"] for mode in answer["modes"]] == ["kv", "round-robin", "least-loaded"]


def test_settings_of_one_role_are_varied_where_it_is_apart(tmp_path):
    flags = (
        *MODEL,
        "--tensor-parallel-size",
        "1",
        "--max-num-batched-tokens",
        "2048",
        "--loads",
        "1",
        "--vary",
        "prefill_workers=1",
    )
    prices = ("--price", "h100=2", "--price", "h200=3", "--vary", "decode_gpu=h200")
    done, answer = planned(tmp_path / "out", *flags, *prices, *LIMITS)
    assert done.returncode == 0, done.stderr
    apart = {layout["changes"]["gpu"]: layout for layout in answer["layouts"] if layout["prefill_workers"]}
    assert apart.keys() == {"h100", "h200"}
    assert [layout["changes"].get("decode_gpu") for layout in apart.values()] == ["h200", "h200"]
    for gpu, price in (("h100", 2.0), ("h200", 3.0)):
        if apart[gpu]["workers"] is not None:
            assert apart[gpu]["cost"] == price + 3.0 * apart[gpu]["workers"]


@pytest.mark.parametrize("seed", [1, 2])
def test_the_plan_does_not_depend_on_the_number_of_cores(tmp_path, seed):
    shape = ("--max-requests", "120", "--arrival", "poisson", "--rate", "20", "--seed", seed)
    flags = (*MODEL[:4], *shape, "--vary", "max_num_batched_tokens=512,2048", "--tensor-parallel-size", "1")
    answers = []
    for jobs in (1, 2, 5):
        done, answer = planned(tmp_path / f"{jobs}", *flags, *LIMITS, "--loads", "1,1.25,2", "--jobs", jobs)
        assert done.returncode == 0, done.stderr
        for name in ("wall_s", "command", "commands", "settings"):  # the last three name the folder and the jobs
            del answer[name]
        answers.append(answer)
    assert answers[0] == answers[1] == answers[2]


def test_a_closed_loop_keeps_more_in_flight_for_more_load(tmp_path):
    flags = (*MODEL[:4], "--max-requests", "150", "--tensor-parallel-size", "1", "--max-num-batched-tokens", "2048")
    done, answer = planned(
        tmp_path / "out", *flags, "--concurrency", "16", "--slo", "tpot.p90 <= 14ms", "--loads", "1,2,4"
    )
    assert done.returncode == 0, done.stderr
    assert [at["label"] for at in answer["loads"]] == [
        "1x (concurrency 16)",
        "2x (concurrency 32)",
        "4x (concurrency 64)",
    ]
    gpus = [at["gpus"] for at in answer["loads"]]
    assert gpus[0] < gpus[1] < gpus[2]
    assert "2x (concurrency 32)" in done.stdout


def shared_documents(file):
    """Write a trace in which each prompt has one of two documents of 16,384 tokens, which each worker computes once."""
    rng, now, rows = random.Random(5), 0.0, []
    for number in range(260):
        now += rng.expovariate(10)
        first = 32 * rng.randrange(2)
        ids = [*range(first, first + 32), 1000 + number]
        rows.append({"timestamp": int(now * 1000), "input_length": 16484, "output_length": 100, "hash_ids": ids})
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return file


def test_skipped_numbers_of_workers_are_tried_where_more_workers_miss_other_limits(tmp_path):
    trace = shared_documents(tmp_path / "documents.jsonl")
    flags = ("--model", "meta-llama/Llama-3.1-8B", "--gpu", "h100", "--tensor-parallel-size", "1", "--max-gpus", "16")
    done, answer = planned(
        tmp_path / "out", trace, *flags, "--max-num-batched-tokens", "8192", "--router-mode", "round-robin", "--loads",
        "1", "--slo", "ttft.p95 <= 200ms", "--slo", "tpot.p90 <= 9ms",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert answer["verdict"].startswith("5 GPUs (workers 5, ")


def test_other_router_modes_are_tried_before_a_plan_gives_up(tmp_path):
    trace = tmp_path / "even.csv"
    trace.write_text("\n".join(["arrival,input,output", *(f"{n / 30},2000,100" for n in range(200))]) + "\n")
    flags = (trace, "--columns", COLUMNS, "--model", "meta-llama/Llama-3.1-8B", "--gpu", "h100", "--max-gpus", "4")
    rest = ("--tensor-parallel-size", "1", "--max-num-batched-tokens", "2048", "--loads", "1,2", "--slo")
    modes = ("--router-mode", "random", "--router-mode", "round-robin")
    done, answer = planned(tmp_path / "met", *flags, *modes, *rest, "tpot.p90 <= 10.5ms")
    assert done.returncode == 0, done.stderr
    assert answer["verdict"].startswith("4 GPUs (workers 4, ")
    assert "with router mode random; this plan is for round-robin." in answer["notes"][0]
    assert yaml.safe_load((tmp_path / "met" / "deployment.yaml").read_text())["router_mode"] == "round-robin"
    done, answer = planned(tmp_path / "none", *flags, *modes, *rest, "tpot.p90 <= 9ms")
    assert done.returncode == 1
    assert "(--max-gpus) meets the limits with router mode random. " in answer["verdict"]
    assert "nearest layouts with round-robin." in answer["verdict"]


def test_limits_that_no_answer_has_a_value_for_are_refused_at_once(tmp_path):
    trace = tmp_path / "one.csv"
    trace.write_text("\n".join(["arrival,input,output", *(f"{n / 20},500,1" for n in range(100))]) + "\n")
    for command in (("plan", "--loads", "1"), ("sweep", "--find", "workers", "--router-mode", "kv")):
        done = dynabench(
            *command, trace, "--columns", COLUMNS, *MODEL[:4], "--slo", "tpot.p90 <= 14ms", "--out", tmp_path / "x"
        )
        assert done.returncode == 2
        assert "slo 'tpot.p90 <= 14 ms' has no values: every answer of one.csv has one token" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_what_cannot_be_is_listed_and_what_cannot_be_met_is_said(tmp_path):
    done, answer = planned(
        tmp_path / "out", "--model", "meta-llama/Llama-3.1-70B", "--gpu", "h100", "--max-requests", "50",
        "--tensor-parallel-size", "1", "--slo", "ttft.p50 <= 1s",
    )  # fmt: skip
    assert done.returncode == 1
    assert answer["verdict"] == "No layout can meet the limits, for the reasons above."
    assert "the weights need 131.4 GiB on each GPU" in done.stdout
    assert "TP 1, chunk 512 and 4 more: the weights" in done.stdout
    tight, answer = planned(tmp_path / "tight", *MODEL, "--slo", "tpot.p50 <= 1ms")
    assert tight.returncode == 1
    assert "less than the time of a decode step with a single sequence" in tight.stdout
    few, answer = planned(
        tmp_path / "few", *MODEL, "--tensor-parallel-size", "1", "--max-num-batched-tokens", "2048",
        "--slo", "tpot.p90 <= 8ms", "--max-gpus", "2",
    )  # fmt: skip
    assert few.returncode == 1
    assert answer["verdict"].startswith(
        "No layout of up to 2 GPUs (--max-gpus) meets the limits with router mode kv. The nearest is 2 GPUs (workers 2"
    )
    assert "tpot.p90 <= 8 ms missed by " in answer["verdict"]


def test_too_few_gpus_for_the_work_are_told_from_limits_that_nothing_meets(tmp_path):
    flags = (
        "--model",
        "meta-llama/Llama-3.1-8B",
        "--gpu",
        "l40s",
        "--max-gpus",
        "1",
        "--max-requests",
        "200",
        "--rate-scale",
        "4",
    )
    done, answer = planned(tmp_path / "out", *flags, "--max-num-batched-tokens", "2048", "--slo", "ttft.p90 <= 1s")
    assert done.returncode == 1
    assert answer["verdict"].startswith(
        "No layout of up to 1 GPU (--max-gpus) can handle the load: TP 1, chunk 2048 needs at least "
    )


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ((), "a plan needs limits"),
        (("--slo", "ttft.p99 <= 1s"), "slo 'ttft.p99 <= 1000 ms' cannot be judged from 300 requests; a p99 needs 368"),
        (("--slo", "ttft.p50 <= 1s", "--price", "h101=2"), "gpu 'h101' is not known; did you mean h100?"),
        (
            ("--slo", "ttft.p50 <= 1s", "--tensor-parallel-size", "3"),
            "tensor_parallel_size 3 was not measured on h100; expected one of [1, 2, 4, 8]",
        ),
        (
            ("--prefill-workers", "1"),
            "Unknown option: --prefill-workers; a plan chooses the number: use --vary prefill_workers=1",
        ),
        (
            ("--slo", "ttft.p50 <= 1s", "--price", "h200=2"),
            "gpu h100 has no price, and a plan chooses among GPUs that have one; add --price h100=..., or leave --gpu out",
        ),
        (("--price", "h100"), "price 'h100' is not understood; expected a GPU and its price, such as h100=2.5"),
        (("--loads", "1,x"), "loads is '1,x'; expected multiples of the rate"),
        (("--slo", "ttft.p90 <= 1s", "--vary", "workers=1..4"), "a plan searches for workers; leave it out"),
        (
            ("--slo", "ttft.p90 <= 1s", "--price", "h100=2", "--vary", "gpu=h100,b200"),
            "gpu b200 has no price; add --price b200=...",
        ),
        (("--slo", "ttft.p90 <= 1s", "--vary", "chunk=1"), "chunk is not a setting that can be varied"),
        (("--slo", "ttft.p90 <= 1s", "--vary", "max_num_batched_token=1"), "did you mean max_num_batched_tokens or"),
    ],
)
def test_what_makes_no_sense_is_one_line(tmp_path, flags, problem):
    done = dynabench("plan", *MODEL, *flags, "--out", tmp_path / "x")
    assert done.returncode == 2
    assert problem in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_generic_step_times_are_refused(tmp_path):
    done = dynabench("plan", "--slo", "ttft.p90 <= 1s", "--out", tmp_path / "x")
    assert done.returncode == 2
    assert "a plan needs the step times of your engine: use --model and --gpu" in done.stderr


def test_measured_step_times_are_of_one_size(tmp_path):
    flags = ("--timing", "constant", "--max-requests", "300", "--max-num-batched-tokens", "2048", "--loads", "1")
    done, answer = planned(tmp_path / "out", *flags, "--slo", "ttft.p90 <= 10s")
    assert done.returncode == 0, done.stderr
    assert [layout["name"] for layout in answer["layouts"]] == ["chunk 2048"]
    assert (
        "assumed to be for tensor parallel size 1; if they are not, set the size with --tensor-parallel-size"
        in done.stdout
    )
    sizes = ("--tensor-parallel-size", "2", "--tensor-parallel-size", "4")
    done, _ = planned(tmp_path / "two", *flags, *sizes, "--slo", "ttft.p90 <= 10s")
    assert (done.returncode, "tensor_parallel_size 2 and 4 are given; expected only the one" in done.stderr) == (
        2,
        True,
    )


def test_prices_are_read():
    assert PlanConfig(price=("h100=2.5", "b200=4")).prices == {"h100": 2.5, "b200": 4.0}


def test_layouts_with_stages_are_searched_and_have_the_gpus_of_all_stages(tmp_path):
    flags = (*MODEL, "--tensor-parallel-size", "1", "--max-num-batched-tokens", "2048", "--loads", "1")
    done, answer = planned(tmp_path / "out", *flags, "--vary", "pipeline_parallel_size=1,2", *LIMITS)
    assert done.returncode == 0, done.stderr
    gpus = {layout["name"]: layout["gpus"] / layout["workers"] for layout in answer["layouts"] if layout["workers"]}
    assert gpus.items() <= {"TP 1, chunk 2048, PP 1": 1, "TP 1, chunk 2048, PP 2": 2}.items()
    assert "none of those points had stages" in done.stdout


def test_lengths_alone_give_no_verdict_on_caching(tmp_path):
    trace = tmp_path / "lengths.csv"
    rows = [f"{number / 20},{500 + number % 300},{20 + number % 50}" for number in range(200)]
    trace.write_text("\n".join(["arrival,input,output", *rows]) + "\n")
    flags = (*MODEL[:4], "--tensor-parallel-size", "1", "--max-num-batched-tokens", "2048", "--loads", "1")
    done, answer = planned(tmp_path / "out", trace, "--columns", COLUMNS, *flags, "--slo", "ttft.p90 <= 2s")
    assert done.returncode == 0, done.stderr
    assert answer["caching"] == []
    assert "The workload does not show which prefixes prompts share, so prefix caching is not judged" in done.stdout


def test_ctrl_c_in_a_terminal_keeps_what_is_known_and_the_same_command_goes_on(tmp_path):
    flags = ("plan", *SMALL, *LIMITS, "--loads", "1,2,3,4", "--jobs", "1", "--out", tmp_path / "out")
    points = tmp_path / "out" / "points"

    def num_known():
        return len(list(points.glob("*.json"))) if points.exists() else 0

    with terminal(flags) as (process, said):
        until(num_known, process)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130, said()
    assert "Traceback" not in said()
    before = num_known()
    assert json.loads((tmp_path / "out" / "plan.json").read_text())["is_complete"] is False
    done = dynabench(*flags)
    assert done.returncode == 0, done.stderr
    answer = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert answer["is_complete"]
    assert answer["simulated"] == num_known() - before > 0


@contextlib.contextmanager
def terminal(flags):
    """Run a command in a terminal; give it, and what returns all that it printed."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "dynabench", *map(str, flags)], start_new_session=True, stdin=theirs, stdout=theirs,
        stderr=theirs, env=os.environ | {"COLUMNS": "120", "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    printed = bytearray()

    def read():
        with contextlib.suppress(OSError):
            while piece := os.read(ours, 1 << 16):
                printed.extend(piece)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield process, lambda: printed.decode(errors="replace")
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        reader.join(PATIENCE_S)
        os.close(ours)


def test_a_closed_loop_says_that_it_begins_with_a_burst_and_how_many_requests_it_keeps_in_flight(tmp_path):
    flags = (*MODEL, "--max-num-batched-tokens", "2048", "--tensor-parallel-size", "1", "--loads", "1")
    closed = (*flags, "--concurrency", "40", "--slo", "tpot.p90 <= 20ms")
    done, answer = planned(tmp_path / "burst", *closed)
    assert done.returncode == 0, done.stderr
    burst = "The first 40 requests start at once, and the figures include this burst; --warmup-s leaves it out."
    assert burst in answer["notes"] and burst in done.stdout.replace("\n", " ")
    assert answer["subtitle"].startswith("300 requests, 40 requests at a time; ")
    assert answer["head"]["Workload"].endswith(": 300 requests, 40 requests at a time")
    _, answer = planned(tmp_path / "warm", *closed, "--warmup-s", "5")
    assert burst not in answer["notes"]


def test_the_error_of_the_model_and_settings_that_vllm_has_otherwise_are_printed(small):
    _, text, answer = small
    for name in ("Model error", "Not vLLM's defaults"):
        assert f"{name}: {answer['head'][name]}." in " ".join(text.split())
