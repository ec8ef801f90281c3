"""What a command loads: a simulation needs no network, and what only some commands use is loaded by those."""

import json
import subprocess
import sys

NETWORKING = {"aiohttp", "asyncio", "fastapi", "http.client", "nats", "ssl", "uvicorn", "uvloop", "zmq"}

LOADED = """
import json, sys
{program}
print(json.dumps(sorted(sys.modules)))
"""


def loaded(program):
    """Return the modules that a fresh process has loaded after a program."""
    command = [sys.executable, "-c", LOADED.format(program=program)]
    return set(json.loads(subprocess.run(command, capture_output=True, check=True).stdout.splitlines()[-1]))


def test_a_simulation_loads_no_networking():
    modules = loaded("import dynabench.virtual.run")
    assert not modules & NETWORKING
    assert not [name for name in modules if name.startswith(("serving.runtime.server", "serving.worker.engine"))]


def test_what_a_process_of_a_sweep_carries_out_loads_neither_networking_nor_charts():
    modules = loaded("import dynabench.experiment.points")
    assert not modules & (NETWORKING | {"jinja2", "multiprocessing", "pyarrow"})


def test_the_simulate_command_loads_no_networking_and_without_processes_nothing_that_makes_them(tmp_path):
    out = tmp_path / "out"
    modules = loaded(f"""
sys.argv = ["dynabench", "simulate", "--jobs", "1", "--out", {str(out)!r}]
from dynabench.cli.app import main
try:
    main()
except SystemExit as ended:
    assert not ended.code
""")
    of_pyarrow = {"http.client", "ssl"}
    assert not modules & (NETWORKING - of_pyarrow | {"joblib", "multiprocessing"})
    assert (out / "report.html").exists()
