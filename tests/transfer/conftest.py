import pytest

from tests.support.world import new_world
from tests.transfer.world import World


@pytest.fixture
def world():
    with new_world(World) as world:
        yield world
