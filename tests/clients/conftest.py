import pytest

from tests.support.stacks import running


@pytest.fixture(scope="session")
def stack():
    """A mocker whose tokens are bytes."""
    with running(num_workers=1) as stack:
        yield stack
