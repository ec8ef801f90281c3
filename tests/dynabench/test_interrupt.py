"""Ctrl-C: the first ends what runs and keeps what was measured, a second ends at once; nothing is left behind."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dynabench.arm import Run, Settings, runs_of
from dynabench.experiment.arms import comparison_of
from dynabench.experiment.parallel import in_parallel
from dynabench.experiment.run import _simulate_all, run_experiment
from dynabench.experiment.settings import ExperimentConfig
from dynabench.interrupt import TOGETHER_S, Interrupt, InterruptError, SecondInterruptError, noted
from dynabench.live import http_client
from dynabench.live.selftest import run_selftest
from dynabench.live.settings import SelftestConfig
from dynabench.progress import Display
from dynabench.shares import SHARE
from dynabench.terminal import Terminal
from dynabench.virtual.clock import LOOK_EVERY
from dynabench.virtual.run import simulate
from foundation.errors import UserError
from mocker import EngineConfig
from reports import folder
from serving.engines.processes import descendants
from serving.planner import PlannerConfig
from serving.router import RouterConfig
from tests.support import warm
from tests.support.commands import PROGRESS, dynabench
from tests.support.simulated import deployed, simulate_pool
from tests.support.strange_server import EVENT, HEAD, chunk, strange_server
from tests.support.waiting import PATIENCE_S, until
from workloads import Request, Workload

COUNT = 300_000


def long_workload():
    return Workload("long", 64, [Request(number * 0.01, 64, 8, (number,)) for number in range(COUNT)])


def made(config):
    return long_workload()


def wait(started, flag):
    Path(started).touch()
    until(flag.is_raised)
    return "ended"


def once(condition, do):
    """Do something as soon as a condition holds, from another thread."""

    def watch():
        until(condition)
        do()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("limit", [1, 1000])
def test_an_interrupted_simulation_keeps_the_requests_that_ended(limit):
    done = []
    run = simulate_pool(
        long_workload(),
        mode="round-robin",
        engine=EngineConfig(),
        router=RouterConfig(),
        workers=2,
        seed=0,
        on_progress=done.append,
        is_interrupted=lambda: done[-1] >= limit,
    )
    assert not run.is_complete
    assert limit <= len(run.requests) < COUNT
    assert (run.requests.last_token_s > 0).all()


def test_ctrl_c_ends_parallel_simulations_and_keeps_what_each_had():
    experiment = ExperimentConfig(router_mode=("round-robin", "random"), jobs=2)
    wanted = runs_of(comparison_of(experiment, Settings(deployed(workers=2))).arms, 1, 0)
    with Interrupt() as interrupt:
        thread = once(lambda: all(interrupt.shares.each() or [0]), ctrl_c)
        runs = _simulate_all(wanted, made, experiment, Terminal(), interrupt)
        thread.join()
    assert len(runs) == 2
    for record in runs:
        assert not record.is_complete
        assert 0 < len(record.requests) < COUNT


def test_calls_that_were_not_begun_are_not_made(tmp_path):
    started = tmp_path / "started"
    with Interrupt() as interrupt:
        thread = once(started.exists, ctrl_c)
        calls = [(wait, (str(started), interrupt.flag))] * 50
        results = list(in_parallel(calls, 2, interrupt=interrupt))
        thread.join()
        said = Display("simulating", "runs", interrupt, Terminal()).line()
    assert 1 <= len(results) <= 2
    assert {result for _, result in results} == {"ended"}
    assert said == f"simulating: {len(results)} of 50 runs"


def fail_beside(started, flag):
    """Fail once another call is under way."""
    until(Path(started).exists)
    raise ValueError("what went wrong")


def test_a_failed_call_ends_the_others_which_nobody_kills(tmp_path):
    started = str(tmp_path / "started")
    with Interrupt() as interrupt:
        flag = interrupt.flag
        calls = [
            (wait, (started, flag)),
            (fail_beside, (started, flag)),
            *[(wait, (str(tmp_path / "third"), flag))] * 20,
        ]
        with pytest.raises(ValueError, match="what went wrong") as failure:
            list(in_parallel(calls, 2, interrupt=interrupt))
    assert "in fail_beside" in failure.value.__notes__[0]
    assert not (tmp_path / "third").exists()


def half(flag):
    """Be half done until the user wants no more."""
    flag.progress.of(10)(5)
    until(flag.is_raised)
    return flag.place


def test_processes_say_how_far_they_are():
    with Interrupt() as interrupt:
        display = Display("simulating", "runs", interrupt, Terminal())
        said = []

        def watch():
            until(lambda: interrupt.shares.together() == 0.25)
            said.append(display.line())
            ctrl_c()

        thread = threading.Thread(target=watch)
        thread.start()
        results = [place for _, place in in_parallel([(half, (interrupt.flag,))] * 4, 2, interrupt=interrupt)]
        thread.join()
    assert said == ["simulating: 0 of 4 runs, 2 under way"]
    assert sorted(results) == [0, 1]


def test_in_a_pipe_progress_is_a_line_on_stderr(capsys):
    with Interrupt() as interrupt:
        display = Display("simulating", "runs", interrupt, Terminal())
        interrupt.shares.begin(4)
        for place, share in enumerate((1.0, 0.5)):
            interrupt.flag._replace(place=place).progress.note(share)
        display.show()
    shown = capsys.readouterr()
    assert shown.err == "   0 s  simulating: 1 of 4 runs, 1 under way (38%)\n"
    assert shown.out == ""


def test_a_simulation_says_how_far_it_is_with_each_of_its_repeats():
    with Interrupt() as interrupt:
        interrupt.shares.begin(1)
        report = interrupt.flag.progress.of(200, run=1, runs=2)
        found = []
        for done in (1, 2, 100, 200):
            report(done)
            found.append(interrupt.shares.together())
    assert found == [0.5025, 0.5025, 0.75, 1.0]


def test_a_flag_says_nothing_on_another_host():
    with Interrupt() as interrupt:
        interrupt.flag.raise_()
        assert interrupt.flag.is_raised()
        assert not interrupt.flag._replace(host="elsewhere").is_raised()


def test_a_second_ctrl_c_is_obeyed_and_what_handled_signals_before_does_so_again():
    before = signal.getsignal(signal.SIGINT)  # ignored, where the tests run in the background
    with pytest.raises(KeyboardInterrupt) as raised, Interrupt() as interrupt, noted():
        ctrl_c()
        ctrl_c()
        assert interrupt.is_asked
        time.sleep(2 * TOGETHER_S)
        ctrl_c()
    assert raised.type is SecondInterruptError
    assert signal.getsignal(signal.SIGINT) is before


def test_what_does_not_ask_for_the_flag_ends_where_it_stands():
    with pytest.raises(InterruptError), Interrupt():
        once(lambda: True, ctrl_c)
        while True:
            pass


def goes_on(started):
    """Work on without a look at any flag, as who reads a file or draws a chart does."""
    Path(started).touch()
    while True:
        pass


@pytest.mark.parametrize("jobs", [1, 2])
def test_calls_that_do_not_ask_for_the_flag_end_where_they_stand(tmp_path, jobs):
    started = [tmp_path / str(number) for number in range(jobs)]
    with Interrupt() as interrupt:
        thread = once(lambda: all(file.exists() for file in started), ctrl_c)
        found = list(in_parallel([(goes_on, (str(file),)) for file in started], jobs, interrupt=interrupt))
        thread.join()
    assert found == []
    assert interrupt.is_asked


def kept(place, flag):
    return place


def test_what_is_done_with_a_result_is_not_torn_apart():
    done = []
    with Interrupt() as interrupt:
        for _, place in in_parallel([(kept, (place, interrupt.flag)) for place in range(5)], 1, interrupt=interrupt):
            ctrl_c()
            done.append(place)
    assert done == [0]


def test_an_interrupt_in_a_gap_without_requests_ends_a_simulation_within_a_few_events():
    year = Workload("gap", 64, [Request(0.0, 64, 8, (1,)), Request(3.2e7, 64, 8, (2,))])
    planner = PlannerConfig(planner="hpa", planner_interval_s=0.01)
    deployment = replace(deployed(workers=1), planner=planner)
    looks = []

    def is_interrupted():
        looks.append(1)
        return len(looks) > 10

    record = simulate(Run.alone(Settings(deployment)), year, is_interrupted=is_interrupted)
    assert len(record.requests) == 1
    assert not record.is_complete
    assert record.fleet.decisions < 11 * LOOK_EVERY


def start(*arguments, **options):
    command = [sys.executable, "-m", "dynabench", *map(str, arguments)]
    return warm.start(command, start_new_session=True, **options)


@pytest.fixture
def temporary(tmp_path):
    """A folder for temporary files that must be empty in the end."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    yield folder
    assert list(folder.iterdir()) == []


