import pytest

from tests.support.workloads import conversations


@pytest.fixture(scope="session")
def workload():
    """Conversations of four turns, in blocks of 512 tokens."""
    return conversations(1500, rate=5, turns=4, prefix_groups=6)
