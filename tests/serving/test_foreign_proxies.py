"""Proxies of others before our prefill and decode workers: they share requests out themselves, by kv_transfer_params.

See `tests/support/proxies.py`.
"""

import contextlib
import json

import httpx
import pytest

from tests.support.apart import apart
from tests.support.proxies import side_car, streamed_text, text_of, toy_proxy

PROMPT = "Once upon a time there was a small town by the sea, and in it a clock that nobody wound. " * 3
ALLOWED = {"allow_kv_transfer_params": True}


@contextlib.contextmanager
def one_frontend(folder):
    """Both pools behind one frontend, and a worker that does everything under another name."""
    with apart(folder, frontend=ALLOWED) as stack:
        stack.worker("p", "prefill")
        stack.worker("d", "decode")
        stack.worker("a", "aggregated", model="whole")
        stack.until_there(3)
        yield stack.url, stack.url, stack.url


@contextlib.contextmanager
def two_frontends(folder):
    """A frontend for each pool, as where each is a vLLM server of its own."""
    with apart(folder / "p", frontend=ALLOWED) as prefilling, apart(folder / "d", frontend=ALLOWED) as decoding:
        prefilling.worker("p", "prefill")
        decoding.worker("d", "decode")
        decoding.worker("a", "aggregated", model="whole")
        prefilling.until_there(1)
        decoding.until_there(2)
        yield prefilling.url, decoding.url, decoding.url


@pytest.fixture(scope="module", params=[one_frontend, two_frontends], ids=["one frontend", "a frontend each"])
def urls(request, tmp_path_factory):
    with request.param(tmp_path_factory.mktemp("proxies")) as found:
        yield found


def completion(**more):
    return "/v1/completions", {"model": "apart", "prompt": PROMPT, "max_tokens": 24, "seed": 7} | more


def chat(**more):
    messages = [{"role": "user", "content": PROMPT}]
    return "/v1/chat/completions", {
        "model": "apart",
        "messages": messages,
        "max_completion_tokens": 24,
        "seed": 7,
    } | more


@pytest.mark.parametrize("proxy", [toy_proxy, side_car])
@pytest.mark.parametrize("ask", [completion, chat])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_through_a_proxy_is_the_plain_one(urls, proxy, ask, stream):
    prefill_url, decode_url, whole_url = urls
    path, body = ask(stream=stream)
    plain = httpx.post(whole_url + path, json=ask(model="whole")[1], timeout=60)
    prefilled, answer = proxy(prefill_url, decode_url, path, body)
    assert answer.status_code == 200
    assert (streamed_text(answer) if stream else text_of(answer)) == text_of(plain)
    params = prefilled["kv_transfer_params"]
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert params["remote_block_ids"]
    if not stream:
        assert answer.json()["usage"]["completion_tokens"] == 24
        assert "kv_transfer_params" not in answer.json()


def test_the_kv_is_read_and_not_computed_again(urls):
    prefill_url, decode_url, _ = urls
    path, body = completion(prompt="Nobody has ever asked this. " * 20, nvext={"extra_fields": ["timing"]})
    _, answer = toy_proxy(prefill_url, decode_url, path, body)
    stages = answer.json()["nvext"]["timing"]["stages"]
    assert stages["transfer_end"] >= stages["transfer_start"] > 0


def test_a_stream_that_prefills_ends_with_where_the_kv_is(urls):
    path, body = completion(stream=True, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    answer = httpx.post(urls[0] + path, json=body, timeout=60)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert [("kv_transfer_params" in event) for event in events][-1]
    assert events[-1]["kv_transfer_params"]["do_remote_prefill"] is True


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": True}}, "and not both"),
        ({"kv_transfer_params": [1]}, "Expected `object | null`"),
        ({"kv_transfer_params": {"do_remote_decode": True, "x": "y" * 300_000}}, "at most 262,144 bytes"),
        ({"kv_transfer_params": {"do_remote_decode": True}, "n": 2}, "need a single prompt and a single answer"),
        ({"kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": ["x"]}}, ""),
    ],
)
def test_what_makes_no_sense_is_400(urls, more, problem):
    path, body = completion(**more)
    answer = httpx.post(urls[1] + path, json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    assert problem in answer.json()["error"]["message"]


@pytest.mark.parametrize("params", [{}, {"do_remote_decode": False, "do_remote_prefill": False}])
def test_parameters_that_ask_for_nothing_are_of_no_account(urls, params):
    path, body = completion(kv_transfer_params=params)
    answer = httpx.post(urls[1] + path, json=body, timeout=60)
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 24)


def test_a_plain_request_to_prefill_workers_alone_is_503(tmp_path):
    with apart(tmp_path, frontend=ALLOWED) as stack:
        stack.worker("p", "prefill")
        stack.until_there(1)
        path, body = completion()
        answer = httpx.post(stack.url + path, json=body, timeout=60)
        assert answer.status_code == 503
        assert "only prefill workers serve model 'apart'" in answer.json()["error"]["message"]


def test_clients_share_requests_out_only_where_that_is_allowed(tmp_path):
    with apart(tmp_path) as stack:
        stack.worker("d", "decode")
        stack.until_there(1)
        path, body = completion(kv_transfer_params={"do_remote_prefill": True, "remote_host": "10.0.0.1"})
        answer = httpx.post(stack.url + path, json=body, timeout=60)
        assert answer.status_code == 400
        assert "accepted from clients only with --allow-kv-transfer-params" in answer.json()["error"]["message"]