def test_ctrl_c_in_a_terminal_ends_simulate_with_130_and_a_report(tmp_path, temporary):
    trace, out = tmp_path / "t.jsonl", tmp_path / "x"
    row = '{"timestamp": %d, "input_length": 64, "output_length": 8, "hash_ids": [%d]}\n'
    trace.write_text("".join(row % (10 * number, number) for number in range(COUNT)))
    ours, theirs = pty.openpty()
    process = start(
        "simulate", trace, "--trace-block-size", "64", "--jobs", "1", "--out", out,
        stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TMPDIR": str(temporary), "COLUMNS": "120"},
    )  # fmt: skip
    os.close(theirs)
    said = b""
    is_sent = False
    while True:
        try:
            said += os.read(ours, 1 << 16)
        except OSError:
            break
        if not is_sent and re.search(rb"[1-9]%", said):  # the bar moves within a run
            os.killpg(process.pid, signal.SIGINT)
            is_sent = True
    os.close(ours)
    assert process.wait(PATIENCE_S) == 130, said[-2000:]
    assert is_sent
    assert b"Traceback" not in said
    summary = json.loads((out / "summary.json").read_text())
    assert summary["is_complete"] is False
    assert 0 < summary["arms"]["round-robin"]["requests"] < COUNT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.jsonl", "tmp", "x"]


