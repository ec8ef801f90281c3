import pytest
import uvloop

from dynabench.rehearsal.virtual_time import loop
from tests.support.world import new_world
from tests.transfer.world import World


@pytest.fixture
def world():
    with new_world(World) as world:
        yield world


@pytest.fixture
def run(kind):
    """How a test's coroutine runs: in virtual time, where its agents may."""
    return loop.run if kind == "memory" else uvloop.run
