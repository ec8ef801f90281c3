"""Paths of the stand-in besides those for answers: `tests/real_engines/test_vllm_paths.py` compares them with vLLM's."""

import asyncio

import pytest

from serving.engines.mock.engine import EngineConfig
from serving.stand_in.config import ApiConfig, HttpConfig, KvEventsConfig, LoraConfig, RanksConfig
from tests.stand_in.support import running


def asked(*calls, **settings):
    """Return the answers to calls: (method, path) or (method, path, more)."""

    async def ask():
        async with running(**settings) as client:
            return [await client.request(method, path, **dict(*more)) for method, path, *more in calls]

    return asyncio.run(ask())


def test_probes_get_an_empty_answer():
    for answer in asked(("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        assert (answer.status_code, answer.content) == (200, b"")


def test_unknown_paths_and_methods_are_answered_as_by_fastapi():
    unknown, method, head, options = asked(
        ("GET", "/nothing"), ("POST", "/health"), ("HEAD", "/health"), ("OPTIONS", "/v1/models")
    )
    assert (unknown.status_code, unknown.json()) == (404, {"detail": "Not Found"})
    assert (method.status_code, method.json(), method.headers["allow"]) == (
        405,
        {"detail": "Method Not Allowed"},
        "GET",
    )
    assert (head.status_code, options.status_code) == (405, 405)


def test_a_slash_too_many_is_redirected_if_the_path_is_known():
    known, unknown = asked(("GET", "/v1/models/?a=b"), ("GET", "/nothing/"))
    assert known.status_code == 307
    assert known.headers["location"].endswith("/v1/models?a=b")
    assert unknown.status_code == 404


def test_what_is_for_development_is_there_only_in_development():
    calls = [("POST", "/sleep"), ("GET", "/server_info"), ("POST", "/reset_prefix_cache"), ("GET", "/is_paused")]
    assert {answer.status_code for answer in asked(*calls)} == {404}
    assert {answer.status_code for answer in asked(*calls, is_dev_mode=True)} == {200}


def test_flags_add_and_remove_paths():
    calls = [("GET", "/tokenizer_info"), ("POST", "/start_profile"), ("GET", "/docs"), ("GET", "/openapi.json")]
    assert [answer.status_code for answer in asked(*calls)] == [404, 404, 200, 200]
    answers = asked(
        *calls,
        api=ApiConfig(enable_tokenizer_info_endpoint=True),
        http=HttpConfig(has_docs=False),
        given={"profiler_config": {"profiler": "torch"}},
    )
    assert [answer.status_code for answer in answers] == [200, 501, 404, 404]


def test_paths_that_are_not_modelled_say_why():
    (answer,) = asked(("POST", "/generative_scoring", {"json": {}}))
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (501, "NotImplementedError", 501)
    assert "there is no model" in error["message"]


def test_paths_of_tokens_in_and_out_are_refused_as_without_their_flag():
    (answer,) = asked(("POST", "/inference/v1/generate", {"json": {}}))
    assert (answer.status_code, answer.json()["error"]["type"]) == (403, "PermissionDeniedError")


def test_models_are_listed_under_each_name_with_vllms_fields():
    (answer,) = asked(("GET", "/v1/models"), model="org/tiny", served_model_names=("a", "b"))
    found = answer.json()
    assert found["object"] == "list"
    assert [(card["id"], card["root"], card["parent"]) for card in found["data"]] == [
        ("a", "org/tiny", None),
        ("b", "org/tiny", None),
    ]
    (permission,) = found["data"][0]["permission"]
    assert permission["id"].startswith("modelperm-") and permission["allow_sampling"] is True


def test_the_schema_lists_the_paths_that_are_there_but_not_the_hidden_ones():
    (answer,) = asked(("GET", "/openapi.json"))
    paths = answer.json()["paths"]
    assert set(paths["/v1/completions"]) == {"post"} and set(paths["/ping"]) == {"get", "post"}
    assert not {"/inference/v1/generate", "/docs", "/sleep"} & set(paths)


@pytest.mark.parametrize(("tracks", "load"), [(True, 2), (False, 0)])
def test_the_load_is_the_number_of_answers_in_progress_if_they_are_counted(tracks, load):
    async def ask():
        async with running(api=ApiConfig(enable_server_load_tracking=tracks), is_dev_mode=True) as client:
            body = {"model": "tiny", "prompt": "a", "max_tokens": 3000}
            await client.post("/pause", params={"mode": "keep"})
            answers = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(2)]
            while tracks and (await client.get("/load")).json() != {"server_load": 2}:
                await asyncio.sleep(0.01)
            found = (await client.get("/load")).json()
            for answer in answers:
                answer.cancel()
            await asyncio.gather(*answers, return_exceptions=True)
            return found

    assert asyncio.run(ask()) == {"server_load": load}


def test_kv_event_sources_are_the_endpoints_of_each_rank():
    events, engine = KvEventsConfig(endpoint="inproc://events"), EngineConfig(dp_size=2, num_gpu_blocks=64)
    (answer,) = asked(("GET", "/kv_event_sources"), kv_events=events, engine=engine, ranks=RanksConfig(size=2))
    endpoints = {rank: source["endpoint"] for rank, source in answer.json().items()}
    assert endpoints == {"0": "inproc://events", "1": "inproc://events_dp1"}
    assert asked(("GET", "/kv_event_sources"))[0].json() == {}


def test_tokens_and_texts_are_turned_into_each_other():
    tokens, text, other_type = asked(
        ("POST", "/tokenize", {"json": {"prompt": "ab", "return_token_strs": True}}),
        ("POST", "/detokenize", {"json": {"model": "tiny", "tokens": [97, 98]}}),
        ("POST", "/tokenize", {"content": "{}", "headers": {"content-type": "text/plain"}}),
    )
    assert tokens.json()["token_strs"] == ["a", "b"] and tokens.json()["count"] == 2
    assert text.json() == {"prompt": "ab"}
    assert other_type.status_code == 400
    assert other_type.json()["error"] == {
        "message": "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed",
        "type": "Bad Request",
        "param": None,
        "code": 400,
    }


def test_an_invocation_is_a_chat_if_there_are_messages_and_its_model_does_not_count():
    chat, completion, adapter, broken = asked(
        ("POST", "/invocations", {"json": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}}),
        ("POST", "/invocations", {"json": {"model": "other", "prompt": "a", "max_tokens": 1}}),
        (
            "POST",
            "/invocations",
            {
                "json": {"prompt": "a", "max_tokens": 1},
                "headers": {"X-Amzn-SageMaker-Adapter-Identifier": "nobody"},
            },
        ),
        ("POST", "/invocations", {"content": "{", "headers": {"content-type": "application/json"}}),
    )
    assert chat.json()["object"] == "chat.completion"
    assert completion.json()["object"] == "text_completion"
    assert (adapter.status_code, broken.status_code) == (404, 400)


