"""What every run of the tests should say, and how patient it is."""

import os

import httpx
import hypothesis

from tests.support.waiting import PATIENCE_S

# The default of httpx.get, httpx.Client and their like: 5 s are soon over on a busy machine.
vars(httpx._config.DEFAULT_TIMEOUT_CONFIG).update(httpx.Timeout(PATIENCE_S).as_dict())

# How long an example takes says how busy the machine is, and nothing of the code.
slow = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("any machine", deadline=None, suppress_health_check=slow)
hypothesis.settings.load_profile("any machine")


def pytest_report_header():
    if not os.environ.get("DYNABENCH_ENGINE"):
        return "real engines (tests/real_engines) are not collected here: .ci/engines makes their environments and runs them"
    return f"real engine: {os.environ['DYNABENCH_ENGINE']}"