def trace_of(count, folder):
    file = folder / "t.jsonl"
    row = '{"timestamp": %d, "input_length": 64, "output_length": 8, "hash_ids": [%d]}\n'
    file.write_text("".join(row % (10 * number, number) for number in range(count)))
    return file


def long_trace(folder):
    return trace_of(20_000, folder)


def shares_of(temporary):
    """Return how far each simulation of a command is, as it tells its own processes."""
    for file in temporary.glob("dynabench-*/shares"):
        return [share for (share,) in SHARE.iter_unpack(file.read_bytes())]
    return []


OWN_POLICY = """
from serving.planner.policies.hpa import Hpa

class Own(Hpa):
    default_interval_s = 0.1
"""


def test_sigterm_ends_a_simulation_in_a_gap_without_requests(tmp_path, temporary):
    trace, policy = tmp_path / "t.jsonl", tmp_path / "own.py"
    row = '{"timestamp": %d, "input_length": 64, "output_length": 8, "hash_ids": [%d]}\n'
    trace.write_text(row % (0, 1) + row % (32_000_000_000, 2))
    policy.write_text(OWN_POLICY)
    process = start(
        "simulate", trace, "--workers", "1", "--planner", policy, "--max-replicas", "2", "--router-mode", "random",
        "--out", tmp_path / "x", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(temporary)},
    )  # fmt: skip
    until(lambda: shares_of(temporary) == [0.5], process)
    process.terminate()
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, stderr
    assert "The run was interrupted" in " ".join(stdout.split())
    assert "draws them" in (tmp_path / "x" / "report.html").read_text()
    assert not (tmp_path / "x" / "charts").exists()


