"""SGLang behind the KV router, and the mocker with its scheduler in the same stack, under the same requests.

What the router expects is what the engine finds, and both engines find the same.
"""

import contextlib
import random
import time

import openai
import pytest

from dynabench.deployment.description import Deployment, Pool
from dynabench.live.stack import LocalStack
from mocker.sglang.config import SglangConfig
from mocker.timing.config import TimingConfig
from serving.frontend.config import FrontendConfig
from serving.worker.config import WorkerConfig
from tests.real_engines.conftest import running
from tests.support.stacks import in_background

pytestmark = pytest.mark.timeout(500)
PAGE = 16
SETTINGS = {
    "page_size": PAGE,
    "max_total_tokens": 2048,
    "max_running_requests": 8,
    "chunked_prefill_size": 256,
    "schedule_policy": "lpm",
}
NUM_REQUESTS = 70


@contextlib.contextmanager
def mocked(engine):
    """Run the mocker with SGLang's scheduler in the background; give the stack."""
    pool = Pool(
        engine_type="sglang",
        sglang=SglangConfig(**SETTINGS),
        timing=TimingConfig(timing="constant", constant_prefill_ms=4, constant_decode_ms=1),
        worker=WorkerConfig(model_path=str(engine.model), drain_s=5.0),
    )
    served = FrontendConfig(http_port=0, drain_s=5.0)
    stack = LocalStack(Deployment(pools=(pool,), router_mode="kv", frontend=served))
    with in_background(stack):
        yield stack


def requests_of(rng):
    """Return prompts and lengths of answers: conversations that go on, repeats, new ones; more than the cache holds."""
    shared = [rng.choices(range(10, 1000), k=rng.randrange(3, 30) * PAGE + rng.choice([0, 1, 7])) for _ in range(12)]
    for _ in range(NUM_REQUESTS):
        prompt = rng.choice(shared)
        if rng.random() < 0.4:
            prompt = prompt[: rng.randrange(1, len(prompt))] + rng.choices(range(10, 1000), k=rng.randrange(1, 60))
        if rng.random() < 0.3:
            shared.append(prompt)
        yield prompt, rng.choice([1, 2, 20, 60])


def answered(stack):
    """Send the requests one after another; return for each: tokens, those that the router expected in the cache, and those
    that were found there."""
    rows = []
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        for prompt, max_tokens in requests_of(random.Random(11)):
            response = client.completions.with_raw_response.create(
                model="tiny",
                prompt=prompt,
                max_tokens=max_tokens,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            usage = response.parse().usage
            assert usage.completion_tokens == max_tokens
            expected, found = int(response.headers["x-overlap-tokens"]), usage.prompt_tokens_details.cached_tokens
            rows.append((len(prompt), expected, found))
            time.sleep(0.05)  # events travel
    return rows


@pytest.fixture(scope="module")
def real(engine):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    with running(engine, flags=flags) as stack:
        return answered(stack)


@pytest.fixture(scope="module")
def simulated(engine):
    with mocked(engine) as stack:
        return answered(stack)


def test_what_the_router_expects_is_what_sglang_finds(real):
    """But for a last page that ends with the prompt: SGLang leaves a token to compute, and pages are whole."""
    assert [found for *_, found in real] == [min(expected, (size - 1) // PAGE * PAGE) for size, expected, _ in real]
    assert sum(found > 0 for *_, found in real) > NUM_REQUESTS // 3
    assert sum(found == 0 for *_, found in real) > NUM_REQUESTS // 5  # first times, and what was evicted since


def test_the_mocker_finds_what_sglang_finds_and_the_router_expects_the_same_of_both(real, simulated):
    assert simulated == real
