"""The paths of a stand-in and of vLLM's server: the same are there, and the same calls get the same status."""

import httpx
import pytest

from serving.stand_in.vllm.paths.unmodelled import NOT_MODELLED, PROFILING, SCALE_OUT

pytestmark = pytest.mark.timeout(900)

LORA_IDS = {"lora_name": "a", "lora_path": "org/nobody"}
"""What a stand-in takes at its word, and vLLM cannot download."""

CALLS = [
    *[("GET", path, None) for path in ("/health", "/ping", "/load", "/version", "/v1/models", "/tokenizer_info")],
    *[("GET", path, None) for path in ("/kv_event_sources", "/server_info", "/get_world_size", "/weight_info")],
    *[("GET", path, None) for path in ("/", "/nothing", "/v1/models/", "/v1/models/tiny", "/health/", "/nothing/")],
    *[("GET", path, None) for path in ("/docs", "/redoc", "/openapi.json", "/docs/oauth2-redirect", "/is_paused")],
    *[("HEAD", path, None) for path in ("/health", "/ping", "/v1/models", "/docs")],
    *[("OPTIONS", path, None) for path in ("/health", "/v1/completions")],
    *[("POST", path, None) for path in ("/ping", "/health", "/v1/models", "/reset_mm_cache", "/reset_encoder_cache")],
    ("GET", "/v1/completions", None),
    ("GET", "/reset_prefix_cache", None),
    ("GET", "/server_info?config_format=json", None),
    ("GET", "/server_info?config_format=yaml", None),
    ("POST", "/reset_prefix_cache?reset_external=true", None),
    ("POST", "/reset_prefix_cache?reset_running_requests=maybe", None),
    ("POST", "/is_scaling_elastic_ep", None),
    *[
        ("POST", "/scale_elastic_ep", {"new_data_parallel_size": number, "drain_timeout": 1})
        for number in (None, 0, "one", 1, 2)
    ],
    ("POST", "/tokenize", {"prompt": "hello", "return_token_strs": True}),
    ("POST", "/tokenize", {"messages": [{"role": "user", "content": "hi"}]}),
    ("POST", "/detokenize", {"model": "tiny", "tokens": [1, 2, 3]}),
    ("POST", "/v1/tokenize", {"prompt": "hello"}),
    ("POST", "/invocations", {"model": "nobody", "prompt": "hello", "max_tokens": 1}),
    ("POST", "/invocations", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
    ("POST", "/v1/messages/count_tokens", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}),
    *[("POST", path, {"prompt": "x"}) for path in SCALE_OUT],
    *[("POST", path, {}) for path in ("/v1/embeddings", "/pooling", "/score", "/v1/score", "/rerank", "/v2/rerank")],
    *[("POST", path, {}) for path in ("/classify", "/v1/audio/transcriptions", "/start_profile", "/cohere/v2/chat")],
    ("GET", "/v1/responses/resp_1", None),
    ("DELETE", "/v1/responses/resp_1", None),
    ("POST", "/v1/responses/resp_1/cancel", None),
    *[("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": "/no/such"}) for name in ("", "a", "tiny")],
    ("POST", "/v1/load_lora_adapter", {"lora_name": "a"}),
    *[("POST", "/v1/unload_lora_adapter", {"lora_name": name}) for name in ("", "nobody")],
    ("POST", "/adapters", {"name": "a", "src": "/no/such"}),
    ("DELETE", "/adapters/a", None),
    ("POST", "/collective_rpc", {}),
    ("POST", "/collective_rpc", []),
    ("POST", "/abort_requests", {}),
    ("POST", "/abort_requests", []),
    ("POST", "/abort_requests", {"request_ids": ["nobody"]}),
    ("POST", "/release_kv_cache_memory", None),
    ("POST", "/pause", None),
    ("GET", "/is_paused", None),
    ("GET", "/is_sleeping", None),
    ("POST", "/resume", None),
    ("POST", "/pause?mode=keep", None),
    ("POST", "/resume", None),
    ("POST", "/pause?mode=stop", None),
    ("POST", "/sleep", None),
    ("GET", "/is_sleeping", None),
    ("POST", "/wake_up?tags=weights", None),
    ("POST", "/wake_up?tags=weights&tags=kv_cache", None),
    ("GET", "/is_sleeping", None),
    ("POST", "/wake_up", None),
    ("POST", "/sleep?level=0", None),
    ("POST", "/wake_up?tags=scheduling", None),
    ("GET", "/is_sleeping", None),
    ("POST", "/sleep?level=3", None),
    ("POST", "/update_weight_version", {"new_version": "v2"}),
    ("POST", "/update_weight_version", {}),
    ("POST", "/weight_checker", {"action": "reset"}),
    ("POST", "/weight_checker", {"action": "guess"}),
    ("POST", "/init_weight_transfer_engine", {"init_info": {}}),
    ("POST", "/start_weight_update", None),
]
SAME_BODY = ("/is_", "/pause", "/resume", "/sleep", "/wake_up", "/abort_requests", "/load", "/version", "/weight_info")
"""Starts of paths whose answers have the same body, too, if they are no refusals."""


