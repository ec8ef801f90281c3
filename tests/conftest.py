"""What every run of the tests should say, and how patient its clients are."""

import os

import httpx

from tests.support.waiting import PATIENCE_S

# The default of httpx.get, httpx.Client and their like: 5 s are soon over on a busy machine.
vars(httpx._config.DEFAULT_TIMEOUT_CONFIG).update(httpx.Timeout(PATIENCE_S).as_dict())


def pytest_report_header():
    if not os.environ.get("DYNABENCH_ENGINE"):
        return "real engines (tests/real_engines) are not collected here: .ci/engines makes their environments and runs them"
    return f"real engine: {os.environ['DYNABENCH_ENGINE']}"
