"""What engines of the user's own get: requests with every name that Dynamo's have; and what they may return."""

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path

import httpx
import msgspec
import pytest
import uvloop

from serving.model.card import ModelType
from serving.runtime.address import EndpointAddress
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.messages import CallError, pack_u32
from serving.worker.own_engines import full_request, without_none
from serving.worker.protocol import PreprocessedRequest, StopConditions
from serving.worker.registration import register_llm
from tests.support import warm
from tests.support.commands import dynamo_run
from tests.support.model import write_model
from tests.support.servers import free_port
from tests.support.waiting import PATIENCE_S, in_time, wait_for

STANDINS = Path(__file__).parent / "standins"
WORKER = Path(__file__).parents[1] / "support" / "sglang_worker.py"
SAMPLING = {
    "n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
    "use_beam_search", "length_penalty", "seed", "include_stop_str_in_output", "guided_decoding",
}  # fmt: skip
DYNAMOS = {
    "model", "token_ids", "stop_conditions", "sampling_options", "output_options", "eos_token_ids", "mdc_sum", "annotations",
    "estimated_prefix_hit_num_blocks", "backend_instance_id", "router_config_override",
}  # fmt: skip


def full(conditions=None, **more):
    """Return a request in full that has travelled."""
    given = StopConditions(**(conditions or {}))
    sent = PreprocessedRequest(token_ids=pack_u32([5, 6]), stop_conditions=given, **more)
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), ext_hook=lambda code, data: [5, 6])
    return full_request(travelled, model="tiny", mdc_sum="f1cd")


def test_a_request_without_any_option_has_every_name():
    request = full(eos_token_ids=[2])
    assert request.keys() >= DYNAMOS
    assert request["token_ids"] == [5, 6]
    assert (request["model"], request["mdc_sum"], request["annotations"]) == ("tiny", "f1cd", [])
    assert request["sampling_options"] == dict.fromkeys(SAMPLING)
    output = ("logprobs", "prompt_logprobs", "skip_special_tokens", "formatted_prompt", "return_tokens_as_token_ids")
    assert request["output_options"] == dict.fromkeys(output)
    conditions = request["stop_conditions"]
    absent = ("max_tokens", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "max_thinking_tokens")
    assert {name: conditions[name] for name in absent} == dict.fromkeys(absent)
    assert conditions["stop_token_ids_hidden"] == request["eos_token_ids"] == [2]


def test_what_the_client_gave_is_there_under_dynamos_names():
    guided = {"regex": "a+"}
    options = {
        "temperature": 0.5,
        "logprobs": 2,
        "prompt_logprobs": 1,
        "guided_decoding": guided,
        "logit_bias": {"1": 2},
    }
    request = full({"max_tokens": 9, "min_tokens": 3, "stop": ["x"], "stop_token_ids": [7]}, sampling_options=options)
    assert request["sampling_options"] == dict.fromkeys(SAMPLING) | options
    assert request["output_options"]["logprobs"] == 2
    assert request["output_options"]["prompt_logprobs"] == 1
    expected = {"max_tokens": 9, "min_tokens": 3, "stop": ["x"], "stop_token_ids": [7]}
    assert {name: request["stop_conditions"][name] for name in expected} == expected


def test_a_request_that_ignores_eos_names_no_token_that_would_end_it():
    request = full({"ignore_eos": True}, eos_token_ids=[2])
    assert request["stop_conditions"]["ignore_eos"] is True
    assert request["stop_conditions"]["stop_token_ids_hidden"] is None
    assert request["eos_token_ids"] == []


def test_what_only_our_requests_have_stays():
    request = full(request_id="r", num_generated=1, dp_rank=3)
    assert (request["request_id"], request["num_generated"], request["dp_rank"]) == ("r", 1, 3)
    assert request["stop_conditions"]["is_default_limit"] is False


@pytest.mark.parametrize("wrong", [None, 7, [1, 2], {}, {"prompt": "x"}])
def test_what_has_no_tokens_is_no_request(wrong):
    with pytest.raises(msgspec.ValidationError, match="expected a dict with token_ids"):
        full_request(wrong, model="tiny", mdc_sum="")


def test_a_name_without_a_value_is_left_out_of_an_item():
    assert without_none({"token_ids": [], "text": None, "finish_reason": "stop"}) == {
        "token_ids": [],
        "finish_reason": "stop",
    }
    assert without_none([7]) == [7]


async def generate(request):
    """Answer with the request itself."""
    yield {"request": request, "text": None}