def test_an_invocation_may_be_as_large_as_a_chat():
    large = [{"role": "user", "content": "a", "name": "b" * (1 << 20)}]
    (answer,) = asked(("POST", "/invocations", {"json": {"messages": large, "max_tokens": 1}}))
    assert answer.status_code == 200, answer.text


def test_the_number_of_ranks_does_not_change():
    same, more, none, is_scaling = asked(
        ("POST", "/scale_elastic_ep", {"json": {"new_data_parallel_size": 1}}),
        ("POST", "/scale_elastic_ep", {"json": {"new_data_parallel_size": 2}}),
        ("POST", "/scale_elastic_ep", {"json": {}}),
        ("POST", "/is_scaling_elastic_ep"),
    )
    assert [same.status_code, more.status_code, none.status_code] == [200, 500, 400]
    assert "for as long as it runs" in more.json()["error"]["message"]
    assert is_scaling.json() == {"is_scaling_elastic_ep": False}


def test_facts_for_development():
    info, bad, size, rpc, version, weights = asked(
        ("GET", "/server_info", {"params": {"config_format": "json"}}),
        ("GET", "/server_info", {"params": {"config_format": "yaml"}}),
        ("GET", "/get_world_size"),
        ("POST", "/collective_rpc", {"json": {"method": "reload"}}),
        ("POST", "/update_weight_version", {"json": {"new_version": "v2"}}),
        ("GET", "/weight_info"),
        is_dev_mode=True,
        given={"tensor_parallel_size": 4},
        ranks=RanksConfig(size=2),
    )
    settings = info.json()["vllm_config"]
    assert settings["cache_config"]["block_size"] == 16 and settings["cache_config"]["num_gpu_blocks"] == 256
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "query.config_format")
    assert size.json() == {"world_size": 8}
    assert rpc.status_code == 501 and "'reload'" in rpc.json()["error"]["message"]
    assert version.json()["success"] is True and weights.json() == {"weight_version": "v2"}


