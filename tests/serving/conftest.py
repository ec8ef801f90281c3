import openai
import pytest

from tests.support import speaking_engine
from tests.support.model import write_model
from tests.support.own_engines import serving_engine
from tests.support.stacks import running


@pytest.fixture(scope="session")
def stack():
    """Two mocker workers whose tokens are bytes, behind the kv router."""
    with running() as stack:
        yield stack


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny(model_path):
    """The same with a real tokenizer and template."""
    with running(worker={"model_path": str(model_path), "model_name": "tiny"}) as stack:
        yield stack


@pytest.fixture
def client(stack):
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def tiny_client(tiny):
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def url(tmp_path_factory):
    """The frontend of an engine that says what it is asked for (`tests.support.speaking_engine`)."""
    with serving_engine(speaking_engine, tmp_path_factory.mktemp("d"), models=2) as url:
        yield url
