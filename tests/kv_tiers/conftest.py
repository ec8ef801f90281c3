import pytest

from tests.kv_tiers.world import World
from tests.support.world import new_world


@pytest.fixture
def world():
    with new_world(World) as world:
        yield world
