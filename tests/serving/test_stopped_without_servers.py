"""Processes that are asked to end while NATS or etcd is away: they end well, and at once."""

import os
import signal
import sys

import pytest

from tests.support import warm
from tests.support.servers import Etcd, Nats, free_port
from tests.support.waiting import PATIENCE_S, until, wait_for


@pytest.mark.parametrize("which", ["nats", "etcd"])
def test_processes_that_are_stopped_while_a_server_is_away_end_without_a_traceback(tmp_path, which):
    port = free_port()
    with Etcd() as etcd, Nats() as nats:
        environment = os.environ | {"ETCD_ENDPOINTS": etcd.url, "NATS_SERVER": nats.url, "DYN_LOG": "info"}
        commands = [
            ["serving.frontend", "--http-port", str(port), "--router-mode", "kv"],
            ["serving.mocker", "--drain-s", "1"],
        ]
        logs = [tmp_path / command[0] for command in commands]
        processes = []
        for command, log in zip(commands, logs, strict=True):
            with log.open("w") as file:
                processes.append(
                    warm.start([sys.executable, "-m", *command], env=environment, stdout=file, stderr=file)
                )
        try:
            wait_for(f"http://127.0.0.1:{port}", 1)
            server, away = {"nats": (nats, "NATS at"), "etcd": (etcd, "etcd at")}[which]
            os.killpg(server.process.pid, signal.SIGKILL)
            until(lambda: all(f"{away} " in log.read_text() for log in logs))
        finally:
            for process in processes:
                process.terminate()
            codes = [process.wait(PATIENCE_S) for process in processes]
        said = "\n".join(log.read_text() for log in logs)
        assert codes == [0, 0], said
        assert "Traceback" not in said
        assert said.count("does not answer") == len(processes)