def test_keys_are_needed_where_vllm_needs_them():
    http = HttpConfig(api_keys=("one", "two"))
    paths = ("/v1/models", "/v2/rerank", "/inference/v1/generate", "/cohere/x", "/health", "/tokenize", "/metrics")
    answers = asked(*(("GET", path) for path in paths), http=http)
    assert [answer.status_code == 401 for answer in answers] == [True] * 4 + [False] * 3
    assert answers[0].json() == {"error": "Unauthorized"}
    bearer = {"headers": {"authorization": "bearer two"}}
    basic = {"headers": {"authorization": "Basic two"}}
    known, other, options = asked(
        ("GET", "/v1/models", bearer), ("GET", "/v1/models", basic), ("OPTIONS", "/v1/models"), http=http
    )
    assert (known.status_code, other.status_code, options.status_code) == (200, 401, 405)


def test_under_a_root_path_the_same_paths_are_there_and_keys_are_still_needed():
    http = HttpConfig(root_path="/proxy/", api_keys=("one",))
    below, beside, without, docs = asked(
        ("GET", "/proxy/health"),
        ("GET", "/health"),
        ("GET", "/proxy/v1/models"),
        ("GET", "/proxy/docs"),
        http=http,
    )
    assert (below.status_code, beside.status_code, without.status_code) == (200, 200, 401)
    assert "/proxy/openapi.json" in docs.text


def test_answers_have_a_request_id_only_if_they_should_and_it_is_the_clients():
    given = {"headers": {"x-request-id": "mine"}}
    (without,) = asked(("GET", "/version", given))
    assert "x-request-id" not in without.headers
    own, drawn, refused = asked(
        ("GET", "/version", given),
        ("GET", "/version"),
        ("GET", "/v1/models"),
        http=HttpConfig(enable_request_id_headers=True, api_keys=("one",)),
    )
    assert own.headers["x-request-id"] == "mine"
    assert len(drawn.headers["x-request-id"]) == 32 and len(refused.headers["x-request-id"]) == 32


def test_pages_of_allowed_origins_may_call_and_others_may_not():
    preflight = {"headers": {"origin": "http://a.b", "access-control-request-method": "POST"}}
    (refused,) = asked(("OPTIONS", "/v1/completions", preflight))
    assert refused.status_code == 400
    allowed, seen = asked(
        ("OPTIONS", "/v1/completions", preflight),
        ("GET", "/version", {"headers": {"origin": "http://a.b"}}),
        http=HttpConfig(allowed_origins=("http://a.b",), allow_credentials=True),
    )
    assert allowed.status_code == 200
    assert seen.headers["access-control-allow-origin"] == "http://a.b"
    assert seen.headers["access-control-allow-credentials"] == "true"


def test_adapters_can_be_changed_over_http_only_if_that_is_allowed():
    call = ("POST", "/v1/load_lora_adapter", {"json": {"lora_name": "a", "lora_path": "org/a"}})
    assert asked(call)[0].status_code == 404
    assert asked(call, lora=LoraConfig())[0].status_code == 404
    assert asked(call, lora=LoraConfig(may_change=True))[0].status_code == 200
