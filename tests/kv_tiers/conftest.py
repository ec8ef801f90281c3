import pytest

from tests.kv_tiers.world import new_world


@pytest.fixture
def world():
    with new_world() as world:
        yield world
