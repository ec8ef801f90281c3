"""Tests of carrying out many calls at once."""

import functools
import time

import joblib

from dynabench.experiment import parallel
from dynabench.interrupt import Interrupt


def late(number):
    time.sleep(0.02)
    return number


def test_calls_are_carried_out_though_idle_processes_end_as_they_come(monkeypatch):
    """loky's warning, an error here, ended the thread that collects results: the calls never ended."""
    config = functools.partial(joblib.parallel_config, idle_worker_timeout=0.02)
    monkeypatch.setattr(joblib, "parallel_config", config)
    for _ in range(10):
        with Interrupt() as interrupt:
            results = dict(parallel.in_parallel([(late, (n,)) for n in range(6)], 2, interrupt=interrupt))
        assert results == {n: n for n in range(6)}
        time.sleep(0.03)  # so that the processes are about to end