def test_sigterm_after_the_simulation_keeps_the_runs_and_no_half_report(tmp_path, temporary):
    process = start(
        "simulate", long_trace(tmp_path), "--trace-block-size", "64", "--workers", "1", "--router-mode", "random",
        "--out", tmp_path / "x", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
    )  # fmt: skip
    until(lambda: shares_of(temporary) == [1.0], process)
    process.terminate()
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, stdout) == (130, "")
    assert f"the runs are in {tmp_path / 'x'}; write their report with: dynabench report" in stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.jsonl", "tmp", "x"]
    assert not (tmp_path / "x" / "report.html").exists()
    _, [record] = folder.read(tmp_path / "x")
    assert len(record.requests) == 20_000
    assert record.is_complete


def test_a_signal_just_after_the_simulation_keeps_the_runs(tmp_path, monkeypatch):
    class Ending(Display):
        def __exit__(self, *error):
            ctrl_c()
            super().__exit__(*error)

    monkeypatch.setattr("dynabench.experiment.run.Display", Ending)
    experiment = ExperimentConfig(router_mode=("random",), jobs=1, out=tmp_path / "x")
    with pytest.raises(KeyboardInterrupt, match=r"the runs are in .*; write their report with: dynabench report"):
        run_experiment(
            "virtual", (trace_of(10, tmp_path),), experiment, Settings(deployed(workers=1)), console=Terminal()
        )
    _, [record] = folder.read(tmp_path / "x")
    assert (len(record.requests), record.is_complete) == (10, True)


@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_in_simulate_keeps_the_arms_that_ended_and_what_another_had(tmp_path, temporary, jobs):
    arms = ("--router-mode", "round-robin", "--router-mode", "random", "--repeats", "2")
    process = start(
        "simulate", long_trace(tmp_path), "--trace-block-size", "64", "--jobs", jobs, *arms, "--out", tmp_path / "x",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(temporary)},
    )  # fmt: skip
    until(lambda: any(share == 1 for share in shares_of(temporary)), process)
    until(lambda: any(0 < share < 1 for share in shares_of(temporary)), process)
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, stderr
    assert "The run was interrupted" in " ".join(stdout.split())
    assert json.loads((tmp_path / "x" / "summary.json").read_text())["is_complete"] is False
    counts = [run["is_complete"] for run in json.loads((tmp_path / "x" / "experiment.json").read_text())["runs"]]
    assert counts
    assert not any(counts)
    assert (tmp_path / "x" / "report.html").exists()


def test_ctrl_c_in_a_sweep_shows_the_points_that_are_known(tmp_path, temporary):
    process = start(
        "sweep", long_trace(tmp_path), "--trace-block-size", "64", "--router-mode", "random", "--vary", "workers=1..8",
        "--jobs", "1", "--out", tmp_path / "x", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
    )  # fmt: skip
    points = tmp_path / "x" / "points"
    until(lambda: points.exists() and any(points.iterdir()), process)
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, stderr
    assert "The sweep was interrupted; run the same command again to resume it." in " ".join(stdout.split())
    known = json.loads((tmp_path / "x" / "sweep.json").read_text())["summary"]["points"]
    assert 1 <= len(known) == len(list(points.iterdir())) < 8
    beside = dynabench("compare", tmp_path / "x")
    assert (beside.returncode, "x: interrupted, so incomplete." in " ".join(beside.stdout.split())) == (0, True), (
        beside.stderr
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_group_ends_a_plan_in_one_line_with_what_is_known(tmp_path, temporary, number):
    process = start(
        "plan", "--model", "meta-llama/Llama-3.1-8B", "--gpu", "h100", "--slo", "ttft.p90 <= 300ms", "--rate-scale", "10",
        "--vary", "max_num_seqs=32,64,128,256", "--jobs", "2", "--out", tmp_path / "x",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(temporary)},
    )  # fmt: skip
    until(lambda: any(share > 0 for share in shares_of(temporary)), process)
    process.send_signal(number)  # as `timeout` does
    os.killpg(process.pid, number)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, PROGRESS.sub("", stderr)) == (130, "")
    assert "Interrupted before any layout was found to meet the limits" in " ".join(stdout.split())


