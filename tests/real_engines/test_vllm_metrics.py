"""The metrics of a stand-in and of vLLM after the same requests: families, labels and buckets, and every count exactly."""

import pytest

from tests.stand_in.metric_facts import facts, recorded, values
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(900)

BY_TIMING = ("vllm:iteration_tokens_total",)
"""What depends on whether requests sent together come to the same step."""

IDLE = 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0'

FINISHED = ("request_success_total", "e2e_request_latency_seconds_count", "request_params_n_count")


@pytest.fixture(scope="module")
def both(real_vllm, stand_in):
    return real_vllm, stand_in


def scrape(client):
    return client.get("/metrics").text


def complete(client, prompt, **more):
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "ignore_eos": True, **more}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def tokens(first, count):
    """Return a prompt of which no other has the first block."""
    return [10 + first, *range(10, 9 + count)]


def changes(client, ask):
    """Return by how much each count changes while something is asked; of times there is only the number of samples."""
    before = values(scrape(client))
    ask(client)
    until(lambda: IDLE in scrape(client))  # an answer that a stop string ends is there before vLLM's engine knows
    after = values(scrape(client))
    timed = {name for name, *_ in after if name.endswith(("_seconds_bucket", "_seconds_sum"))}
    return {key: after[key] - before[key] for key in after if key[0] not in timed and after[key] != before[key]}


def without(found, names):
    return {key: value for key, value in found.items() if not key[0].startswith(names)}


def test_families_types_labels_and_buckets_are_the_same_and_as_recorded(both):
    real, stand_in = (facts(scrape(client)) for client in both)
    # The record is of a longer model: buckets of lengths go on.
    grown = [name for name, fact in recorded("default").items() if fact != real[name]]
    assert all(name.startswith("vllm:request_") for name in grown)
    assert stand_in == real


def test_what_is_known_of_the_cache_is_the_same_but_for_what_memory_it_has(both):
    real, stand_in = (labels_of_cache(scrape(client)) for client in both)
    differ = {name for name in real if real[name] != stand_in[name]}
    assert differ <= {
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "mamba_ssm_cache_dtype",  # vLLM's CPU backend sets it on CPUs with AVX-512 BF16
        "num_gpu_blocks_override",
        "user_specified_block_size",
    }


def labels_of_cache(text):
    [line] = [line for line in text.splitlines() if line.startswith("vllm:cache_config_info{")]
    return dict(part.split("=", 1) for part in line[line.index("{") + 1 : line.rindex("}")].split('",'))


def one_prompt(client):
    complete(client, tokens(1, 70), max_tokens=6)


def the_same_prompt_again(client):
    complete(client, tokens(1, 70), max_tokens=6)


def a_longer_prompt_with_the_same_start(client):
    complete(client, tokens(1, 70) + tokens(2, 40), max_tokens=40)


def a_prompt_in_chunks(client):
    complete(client, tokens(3, 900), max_tokens=3)


def one_token(client):
    complete(client, tokens(1, 33), max_tokens=1)


def no_limit(client):
    complete(client, tokens(4, 5))


def up_to_the_longest(client):
    complete(client, tokens(5, 1000), max_tokens=24)


def a_chat(client):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "ignore_eos": True}
    assert client.post("/v1/chat/completions", json=body).status_code == 200


def log_probabilities_of_the_prompt(client):
    complete(client, tokens(1, 70), max_tokens=3, echo=True, logprobs=1)


def a_stream(client):
    body = {"model": "tiny", "prompt": tokens(6, 50), "max_tokens": 12, "stream": True, "ignore_eos": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")


def what_is_refused(client):
    assert client.post("/v1/completions", json={"model": "other", "prompt": "a"}).status_code == 404
    assert client.post("/v1/completions", json={"model": "tiny", "prompt": tokens(7, 2000)}).status_code == 400


@pytest.mark.parametrize(
    "ask",
    [
        one_prompt,
        the_same_prompt_again,
        a_longer_prompt_with_the_same_start,
        a_prompt_in_chunks,
        one_token,
        no_limit,
        up_to_the_longest,
        a_chat,
        log_probabilities_of_the_prompt,
        a_stream,
        what_is_refused,
    ],
)
def test_one_request_after_another_changes_the_same_counts(both, ask):
    real, stand_in = (changes(client, ask) for client in both)
    assert stand_in == real


def test_an_answer_that_a_stop_string_ends_changes_the_same_counts(both):
    prompt = tokens(8, 40)
    starts = [{count: complete(client, prompt, max_tokens=count) for count in range(4, 12)} for client in both]
    whole = [
        count
        for count in range(4, 12)
        if all(start[count] and "\N{REPLACEMENT CHARACTER}" not in start[count] for start in starts)
    ]
    count = whole[0]
    real, stand_in = (
        changes(client, lambda client, stop=start[count]: complete(client, prompt, max_tokens=30, stop=[stop]))
        for client, start in zip(both, starts, strict=True)
    )
    assert real["vllm:generation_tokens_total", ("engine", "0"), ("model_name", "tiny")] == count
    assert stand_in == real


@pytest.mark.parametrize(
    "more", [{"n": 3, "temperature": 1, "max_tokens": 7}, {"prompt": [tokens(9, 40), tokens(10, 70)], "max_tokens": 9}]
)
def test_several_answers_to_a_request_change_the_same_counts(both, more):
    asked = {"prompt": tokens(11, 70)} | more
    real, stand_in = (without(changes(client, lambda client: complete(client, **asked)), BY_TIMING) for client in both)
    assert stand_in == real


def test_a_preemption_changes_the_same_counts(both):
    prompts = [tokens(12, 300), tokens(13, 300), tokens(14, 300)]  # 10 blocks each, of 39
    asked = {"prompt": prompts, "max_tokens": 120}  # and 14 at the end
    real, stand_in = (without(changes(client, lambda client: complete(client, **asked)), BY_TIMING) for client in both)
    assert real["vllm:num_preemptions_total", ("engine", "0"), ("model_name", "tiny")] > 0
    assert stand_in == real


def test_a_request_whose_client_hangs_up_finishes_on_neither(both):
    def hang_up(client):
        body = {"model": "tiny", "prompt": tokens(15, 40), "max_tokens": 900, "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())

    for client in both:
        found = changes(client, hang_up)
        assert found["vllm:prompt_tokens_total", ("engine", "0"), ("model_name", "tiny")] == 40
        assert not [key for key in found if key[0].startswith(tuple(f"vllm:{name}" for name in FINISHED))]


def test_http_calls_are_counted_alike(both):
    def call(client):
        for method, path in (("GET", "/v1/models"), ("DELETE", "/v1/models"), ("GET", "/nowhere"), ("GET", "/health")):
            client.request(method, path)
        complete(client, "a", max_tokens=1)

    def counted(client):
        before = http_counts(scrape(client))
        call(client)
        after = http_counts(scrape(client))
        return {line: after[line] - before.get(line, 0) for line in after if after[line] != before.get(line, 0)}

    real, stand_in = (counted(client) for client in both)
    assert stand_in == real
    assert real['http_requests_total{handler="none",method="DELETE",status="4xx"}'] == 1


def http_counts(text):
    """Return what is counted of calls, but for the times they took and the sizes of answers."""
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("http_request")]
    return {name: float(value) for name, value in lines if "_created" not in name and "_duration" not in name}
