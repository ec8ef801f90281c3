"""What every run of the tests says and undoes, how patient it is, and how it starts processes."""

import asyncio
import logging
import os
import runpy
from pathlib import Path

import httpx
import hypothesis
import pytest

from serving.supervision.logs import ALL
from tests.support import examples, warm
from tests.support.waiting import PATIENCE_S

os.environ.pop("COLUMNS", None)  # which pytest-xdist sets for its workers; with it, output is wrapped in pipes, too

# The default of httpx.get, httpx.Client and their like: 5 s are soon over on a busy machine.
vars(httpx._config.DEFAULT_TIMEOUT_CONFIG).update(httpx.Timeout(PATIENCE_S).as_dict())


# Stacks that tests run in their own process start their workers and frontends as forks: see warm.py.
asyncio.create_subprocess_exec = warm.create_subprocess_exec


def pytest_configure(config):
    """Take few examples of each property in the default run, and in a run of long tests as many as it is worth."""
    examples.are_many = config.getoption("markexpr") != "not long"
    # How long an example takes says how busy the machine is, and nothing of the code.
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile(
        "any machine", max_examples=examples.worth(), deadline=None, suppress_health_check=slow
    )
    hypothesis.settings.load_profile("any machine")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Let a run of long tests have the properties too: those of the default run are the same with few examples."""
    if examples.are_many:
        for item in items:
            if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
                item.add_marker("long")


@pytest.fixture(autouse=True)
def log_levels():
    """Undo afterwards what a command that ran in this process logs: later tests read logs, too."""
    loggers = [logging.getLogger(name) for name in ALL]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A folder with a model of vLLM's shape that is small enough for any machine."""
    made = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "tiny_model.py"))
    path = tmp_path_factory.mktemp("models") / "tiny"
    made["make"](path)
    return path


def pytest_report_header():
    if not os.environ.get("DYNABENCH_ENGINE"):
        return "real engines (tests/real_engines) are not collected here: .ci/engines makes their environments and runs them"
    return f"real engine: {os.environ['DYNABENCH_ENGINE']}"
