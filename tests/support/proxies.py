"""What proxies of others send to instances that share requests, in their order and with their fields.

They are vLLM's toy proxy (tests/v1/kv_connector/nixl_integration/toy_proxy_server.py) and llm-d's routing side-car (its NIXL
protocol).
"""

import json

import httpx

NONE = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}


def toy_proxy(prefill_url, decode_url, path, body):
    """Prefill with a copy that is not streamed and has one token; then send the request with what that answered."""
    copy = body | {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, **NONE}}
    copy |= {"stream": False, "max_tokens": 1}
    if "max_completion_tokens" in copy:
        copy["max_completion_tokens"] = 1
    copy.pop("stream_options", None)
    headers = {"X-Request-Id": "of-the-proxy"}
    prefilled = httpx.post(prefill_url + path, json=copy, headers=headers, timeout=60)
    prefilled.raise_for_status()
    params = prefilled.json().get("kv_transfer_params", {})
    return prefilled.json(), httpx.post(
        decode_url + path, json=body | {"kv_transfer_params": params}, headers=headers, timeout=60
    )


def side_car(prefill_url, decode_url, path, body):
    """As llm-d's: both limits are set whatever the request has, and what it had comes back for the decode call."""
    copy = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    copy |= {"stream": False, "max_tokens": 1, "max_completion_tokens": 1}
    copy["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False, **NONE}
    headers = {"x-request-id": "of-the-side-car"}
    prefilled = httpx.post(prefill_url + path, json=copy, headers=headers, timeout=60)
    prefilled.raise_for_status()
    own = body | {"kv_transfer_params": prefilled.json()["kv_transfer_params"]}
    return prefilled.json(), httpx.post(decode_url + path, json=own, headers=headers, timeout=60)


def text_of(answer):
    (choice,) = answer.json()["choices"]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def streamed_text(answer):
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert answer.text.rstrip().endswith("data: [DONE]")
    parts = [
        choice.get("text") or choice.get("delta", {}).get("content") or ""
        for event in events
        for choice in event["choices"]
    ]
    return "".join(parts)
