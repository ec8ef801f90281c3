"""What every run of the tests should say."""

import os


def pytest_report_header():
    if not os.environ.get("DYNABENCH_ENGINE"):
        return "real engines (tests/real_engines) are not collected here: .ci/engines makes their environments and runs them"
    return f"real engine: {os.environ['DYNABENCH_ENGINE']}"
