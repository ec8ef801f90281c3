"""Gates of commands: one form, one place for exit codes, results that are whole before a gate decides."""

import json
import re
import signal
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from dynabench.reference.pages import pages
from tests.support import warm
from tests.support.commands import dynabench
from tests.support.waiting import PATIENCE_S, until

FEW = ("--max-requests", "60", "--jobs", "1")
MODEL = ("--model", "meta-llama/Llama-3.1-8B", "--gpu", "h100", "--tensor-parallel-size", "1", "--loads", "1")
PLAN = (*FEW, *MODEL, "--max-num-batched-tokens", "2048", "--router-mode", "kv", "--slo", "ttft.mean <= 5s")


def cases(path):
    """Return what a JUnit file says of each test case: passed, failure or skipped."""
    found = {}
    for case in ElementTree.parse(path).iter("testcase"):
        state = next((child.tag for child in case if child.tag != "system-out"), "passed")
        found[case.get("classname"), case.get("name")] = state
    return found


def test_simulate_judges_every_arm_and_its_results_are_whole(tmp_path):
    junit, out = tmp_path / "junit.xml", tmp_path / "out"
    gates = ("--fail-if", "ttft.p50 > 1ms", "--fail-if", "failed > 0", "--fail-if", "e2e.mean > +900%")
    done = dynabench("simulate", *FEW, *gates, "--junit", junit, "--out", out)
    assert done.returncode == 1, done.stderr
    assert "\nfailed: ttft.p50 > 1ms: round-robin is at " in done.stdout
    assert "\npassed: failed > 0: kv is at 0\n" in done.stdout
    assert "\npassed: e2e.mean > +900%: kv is at " in done.stdout
    assert cases(junit) == {
        ("round-robin", "the run is valid"): "passed",
        ("kv", "the run is valid"): "passed",
        ("round-robin", "ttft.p50 > 1ms"): "failure",
        ("kv", "ttft.p50 > 1ms"): "failure",
        ("round-robin", "failed > 0"): "passed",
        ("kv", "failed > 0"): "passed",
        ("kv", "e2e.mean > +900%"): "passed",
    }
    assert (out / "report.html").is_file()
    assert json.loads((out / "summary.json").read_text())["is_complete"]
    again = dynabench("compare", out, *gates, "--junit", junit)
    assert (again.returncode, cases(junit)[("round-robin", "ttft.p50 > 1ms")]) == (1, "failure")
    assert dynabench("compare", out, *gates[2:], "--junit", junit).returncode == 0


def test_results_of_gates_are_part_of_the_json_and_of_the_markdown(tmp_path):
    gates = ("--router-mode", "kv", "--fail-if", "ttft.mean > 1ms", "--fail-if", "failed > 1%")
    junit = tmp_path / "a" / "junit.xml"  # may be in the results folder, which does not exist yet
    done = dynabench("simulate", *FEW, *gates, "--json", "--junit", junit, "--out", tmp_path / "a")
    assert cases(junit)["kv", "ttft.mean > 1ms"] == "failure"
    assert [(one["arm"], one["check"], one["state"]) for one in json.loads(done.stdout)["gates"]] == [
        ("kv", "ttft.mean > 1ms", "failed"),
        ("kv", "failed > 1%", "passed"),
    ]
    done = dynabench("simulate", *FEW, *gates, "--markdown", "--out", tmp_path / "b")
    assert done.returncode == 1
    assert done.stdout.startswith("### chat.jsonl")
    assert "\n- **Failed**: ttft.mean > 1ms: kv is at " in done.stdout
    assert "\n- **Passed**: failed > 1%: kv is at 0%" in done.stdout