def killed_at_its_work():
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_at_a_simulation_is_reported_in_one_line():
    with Interrupt() as interrupt, pytest.raises(UserError, match="a simulation process was killed"):
        list(in_parallel([(killed_at_its_work, ())] * 2, 2, interrupt=interrupt))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers end with the simulation that they are in")
def test_the_workers_of_a_sweep_that_is_killed_end_with_it(tmp_path):
    process = start(
        "sweep", "--vary", "num_gpu_blocks=200,400,800,1600", "--repeats", "50", "--jobs", "2", "--out", tmp_path / "x",
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip

    def workers():
        return descendants(process.pid)

    until(lambda: len(workers()) >= 2 and (tmp_path / "x").exists(), process)
    found = workers()
    process.kill()
    process.wait(PATIENCE_S)
    until(lambda: not any(is_running(pid) for pid in found))


def is_running(pid):
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


async def never_ends(reader, writer):
    writer.write(HEAD + chunk(EVENT))
    await writer.drain()
    await reader.read()


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_a_live_run_ends_it_at_once(tmp_path, temporary, times):
    seen = []
    with strange_server(never_ends, seen) as url:
        process = start(
            "run", "--url", url, "--max-requests", "20", "--out", tmp_path / "x",
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(temporary)},
        )  # fmt: skip
        until(lambda: seen, process)
        for _ in range(times):
            os.killpg(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "interrupted" in stderr
    assert "Traceback" not in stdout + stderr
    assert [path.name for path in tmp_path.iterdir()] == ["tmp"]


def test_ctrl_c_while_an_answer_is_read_ends_a_selftest_without_a_verdict(monkeypatch, capsys):
    read = http_client._Connection.data_received

    def interrupted(connection, data):
        ctrl_c()
        read(connection, data)

    def raising(number, frame):
        raise KeyboardInterrupt

    monkeypatch.setattr(http_client._Connection, "data_received", interrupted)
    before = signal.signal(signal.SIGINT, raising)  # as the command line does
    try:
        with pytest.raises(KeyboardInterrupt):
            run_selftest(SelftestConfig(requests=20, clients=1), Terminal())
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().out == ""


def blocked_signals():
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in status if line.startswith("SigBlk"))


class AsItArrives:
    """Becomes, where it is unpickled, the signals that are blocked there then: before the call itself begins."""

    def __reduce__(self):
        return blocked_signals, ()


def test_no_interrupt_reaches_a_process_that_simulates_from_its_start_on():
    with Interrupt() as interrupt:
        calls = [(int, (AsItArrives(),))] * 4
        masks = [mask for _, mask in in_parallel(calls, 2, interrupt=interrupt)]
    for number in (signal.SIGINT, signal.SIGTERM):
        assert [bool(mask & 1 << (number - 1)) for mask in masks] == [True] * 4


FIRST_PROCESS = """
import multiprocessing
from dynabench.interrupt import held_back
from tests.dynabench.test_interrupt import AsItArrives

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=print, args=(AsItArrives(),))
    with held_back():
        process.start()
    process.join()
"""


def test_no_interrupt_reaches_the_first_process_that_a_process_starts(tmp_path):
    (tmp_path / "first.py").write_text(FIRST_PROCESS)
    command = [sys.executable, tmp_path / "first.py"]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": root}, capture_output=True, text=True, check=True)
    assert int(done.stdout) & 1 << (signal.SIGINT - 1)


@pytest.mark.parametrize(("handler", "is_asked"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_a_terminal_that_is_closed_asks_to_end_unless_nohup_ignores_that(handler, is_asked):
    before = signal.signal(signal.SIGHUP, handler)
    try:
        with Interrupt() as interrupt, noted():
            os.kill(os.getpid(), signal.SIGHUP)
            assert interrupt.is_asked is is_asked
        assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, before)