async def asked(folder, model_type, request):
    """Return what a handler got that was registered after it began to serve, as some examples do."""
    address = EndpointAddress.parse("dyn://a.b.c")
    async with in_time(), await DistributedRuntime.connect(RuntimeConfig(discovery_dir=str(folder))) as runtime:
        serving = asyncio.create_task(runtime.endpoint(address).serve_endpoint(generate))
        await register_llm(model_type, runtime.endpoint(address), "", "mine")
        client = await runtime.endpoint(address).client()
        await client.wait_for_instances()
        [item] = [item async for item in client.random(request)]
        runtime.stopping.set()
        await serving
        return item


def test_an_engine_for_whole_requests_gets_them_as_they_are(tmp_path):
    item = uvloop.run(asked(tmp_path, ModelType.Chat, {"messages": [], "seed": None}))
    assert item == {"request": {"messages": [], "seed": None}, "text": None}


def test_a_bare_call_to_an_engine_for_tokens_is_completed(tmp_path):
    item = uvloop.run(asked(tmp_path, ModelType.Backend, {"token_ids": [1]}))
    assert item["request"]["sampling_options"] == dict.fromkeys(SAMPLING)
    assert item["request"]["token_ids"] == [1]
    assert "text" not in item


def test_a_call_without_tokens_is_refused_as_invalid(tmp_path):
    with pytest.raises(CallError, match=r"not a request for a\.b\.c: expected a dict with token_ids") as refused:
        uvloop.run(asked(tmp_path, ModelType.Backend, {"prompt": "x"}))
    assert refused.value.kind == "invalid"


@contextlib.contextmanager
def running(folder, *commands):
    environment = os.environ | {"DYN_DISCOVERY_DIR": str(folder / "d"), "REQUESTS": str(folder / "requests")}
    environment["PYTHONPATH"] = os.pathsep.join([str(STANDINS), str(Path(__file__).parents[2])])
    processes = [warm.start([sys.executable, *map(str, command)], env=environment) for command in commands]
    try:
        yield processes[0]
    finally:
        for process in processes:
            process.terminate()
        assert [process.wait(PATIENCE_S) for process in processes] == [0] * len(commands)


def test_a_worker_written_for_dynamo_with_sglang_answers(tmp_path):
    model, port = write_model(tmp_path / "tiny"), free_port()
    worker = [WORKER, "--endpoint", "dyn://here.backend.generate", "--model", model]
    url = f"http://127.0.0.1:{port}"
    with running(tmp_path, worker, ["-m", "serving.frontend", "--http-port", port]) as process:
        wait_for(url, 1, process)
        bare = {"model": "tiny", "prompt": [10, 20, 30], "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=bare).json()
        assert answer["usage"]["completion_tokens"] == 4
        text = httpx.post(f"{url}/detokenize", json={"model": "tiny", "tokens": [11, 21, 31, 11]}).json()["prompt"]
        assert answer["choices"][0] | {"logprobs": None} == {
            "index": 0, "text": text, "logprobs": None, "finish_reason": "length",
        }  # fmt: skip
        httpx.post(f"{url}/v1/completions", json=bare | {"temperature": 0.25, "seed": 9, "logprobs": 1})
        httpx.post(f"{url}/v1/completions", json=bare | {"n": 2})
    first, second, *several = map(json.loads, (tmp_path / "requests").read_text().splitlines())
    assert first.keys() >= DYNAMOS
    assert first["sampling_options"]["temperature"] is None
    assert (second["sampling_options"]["temperature"], second["output_options"]["logprobs"]) == (0.25, 1)
    assert [each["sampling_options"]["seed"] for each in several] == [None, None]
    assert first["model"] == "tiny"
    assert len(first["mdc_sum"]) == 64


def test_a_file_with_an_engine_gets_the_same_request(tmp_path):
    source = """
import json
async def generate(request):
    print(json.dumps(request))
    yield {"token_ids": request["token_ids"][:1], "text": None, "finish_reason": "stop"}
"""
    (tmp_path / "tok.py").write_text(source)
    model = write_model(tmp_path / "model")
    done = dynamo_run("out=pytok:tok.py", "--model-path", model, input="Hello", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    request = json.loads(done.stdout.splitlines()[0])
    assert request.keys() >= DYNAMOS
    assert request["sampling_options"].keys() >= SAMPLING
    assert request["model"] == "model"
    assert len(request["mdc_sum"]) == 64