def described(client):
    """Return the paths of the schema with their methods."""
    paths = client.get("/openapi.json").json()["paths"]
    return {path: set(methods) for path, methods in paths.items()}


def test_the_same_paths_are_described_with_the_same_methods(real_vllm, stand_in):
    assert described(stand_in) == described(real_vllm)


def test_the_same_calls_get_the_same_status_and_headers(real_vllm, stand_in):
    differ = []
    for method, path, body in CALLS:
        answers = [client.request(method, path, json=body) for client in (real_vllm, stand_in)]
        seen = [(each.status_code, each.headers.get("allow"), each.headers.get("content-type")) for each in answers]
        if path.startswith(SAME_BODY) and answers[0].is_success:
            seen = [(*facts, each.json()) for facts, each in zip(seen, answers, strict=True)]
        if seen[0] != seen[1]:
            differ.append((method, path, body, *seen))
        assert all("x-request-id" in each.headers for each in answers[1:])
    assert differ == []


def test_errors_have_the_same_type_and_field(real_vllm, stand_in):
    calls = [call for call in CALLS if call[0] == "POST"]
    for method, path, body in calls:
        theirs, ours = (client.request(method, path, json=body) for client in (real_vllm, stand_in))
        if theirs.is_error and "error" in theirs.json():
            error, own = theirs.json()["error"], ours.json()["error"]
            assert [own[name] for name in ("type", "code", "param")] == [
                error[name] for name in ("type", "code", "param")
            ], (path, body, error, own)


def test_models_have_the_same_fields(real_vllm, stand_in):
    theirs, ours = (client.get("/v1/models").json()["data"][0] for client in (real_vllm, stand_in))
    assert list(ours) == list(theirs)
    assert {**ours["permission"][0], "id": "", "created": 0} == {**theirs["permission"][0], "id": "", "created": 0}


def test_what_is_not_modelled_is_there_in_vllm(real_vllm, stand_in):
    there = described(real_vllm)
    for path in NOT_MODELLED:
        answer = stand_in.post(path, json={})
        if path in PROFILING:  # there only with a flag
            assert answer.status_code == 404 and path not in there
        else:
            assert answer.status_code == 501 and path in there


def test_an_id_of_the_hub_is_taken_at_its_word(real_vllm, stand_in):
    assert real_vllm.post("/v1/load_lora_adapter", json=LORA_IDS).status_code == 404
    assert stand_in.post("/v1/load_lora_adapter", json=LORA_IDS).status_code == 200


def test_requests_end_or_wait_alike_when_the_engine_is_paused(real_vllm, stand_in):
    def outcome(client):
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 900, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = (line for line in stream.iter_lines() if line)
            next(lines)
            client.post("/sleep")
            *_, last, end = lines
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=body | {"max_tokens": 1, "stream": False}, timeout=1.0)
        client.post("/wake_up")
        answer = client.post("/v1/completions", json=body | {"max_tokens": 1, "stream": False})
        return '"finish_reason":"abort"' in last, end, answer.status_code

    assert outcome(real_vllm) == outcome(stand_in) == (True, "data: [DONE]", 200)