@pytest.mark.parametrize(
    ("command", "flags", "problem"),
    [
        ("simulate", ("--fail-if", "speed > 1"), "'speed' is not a metric"),
        ("run", ("--fail-if", "ttft > 1s"), "ttft needs a statistic"),
        ("sweep", ("--fail-if", "ttft.p95 > 1s"), "p95 is not kept"),
        ("sweep", ("--fail-if", "found < 2"), "is about what --find finds"),
        ("plan", (*PLAN, "--fail-if", "ttft.p99 > 1s"), "fail_if 'ttft.p99 > 1s': a plan is only made of"),
        ("plan", (*PLAN, "--fail-if", "cost > 9"), "fail_if 'cost > 9' needs the price of a GPU; use --price"),
        ("simulate", ("--router-mode", "kv", "--fail-if", "ttft.p90 > +5%"), "there is only one"),
        ("simulate", ("--fail-if", "attainment < 95%"), "needs runs with limits; set them with --slo"),
        ("simulate", ("--junit", "trace.csv/junit.xml"), "expected a file in a folder that can be written"),
        ("simulate", ("--junit", "trace.csv"), "exists and is not JUnit XML"),
    ],
)
def test_a_gate_that_could_not_be_judged_is_refused_before_the_run(command, flags, problem, tmp_path):
    (tmp_path / "trace.csv").write_text("mine\n")
    done = dynabench(command, *flags, "--out", tmp_path / "out", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert problem in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.csv"]


def test_a_run_that_is_worse_than_the_one_before_fails_its_gate(tmp_path):
    before, after, junit = tmp_path / "before" / "out", tmp_path / "after" / "out", tmp_path / "junit.xml"
    for out, speed in ((before, "1"), (after, "0.5")):
        done = dynabench("simulate", *FEW, "--router-mode", "kv", "--speedup-ratio", speed, "--out", out)
        assert done.returncode == 0, done.stderr
    gates = ("--fail-if", "ttft.mean > +5%", "--fail-if", "e2e.mean > +900%", "--fail-if", "attainment < 95%")
    done = dynabench("compare", before, after, *gates, "--junit", junit)
    assert done.returncode == 1, done.stderr
    assert f"\nfailed: ttft.mean > +5%: {after}/kv is at +" in done.stdout  # both folders are called `out`
    assert f"\npassed: e2e.mean > +900%: {after}/kv is at +" in done.stdout
    assert "\nfailed: attainment < 95%: not judged, because it needs runs with limits" in done.stdout
    assert cases(junit)[f"{after}/kv", "ttft.mean > +5%"] == "failure"
    assert dynabench("compare", after, before, *gates[:4]).returncode == 0
    done = dynabench("compare", before, before, *gates[:4])
    assert (done.returncode, done.stderr) == (
        2, f"dynabench: {before} is given twice; expected different results folders\n",
    )  # fmt: skip


@pytest.mark.parametrize(
    "refused",
    [
        ("--fail-if", "speed > 1"),
        ("--fail-if", "attainment < 95%"),
        ("--slo", "soon"),
        ("--rate-scale", "fast"),
        ("trace.jsonl",),
    ],
)
def test_results_of_an_earlier_command_are_gone_once_another_is_refused(refused, tmp_path):
    junit = tmp_path / "junit.xml"
    junit.write_text("<testsuites/>")
    assert dynabench("simulate", *refused, "--junit", junit, cwd=tmp_path).returncode == 2
    assert not junit.exists()


def test_what_is_no_file_is_no_place_for_junit_xml():
    done = dynabench("simulate", "--junit", "/dev/null")
    assert (done.returncode, "exists and is not JUnit XML" in done.stderr) == (2, True)


def test_an_arm_that_was_left_out_fails_the_gate_by_name(tmp_path):
    flags = ("--model", "Qwen/Qwen3-8B", "--gpu", "h100", "--router-mode", "kv", "--vary", "tensor_parallel_size=3,1")
    done = dynabench("simulate", *FEW, *flags, "--fail-if", "failed > 0", "--out", tmp_path / "out")
    assert done.returncode == 1
    assert "\nfailed: failed > 0: left out: tensor_parallel_size 3 (" in done.stdout


def test_a_sweep_judges_every_point_and_two_sweeps_are_compared_point_by_point(tmp_path):
    flags = (*FEW, "--router-mode", "kv", "--vary", "workers=1,4")
    done = dynabench(
        "sweep", *flags, "--fail-if", "failed > 0", "--fail-if", "imbalance > 1.01", "--junit", tmp_path / "x.xml",
        "--out", tmp_path / "a",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "\npassed: imbalance > 1.01: workers 1 is at 1\n" in done.stdout
    assert "\nfailed: imbalance > 1.01: workers 4 is at " in done.stdout
    assert (tmp_path / "a" / "sweep.json").is_file()
    assert cases(tmp_path / "x.xml")["workers 4", "imbalance > 1.01"] == "failure"
    assert dynabench("sweep", *flags, "--speedup-ratio", "0.5", "--out", tmp_path / "b").returncode == 0
    done = dynabench("compare", tmp_path / "a", tmp_path / "b", "--fail-if", "ttft.mean > +5%")
    assert done.returncode == 1, done.stderr
    assert [line[:44] for line in failed_in(done)] == [
        "failed: ttft.mean > +5%: b/workers 1 is at +",
        "failed: ttft.mean > +5%: b/workers 4 is at +",
    ]


def failed_in(done):
    return [line for line in done.stdout.splitlines() if line.startswith("failed")]


def test_a_comparison_of_sweeps_in_which_nothing_can_be_compared_does_not_pass(tmp_path):
    flags, gate = (*FEW, "--router-mode", "kv"), ("--fail-if", "ttft.mean > +5%")
    before, after = tmp_path / "before" / "sweep", tmp_path / "after" / "sweep"
    assert dynabench("sweep", *flags, "--vary", "workers=1,4", "--out", before).returncode == 0
    assert dynabench("sweep", *flags, "--vary", "workers=4", "--out", after).returncode == 0
    done = dynabench("compare", before, after, *gate)
    assert (done.returncode, failed_in(done)) == (
        1, [f"failed: ttft.mean > +5%: {before}/workers 1 has no counterpart in {after}"],
    )  # fmt: skip
    done = dynabench("compare", after, *gate, "--fail-if", "found < 2")
    assert done.returncode == 1
    assert [line.partition(": not judged, because it ")[2] for line in failed_in(done)] == [
        "compares with the first, but there is only one; limit its value instead",
        "is about what --find finds, or a benchmark with --slo; use one of them",
    ]


def test_settings_that_a_sweep_left_out_fail_its_gate_by_name(tmp_path):
    flags = ("--router-mode", "kv", "--gpus", "4", "--vary", "prefill_workers=2,4")
    done = dynabench("sweep", *FEW, *flags, "--fail-if", "failed > 0", "--out", tmp_path / "out")
    assert done.returncode == 1, done.stderr
    said = "failed: failed > 0: left out: gpus is 4, pools.prefill uses 4, so 0 left for pools.decode"
    assert [line[: len(said)] for line in failed_in(done)] == [said]


def test_the_capacity_that_a_search_finds_is_a_gate(tmp_path):
    flags = (*FEW, "--router-mode", "kv", "--find", "workers", "--low", "1", "--high", "4", "--slo", "ttft.mean <= 9s")
    done = dynabench("sweep", *flags, "--fail-if", "found > 0", "--out", tmp_path / "a")
    assert done.returncode == 1, done.stderr
    assert "\nfailed: found > 0: kv is at 1\n" in done.stdout


def test_a_plan_is_judged_by_its_answer(tmp_path):
    junit = tmp_path / "junit.xml"
    done = dynabench("plan", *PLAN, "--fail-if", "gpus > 64", "--junit", junit, "--out", tmp_path / "a")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "\npassed: gpus > 64: TP 1, chunk 2048 is at " in done.stdout
    assert list(cases(junit).values()) == ["passed", "passed"]
    done = dynabench("plan", *PLAN, "--fail-if", "gpus > 0", "--out", tmp_path / "a")
    assert done.returncode == 1
    done = dynabench(
        "plan", *PLAN, "--slo", "tpot.mean <= 1ms", "--fail-if", "gpus > 64", "--junit", junit, "--out", tmp_path / "b"
    )
    assert done.returncode == 1
    assert "\nfailed: gpus > 64: the plan has no such value (no layout was found)\n" in done.stdout
    assert list(cases(junit).values()) == ["failure", "failure"]


def test_what_was_interrupted_does_not_pass_its_gate(tmp_path):
    out, junit = tmp_path / "out", tmp_path / "junit.xml"
    points = "rate_scale=" + ",".join(map(str, range(1, 401)))  # far more than are done before the signal
    process = warm.start(
        [
            *(sys.executable, "-m", "dynabench", "sweep", "--router-mode", "kv", "--jobs", "1", "--vary", points),
            *("--fail-if", "failed > 0", "--junit", str(junit), "--out", str(out)),
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until(lambda: list(out.glob("points/*.json")), process)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, stderr
    assert "\nfailed: failed > 0: not judged, because it was interrupted\n" in stdout
    assert cases(junit)["chat.jsonl: rate scale 1 to 400", "failed > 0"] == "failure"
    assert dynabench("compare", out, "--fail-if", "failed > 0").returncode == 1


def test_the_reference_lists_when_each_command_exits_with_1():
    page = " ".join(pages()["index.md"].split())
    assert "**1**: Done, but the result is not good enough, for example because a gate failed" in page
    for command in ("simulate", "run", "sweep", "plan", "compare", "validate"):
        assert re.search(rf"- \[dynabench {command}\]\({command}\.md\): [^.]*`--fail-if` applies", page), command
