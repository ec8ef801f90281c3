"""Sweeps and plans on real clusters of this machine: their processes start elsewhere, and some of them die.

`.ci/engines clusters` has the packages; without them, these tests are skipped.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from dynabench.experiment import clusters
from dynabench.experiment.clusters import ClusterError, DaskCluster, RayCluster
from dynabench.experiment.parallel import in_parallel
from dynabench.experiment.settings import ExperimentConfig
from dynabench.experiment.source import source_of
from dynabench.interrupt import Interrupt
from foundation.errors import UserError
from tests.support.commands import run
from tests.support.waiting import PATIENCE_S, until
from workloads.shape import ShapeConfig

pytest.importorskip("distributed")
pytest.importorskip("ray")
ROOT = Path(__file__).parents[2]
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{number:02}.0000000,{200 + number % 7 * 100},{20 + number % 5}\n" for number in range(60)
)


class Head:
    """A cluster's head, with workers, none of which is where the tests are."""

    def __init__(self, kind, folder):
        self.kind, self.folder = kind, folder
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._short = tempfile.TemporaryDirectory(prefix="ray")  # the path of a Unix socket has at most 107 bytes
        self._env = os.environ | {"PYTHONPATH": path, "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": self._short.name}
        self.processes = []
        self.address = self._dask() if kind == "dask" else self._ray()

    def _start(self, *words):
        with (self.folder / "log").open("a") as log:
            done = subprocess.Popen(
                [sys.executable, "-m", *words], cwd=self.folder, env=self._env, stdout=log, stderr=log
            )
        self.processes.append(done)

    def _dask(self):
        file = self.folder / "scheduler.json"
        here = ("--scheduler-file", str(file), "--no-dashboard")
        self._start("distributed.cli.dask_scheduler", "--port", "0", "--host", "127.0.0.1", *here)
        until(file.exists, self.processes[0])
        for _ in range(2):
            self._start("distributed.cli.dask_worker", "--nthreads", "1", *here)
        return json.loads(file.read_text())["address"]

    def _ray(self):
        port = 20_000 + os.getpid() % 20_000
        words = ("--head", "--num-cpus", "2", "--port", str(port), "--include-dashboard=false", "--block")
        self._start("ray.scripts.scripts", "start", *words)
        until(lambda: "Ray runtime started" in (self.folder / "log").read_text(), self.processes[0])
        return f"127.0.0.1:{port}"

    def die(self):
        """Kill the head; its workers go with it or wait for it in vain."""
        self.processes[0].send_signal(signal.SIGKILL if self.kind == "dask" else signal.SIGTERM)

    def stop(self):
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()
        with contextlib.suppress(OSError):  # something of Ray may still write there
            self._short.cleanup()


@pytest.fixture(params=["dask", "ray"])
def head(request, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    (folder := tmp_path / "elsewhere").mkdir()
    started = Head(request.param, folder)
    yield started
    with contextlib.suppress(Exception):
        connected = clusters.cluster_of(started.kind, started.address, 0)
        connected.close()
    DaskCluster.connected.cache_clear()
    RayCluster.connected.cache_clear()
    started.stop()


def carried_out(head, calls, jobs=0):
    with Interrupt() as interrupt:
        yield from in_parallel(calls, jobs, interrupt=interrupt, backend=head.kind, address=head.address)


def squared(number):
    return number**2


def counted(source, number):
    return len(source(ShapeConfig(max_requests=number)))


def dying_once(mark, number):
    if not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def dying():
    os.kill(os.getpid(), signal.SIGKILL)


def opened(name):
    with open(name) as file:  # noqa: PTH123 (as any code would)
        return file.read()


def refusing(name):
    if not Path(name).exists():
        raise UserError(f"{name}: cannot be read (No such file or directory)")


def slow(number):
    time.sleep(0 if number == 0 else 5)
    return number


def test_calls_are_carried_out_and_their_results_come_back(head):
    assert dict(carried_out(head, [(squared, (number,)) for number in range(20)])) == {n: n**2 for n in range(20)}


def test_the_workload_goes_along_although_its_file_is_only_here(head, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("trace.csv").write_text(TRACE)
    source = source_of((Path("trace.csv"),), ExperimentConfig())
    assert dict(carried_out(head, [(counted, (source, number)) for number in (10, 20, 30)])) == {0: 10, 1: 20, 2: 30}


def test_a_call_whose_process_dies_is_carried_out_again(head, tmp_path):
    calls = [(dying_once, (str(tmp_path / "mark"), number)) for number in range(4)]
    assert dict(carried_out(head, calls)) == {number: number for number in range(4)}


def test_a_call_whose_processes_always_die_is_an_error_that_says_so(head):
    with pytest.raises(ClusterError, match=rf"processes of the {head.kind} cluster were killed several times"):
        dict(carried_out(head, [(dying, ())]))


def test_a_file_that_is_missing_there_is_named(head, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("times.csv").touch()
    with pytest.raises(FileNotFoundError, match=r"times\.csv") as error:
        dict(carried_out(head, [(opened, ("times.csv",))]))
    assert "on the cluster's host" in str(error.value.__notes__)
    with pytest.raises(UserError, match=r"times.csv: cannot be read \(No such file or directory\)"):
        dict(carried_out(head, [(refusing, ("times.csv",))]))


def test_what_came_back_before_the_head_died_is_kept_and_the_rest_is_an_error(head):
    results = carried_out(head, [(slow, (number,)) for number in range(20)], jobs=2)
    assert next(results) == (0, 0)
    head.die()
    with pytest.raises(ClusterError, match=rf"the {head.kind} (cluster|scheduler) is gone"):
        list(results)


def test_a_cluster_that_does_not_answer_is_an_error(monkeypatch):
    monkeypatch.setattr(clusters, "TIMEOUT_S", 1.0)
    with Interrupt() as interrupt, pytest.raises(ClusterError, match=r"does not respond"):
        dict(in_parallel([(squared, (1,))], interrupt=interrupt, backend="dask", address="tcp://127.0.0.1:1"))


@pytest.mark.parametrize("command", [("sweep", "--vary", "workers=1,2"), ("plan", "--slo", "ttft.p50 <= 1s")])
def test_points_of_a_cluster_are_those_of_this_machine(head, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    Path("trace.csv").write_text(TRACE)
    name, *more = command
    words = (name, "trace.csv", *more, "--model", "Qwen/Qwen3-8B", "--gpu", "h100")
    words += ("--max-num-batched-tokens", "2048") if name == "sweep" else ("--tensor-parallel-size", "1")
    for out, where in (("here", ("--jobs", "1")), ("there", ("--backend", head.kind, "--cluster", head.address))):
        done = run(sys.executable, "-m", "dynabench", *words, *where, "--out", out, fresh=True, timeout=PATIENCE_S * 4)
        assert done.returncode == 0, done.stderr
    here, there = ({file.name: points(file) for file in Path(out, "points").iterdir()} for out in ("here", "there"))
    assert set(here) <= set(there)
    assert all(there[name] == point for name, point in here.items())


def points(file):
    return json.loads(file.read_text()) | {"wall_s": 0}
