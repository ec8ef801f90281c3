"""Engines of all kinds behind the frontend: what they give reaches the client, what they break does not."""

import contextlib
import os
import sys
from pathlib import Path

import httpx
import openai
import pytest

from tests.support import strange_engine, warm
from tests.support.servers import free_port
from tests.support.waiting import PATIENCE_S, until


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    environment = os.environ | {"DYN_DISCOVERY_DIR": str(tmp_path_factory.mktemp("d")), "DYN_LOG": "off"}
    port = free_port()
    commands = [
        [Path(strange_engine.__file__)],
        ["-m", "serving.frontend", "--http-port", port],
    ]
    processes = [warm.start([sys.executable, *map(str, command)], env=environment) for command in commands]
    try:
        url = f"http://127.0.0.1:{port}"

        def has_both():
            with contextlib.suppress(httpx.HTTPError):
                if len(httpx.get(f"{url}/v1/models").json()["data"]) == 2:
                    return True
                early = httpx.post(f"{url}/v1/completions", json={"model": "tokens", "prompt": "A", "max_tokens": 1})
                assert early.status_code in (200, 503)  # clients try again after 503, not after 404
            return False

        until(has_both)
        yield url
    finally:
        for process in processes:
            process.terminate()
        assert [process.wait(PATIENCE_S) for process in processes] == [0, 0]


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_logprobs_of_a_completion(client):
    asked = {"model": "tokens", "prompt": "A", "max_tokens": 3, "logprobs": 2}
    whole = client.completions.create(**asked).choices[0]
    assert whole.text == "HIJ"
    assert whole.logprobs.tokens == ["H", "I", "J"]
    assert whole.logprobs.token_logprobs == [-0.5, -1.5, -2.5]
    assert whole.logprobs.text_offset == [0, 1, 2]
    assert whole.logprobs.top_logprobs[0] == {"H": -0.5, "I": -1.5}
    events = [event.choices[0] for event in client.completions.create(**asked, stream=True)]
    assert [event.logprobs.token_logprobs for event in events[:3]] == [[-0.5], [-1.5], [-2.5]]
    assert [event.logprobs.text_offset for event in events[:3]] == [[0], [1], [2]]


def test_logprobs_of_a_chat(client):
    asked = {
        "model": "tokens", "messages": [{"role": "user", "content": "A"}], "max_tokens": 2,
        "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    whole = client.chat.completions.create(**asked).choices[0]
    assert [(part.token, part.logprob) for part in whole.logprobs.content] == [("H", -0.5), ("I", -1.5)]
    assert [top.token for top in whole.logprobs.content[0].top_logprobs] == ["H", "I"]
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert [chunk.logprobs.content[0].logprob for chunk in chunks if chunk.logprobs] == [-0.5, -1.5]


def test_without_being_asked_for_there_are_none(client):
    assert client.completions.create(model="tokens", prompt="A", max_tokens=2).choices[0].logprobs is None


def test_an_engine_that_ends_without_a_reason_is_done(client):
    answer = client.completions.create(model="tokens", prompt="E", max_tokens=9, extra_body={"nvext": {}})
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("HIJKLMNOP", "length")


@pytest.mark.parametrize("prompt", ["B", "C"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_at_once_is_an_error_with_a_status(client, prompt, stream):
    with pytest.raises(openai.InternalServerError) as failed:
        list(client.completions.create(model="tokens", prompt=prompt, max_tokens=2, stream=stream))
    assert failed.value.type == "server_error"


def test_an_engine_that_fails_in_the_middle_is_an_error_in_the_stream(client):
    stream = client.completions.create(model="tokens", prompt="D", max_tokens=2, stream=True)
    got = []
    with pytest.raises(openai.APIError) as failed:
        for event in stream:
            got.append(event.choices[0].text)  # noqa: PERF401 (the loop raises)
    assert got == ["H"]
    assert "engine failed" in failed.value.message


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_takes_whole_requests(client, stream):
    answer = client.completions.create(model="whole", prompt="hello", stream=stream)
    if stream:
        choices = [event.choices[0] for event in answer]
        text, reason = "".join(choice.text for choice in choices), choices[-1].finish_reason
    else:
        text, reason = answer.choices[0].text, answer.choices[0].finish_reason
    assert (text, reason) == ("what you asked", "stop")
    with pytest.raises(openai.InternalServerError):
        list(client.completions.create(model="whole", prompt="fail", stream=stream))
    with pytest.raises(openai.NotFoundError, match="does not offer"):
        client.chat.completions.create(model="whole", messages=[{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "odd",
    [b"[" * 65 + b"1" + b"]" * 65, b'{"a":' * 900 + b"1" + b"}" * 900, b"1" + b"0" * 400, b"-9223372036854775809", b"18446744073709551616"],
)  # fmt: skip
def test_what_cannot_travel_to_an_engine_is_400_and_harms_no_neighbour(url, client, odd):
    with client.completions.create(model="whole", prompt="slow", stream=True) as neighbour:
        first = next(iter(neighbour))
        body = b'{"model":"whole","prompt":"hello","metadata":{"x":' + odd + b"}}"
        answer = httpx.post(f"{url}/v1/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
        assert set(answer.json()) == {"error"}
        assert [first.choices[0].text, *(event.choices[0].text for event in neighbour)] == ["slow"] * 20 + [""]


def test_what_an_engine_gives_and_cannot_travel_ends_that_answer_alone(client):
    with client.completions.create(model="whole", prompt="slow", stream=True) as neighbour:
        next(iter(neighbour))
        for kind in ("object", "large", "deep"):
            with pytest.raises(openai.InternalServerError, match="cannot be sent"):
                client.completions.create(model="whole", prompt=f"odd {kind}")
        assert sum(event.choices[0].text == "slow" for event in neighbour) == 19


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_ends_the_work_of_an_engine_that_takes_whole_requests(url, client, stream):
    def inflight():
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        return [line for line in lines if line.startswith('dynamo_frontend_inflight_requests{model="whole"}')]

    with pytest.raises(openai.APITimeoutError):
        for _ in client.completions.create(model="whole", prompt="forever", stream=stream, timeout=0.5):
            pass
    until(lambda: inflight() == ['dynamo_frontend_inflight_requests{model="whole"} 0.0'])


def test_log_probabilities_that_an_engine_does_not_give_are_400(client):
    for asked in ({"logprobs": 1}, {"logprobs": 1, "stream": True}, {"logprobs": 1, "echo": True}):
        with pytest.raises(openai.BadRequestError, match="log-probabilities") as refused:
            client.completions.create(model="tokens", prompt="F" if "echo" not in asked else "A", max_tokens=2, **asked)
        assert refused.value.param == "logprobs"
