import pytest

from tests.transfer.world import new_world


@pytest.fixture
def world():
    with new_world() as world:
        yield world
