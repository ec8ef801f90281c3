"""The command line, run as a user runs it."""

import contextlib
import gzip
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import pytest

from foundation.extras import install
from serving.planner import PLANNERS
from tests.support.commands import BIN, dynabench, dynamo_run, run
from tests.support.stacks import running
from tests.support.waiting import PATIENCE_S, until
from workloads.formats import BUNDLED, FORMATS

GOLDEN = Path(__file__).parent.parent / "golden"
SMALL = ["--max-requests", "40"]


@pytest.fixture
def sockets():
    """A folder with a short name, by which the processes of this test's stack are told from others'."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        yield folder
        assert list(Path(folder).iterdir()) == []


def stack_processes(sockets):
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(
                variable.startswith(b"DYNABENCH_SETTINGS=") and sockets.encode() in variable for variable in environment
            ):
                found.append(environment)
    return found


def test_the_list_of_commands_is_printed_without_what_only_commands_need():
    heavy = ["importlib.metadata", "numpy", "pyarrow", "pygments", "rich.markdown", "simpy"]
    code = f"""
import sys
from dynabench.cli.app import main
try:
    main()
finally:
    print([name for name in {heavy} if name in sys.modules])
"""
    lines = run(sys.executable, "-c", code, "--help").stdout.splitlines()
    assert lines[-1] == "[]"


@pytest.mark.parametrize(
    "command", [["--help"], ["simulate", "--help"], ["modes"], ["simulate", "--max-requests", "5", "--jobs", "1"]]
)
def test_output_that_nobody_reads_ends_a_command_quietly_with_the_status_of_a_pipe(command):
    ours, theirs = os.pipe()
    os.close(ours)
    done = dynabench(*command, stdout=theirs)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, "")


def test_the_help_of_a_command_is_set_as_markdown():
    for command in (["calibrate"], ["workload", "convert"]):
        text = dynabench(*command, "--help").stdout
        assert "┌" in text or "╭" in text
        assert "`" not in text, command


@pytest.mark.parametrize("command", ["simulate", "plan", "serve", "compare"])
def test_help_shows_defaults_as_they_are_typed_and_pages_that_are_there(command):
    check_help(dynabench(command, "--help-all").stdout)


def test_the_help_of_other_programs_does_likewise():
    check_help(dynamo_run("--help-all").stdout)
    check_help(run(sys.executable, "-m", "serving.vllm", "--help-all").stdout)


def check_help(text):
    assert not re.search(r"default:\s*(None|False|True|\(|\"|\])", text.replace("│", ""))
    assert "╮\n╰" not in text
    for page in re.findall(r"docs/\S+\.md", text):
        assert (Path(__file__).parents[2] / page).exists()


def test_simulate_writes_a_whole_results_folder(tmp_path):
    out = tmp_path / "x"
    done = dynabench("simulate", *SMALL, "--router-mode", "round-robin", "--router-mode", "kv", "--out", out)
    assert done.returncode == 0, done.stderr
    assert "TTFT mean (ms)" in done.stdout
    assert sorted(path.name for path in out.iterdir()) == [
        "charts", "experiment.json", "gaps.npz", "report.html", "requests.parquet", "summary.json",
    ]  # fmt: skip
    page = (out / "report.html").read_text()
    assert page.count("<figure") == len([*(out / "charts").iterdir()]) > 6
    assert not re.search(r"(src|href)=.http", page)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["verdict"] in page.replace("&#39;", "'")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    rebuilt = dynabench("report", out)
    assert rebuilt.returncode == 0, rebuilt.stderr
    assert json.loads((out / "summary.json").read_text()) == summary


def test_the_same_seed_gives_the_same_requests(tmp_path):
    for name in ("a", "b"):
        assert dynabench("simulate", *SMALL, "--router-mode", "random", "--out", tmp_path / name).returncode == 0
    for file in ("requests.parquet", "summary.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_earlier_runs_are_put_side_by_side(tmp_path):
    for name, weight in (("a", "1"), ("b", "4")):
        settings = ["--router-mode", "kv", "--kv-overlap-score-weight", weight]
        assert dynabench("simulate", *SMALL, *settings, "--out", tmp_path / name).returncode == 0
    done = dynabench("compare", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "both")
    assert done.returncode == 0, done.stderr
    assert list(json.loads((tmp_path / "both" / "summary.json").read_text())["arms"]) == ["a/kv", "b/kv"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "--router-mode", "best"], "router_mode 'best' is unknown; expected one of random, round-robin"),
        (["simulate", "--workers", "0"], "workers must be from 1 to 10000, not 0"),
        (["simulate", "--workers", "2.5"], "--workers is '2.5'; expected a whole number from 1 to 10000"),
        (["simulate", "--workers", "two"], "--workers is 'two'; expected a whole number from 1 to 10000"),
        (["simulate", "--kv-offloading-size", "64GB"], "from 0 to 1000000000 (GiB for each data-parallel rank)"),
        (["simulate", "--host-latency-us", "9"], "host_latency_us is 9, but there is no host memory for KV"),
        (["sweep", "--vary", "kv_disk_latency_ms=1,2"], "kv_disk_latency_ms is 1, but there is no disk for KV"),
        (
            ["run", "--kv-store-write-policy", "write_back"],
            "kv_store_write_policy is write_back, but there is no store",
        ),
        (["simulate", "none.jsonl"], "none.jsonl: cannot be read (No such file or directory)"),
        (["simulate", "bad.jsonl"], "bad.jsonl, line 1: input_length is missing"),
        (["simulate", "negative.jsonl"], "negative.jsonl, line 1: input_length must be at least 0, not -5"),
        (["simulate", "--num-gpu-blocks", "20"], "raise --num-gpu-blocks or cut prompts with --cap-isl"),
        (["simulate", "--block-size", "48"], "block_size 48 neither divides"),
        (["simulate", "--speedup-ratio", "-1"], "speedup_ratio must be at least 0, not -1"),
        (["simulate", "--out", "taken"], "taken exists; choose another results folder with --out"),
        (["simulate", "--no-such-flag"], "no-such-flag"),
        (["run", "--http-port", "PORT"], "on 127.0.0.1 cannot be used: Address already in use; choose another"),
        (["report", "taken"], "taken: not a results folder"),
        (["workload", "synth", "bad.jsonl"], "bad.jsonl: exists"),
        (["workload", "synth", "new.jsonl", "--rate", "-1"], "rate must be greater than 0, not -1"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, arguments, message):
    (tmp_path / "taken").mkdir()
    (tmp_path / "bad.jsonl").write_text('{"timestamp": 0, "output_length": 1, "hash_ids": [0]}\n')
    (tmp_path / "negative.jsonl").write_text(
        '{"timestamp": 0, "input_length": -5, "output_length": 1, "hash_ids": [0]}\n'
    )
    before = sorted(path.name for path in tmp_path.iterdir())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        arguments = [str(taken.getsockname()[1]) if part == "PORT" else part for part in arguments]
        if (arguments[0] == "simulate" and "--out" not in arguments) or arguments[0] == "run":
            arguments += ["--out", "fresh"]
        done = dynabench(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_run_measures_the_real_stack_and_leaves_nothing(tmp_path, sockets):
    out = tmp_path / "x"
    done = dynabench(
        "run",
        *SMALL,
        "--router-mode",
        "kv",
        "--workers",
        "2",
        "--rate-scale",
        "4",
        "--out",
        out,
        env={"TMPDIR": sockets},
        fresh=True,  # /proc does not show the environment of forks
    )
    assert done.returncode in (0, 1), done.stderr  # 1: this machine was too slow to send in time, and says so
    assert all(" s  kv (1/1): " in line for line in done.stderr.splitlines())  # how far it is, where it takes long
    figures = json.loads((out / "summary.json").read_text())["arms"]["kv"]
    assert (figures["requests"], figures["failed"]) == (40, 0)
    assert figures["itl"]["count"] > 1000
    assert stack_processes(sockets) == []


def test_run_measures_any_endpoint_by_its_url(tmp_path):
    with running(2, worker={"model_name": "m"}) as stack:
        for prompts in ("tokens", "text"):
            out = tmp_path / prompts
            done = dynabench(
                "run", "--url", stack.url, "--model", "m", "--prompts", prompts, "--rate-scale", "20",
                "--max-requests", "20", "--cap-isl", "500", "--out", out,
            )  # fmt: skip
            is_late = "the client was late" in done.stdout  # on a busy machine
            assert done.returncode == is_late, done.stderr + done.stdout
            arm = json.loads((out / "summary.json").read_text())["arms"]["endpoint"]
            assert (arm["requests"], arm["failed"]) == (20, 0)
    gone = dynabench("run", "--url", "http://127.0.0.1:1", "--out", tmp_path / "g")
    assert gone.returncode == 2
    assert gone.stderr.startswith("dynabench: no server responds at http://127.0.0.1:1 (")
    assert not (tmp_path / "g").exists()


def test_live_and_virtual_agree_on_what_is_cached(tmp_path):
    common = [
        *SMALL,
        "--router-mode",
        "round-robin",
        "--workers",
        "2",
        "--block-size",
        "512",
        "--num-gpu-blocks",
        "300",
    ]
    for command in ("run", "simulate"):
        done = dynabench(command, *common, "--out", tmp_path / command)
        assert done.returncode in (0, 1), done.stderr
    shares = [
        json.loads((tmp_path / command / "summary.json").read_text())["arms"]["round-robin"]["cache"]["hit_share"]
        for command in ("run", "simulate")
    ]
    assert shares[0] == pytest.approx(shares[1], abs=0.05)


def wait_for_answers(port, process):
    """Wait until the frontend has answered some requests."""

    def has_answered():
        with contextlib.suppress(httpx.HTTPError):
            lines = httpx.get(f"http://127.0.0.1:{port}/metrics").text.splitlines()
            return any("requests_total" in line and 'status="success"' in line for line in lines)

    until(has_answered, process)


def test_ctrl_c_keeps_what_was_measured(tmp_path, sockets):
    out = tmp_path / "x"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "dynabench", "run", "--out", str(out), "--workers", "2", "--http-port", str(port)]
    process = subprocess.Popen(  # not a fork: /proc does not show the environment of forks
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": sockets}
    )
    wait_for_answers(port, process)
    assert stack_processes(sockets)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, stderr
    assert "interrupted" in stdout
    summary = json.loads((out / "summary.json").read_text())
    assert summary["is_complete"] is False
    assert stack_processes(sockets) == []


def test_verify_tells_match_from_difference(tmp_path):
    good = GOLDEN / "vllm-0.32" / "kv_pressure.jsonl.gz"
    done = dynabench("verify", good)
    assert (done.returncode, done.stdout.count("matches vLLM 0.32.0 (309 steps, 208 events)")) == (0, 1)
    bad = tmp_path / "none.gz"
    bad.write_bytes(b"")
    head, *rows = gzip.decompress(good.read_bytes()).decode().splitlines()
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join([head, rows[0].replace('"free_blocks": 36', '"free_blocks": 35'), *rows[1:]]))
    done = dynabench("verify", good, other)
    assert (done.returncode, done.stdout.count("1 of 2 match")) == (1, 1), done.stdout


def test_verify_exits_with_2_if_a_file_cannot_be_read_as_other_commands_do(tmp_path):
    good = GOLDEN / "vllm-0.32" / "kv_pressure.jsonl.gz"
    empty = tmp_path / "none.gz"
    empty.write_bytes(b"")
    done = dynabench("verify", tmp_path / "nosuch.gz", empty, good, "--json")
    assert [json.loads(line)["matched"] for line in done.stdout.splitlines()] == [None, None, True]
    assert done.returncode == 2


def test_workloads_can_be_made_and_looked_at(tmp_path):
    file = tmp_path / "w.jsonl.gz"
    made = dynabench("workload", "synth", file, "--requests", "50", "--turns", "2")
    assert made.returncode == 0
    facts = json.loads(dynabench("workload", "inspect", file, "--json").stdout)
    assert facts["requests"] == 50
    means = f"mean ISL {facts['isl']['mean']:,.0f} tokens, {facts['endless_cache_hit_share']:.0%} of them shared"
    assert made.stdout.startswith(f"{file}: 50 requests; {means}")
    assert f"mean OSL {facts['osl']['mean']:,.0f} tokens\n" in made.stdout
    assert "shared prefixes of 2,048 tokens, on top of --isl" in made.stdout.replace("\n", " ")
    assert "unlimited cache hit share" in dynabench("workload", "inspect", BUNDLED).stdout
    assert "best share by cache size" in dynabench("workload", "inspect", BUNDLED).stdout


def rows(path, *times, **more):
    row = {"input_length": 700, "output_length": 5, "hash_ids": [0, 1]} | more
    path.write_text("".join(json.dumps(row | {"timestamp": time}) + "\n" for time in times))
    return path


def test_files_and_a_folder_are_one_workload_in_every_command(tmp_path):
    folder = tmp_path / "parts"
    folder.mkdir()
    files = [rows(folder / "a.jsonl", 0, 2000), rows(folder / "b.jsonl", 1000, 3000)]
    for named in (files, [folder]):
        assert json.loads(dynabench("workload", "inspect", *named, "--json").stdout)["requests"] == 4
    whole = tmp_path / "whole.jsonl.gz"
    assert dynabench("workload", "convert", *files, whole).returncode == 0
    assert json.loads(dynabench("workload", "inspect", whole, "--json").stdout)["duration_s"] == 3.0
    out = tmp_path / "out"
    done = dynabench("simulate", *files, "--workers", "1", "--router-mode", "kv", "--out", out)
    assert done.returncode == 0, done.stderr
    told = json.loads((out / "experiment.json").read_text())["workload"]
    assert (told["file"], told["requests"]) == (f"{files[0]} {files[1]}", 4)
    done = dynabench("workload", "convert", *files)
    assert (done.returncode, "b.jsonl exists; choose another file" in done.stderr) == (2, True)
    done = dynabench("workload", "fit", folder)
    assert (done.returncode, "expected a workload and then the file to write" in done.stderr) == (2, True)


def test_traces_that_nothing_else_can_hold_are_merged_without_a_flag(tmp_path):
    call = {"in": 130, "out": 5, "hash_ids": [1, 2], "type": "n"}
    agents = {"id": "c", "block_size": 64, "requests": [
        call | {"t": 0.0},
        {"t": 5.0, "type": "subagent", "duration_ms": 4000, "requests": [call | {"t": 0.0}]},
        {"t": 3.0, "type": "subagent", "duration_ms": 2000, "requests": [call | {"t": 0.0}]},
        call | {"t": 9.0},
    ]}  # fmt: skip
    (tmp_path / "agents.json").write_text(json.dumps(agents))
    plain, out = rows(tmp_path / "plain.jsonl", 0, 1000), tmp_path / "both.jsonl.gz"
    done = dynabench("workload", "merge", tmp_path / "agents.json", plain, "--out", out)
    assert done.returncode == 0, done.stderr
    facts = json.loads(dynabench("workload", "inspect", out, "--json").stdout)
    assert (facts["requests"], facts["notes"]) == (6, ["agents.json: read as weka"])
    done = dynabench("workload", "convert", out, tmp_path / "lossy.jsonl", "--to", "mooncake")
    assert done.returncode == 2
    assert "sharing in blocks smaller than 512 tokens, sessions, turns that wait for answers" in done.stderr
    assert not (tmp_path / "lossy.jsonl").exists()


def test_formats_say_what_they_were_tried_on():
    shown = dynabench("workload", "formats").stdout
    for name, format in FORMATS.items():
        assert re.search(rf"^{name} .*\n +{re.escape(format.tried)}$", shown, re.MULTILINE), name


def test_inspect_tells_the_unit_of_the_rate_and_what_helps_a_coarse_clock(tmp_path):
    coarse = rows(tmp_path / "coarse.jsonl", *(3000 * (number // 5) for number in range(20)))
    shown = dynabench("workload", "inspect", coarse).stdout
    assert "rate (requests/s)          2.11" in shown
    assert "the clock is coarse: 20 requests in 4 ticks, about 3 s apart" in shown
    assert "--spread-ticks" in shown
    assert "coarse" not in dynabench("workload", "inspect", BUNDLED).stdout
    spread = tmp_path / "spread.jsonl"
    assert dynabench("workload", "convert", coarse, spread, "--spread-ticks").returncode == 0
    assert "coarse" not in dynabench("workload", "inspect", spread).stdout
    at_once = dynabench("workload", "inspect", rows(tmp_path / "once.jsonl", 0, 0, 0), "--json")
    assert "all 3 requests that wait for no other arrive at once" in json.loads(at_once.stdout)["advice"][0]


def test_the_example_compares_three_weights(tmp_path):
    example = Path(__file__).parent.parent.parent / "examples" / "compare_weights.sh"
    done = run("bash", example, tmp_path, env={"PATH": f"{BIN}:{os.environ['PATH']}"})
    assert done.returncode == 0, done.stderr
    arms = json.loads((tmp_path / "compared" / "summary.json").read_text())["arms"]
    assert list(arms) == ["weight-0/kv", "weight-1/kv", "weight-4/kv"]


def test_planners_are_listed_with_their_formulas():
    done = dynabench("planners")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(PLANNERS)


def test_the_example_of_a_planner_changes_its_fleet(tmp_path):
    example = [
        "--deployment",
        Path(__file__).parents[2] / "examples" / "planner.yaml",
        "--slo",
        "ttft <= 2s",
        "--slo",
        "tpot <= 50ms",
    ]
    arms = ["--vary", "planner=static,lead-time", "--rate-scale", "4", "--max-requests", "400", "--no-oracle"]
    done = dynabench("simulate", *example, *arms, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "out" / "experiment.json").read_text())["runs"]
    assert [run["fleet"]["planner"] for run in runs] == ["static", "lead-time"]
    assert runs[1]["fleet"]["decisions"] > 0


def test_help_names_every_command():
    text = dynabench("--help").stdout
    for command in ("simulate", "run", "compare", "report", "verify", "workload", "modes"):
        assert f" {command} " in text


def test_record_without_vllm_says_how_to_get_it(tmp_path):
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed here")
    scenario = tmp_path / "s.json"
    scenario.write_text('{"engine": {}, "requests": []}')
    done = dynabench("record", "--scenario", scenario, "--out", tmp_path / "o.jsonl")
    assert done.returncode == 2
    assert f"pip install 'vllm>=0.11'; without a GPU: {install('record')}" in done.stderr
    assert not (tmp_path / "o.jsonl").exists()
