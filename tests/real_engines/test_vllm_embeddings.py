"""vLLM runs a model for its embeddings: the frontend returns them, and nothing else of that model."""

import numpy as np
import openai
import pytest

from tests.real_engines.conftest import running

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]  # vLLM's imports warn

POOLING = ("--runner=pooling", "--convert=embed")


@pytest.fixture(scope="module")
def url(engine):
    with running(engine, flags=POOLING) as stack:
        yield stack.url


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_embeddings_are_unit_vectors_and_functions_of_the_text(client):
    name = client.models.list().data[0].id
    found = client.embeddings.create(model=name, input=["one two three", "four five six", "one two three"]).data
    first, second, again = (np.array(each.embedding) for each in found)
    assert np.linalg.norm(first) == pytest.approx(1, abs=1e-3)
    assert np.allclose(first, again, atol=1e-4)
    assert not np.allclose(first, second, atol=1e-2)


def test_such_a_model_answers_nothing_else(client):
    name = client.models.list().data[0].id
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=name, prompt="one two three", max_tokens=2)
