"""The stand-in answers as `vllm serve` did when its answers were recorded: `vllm_answers.json`, by tests/real_engines."""

import json

import pytest

from serving.engines.mock.engine import EngineConfig, TimingConfig
from serving.stand_in.config import ApiConfig, HttpConfig, StandInConfig
from tests.stand_in import recorded
from tests.stand_in.outlines import ask
from tests.stand_in.vllm_cases import CASES, CONTEXT, DIFFERENT, DIFFERENT_IF_FULL, SERVERS, TEMPLATE
from tests.support.stand_ins import served_in_thread

RECORDED = recorded.load()
FULL = ApiConfig(
    enable_prompt_tokens_details=True,
    enable_auto_tool_choice=True,
    tool_call_parser="hermes",
    reasoning_parser="qwen3",
    enable_per_request_metrics=True,
    enable_force_include_usage=True,
    trust_request_chat_template=True,
    chat_template=TEMPLATE,
)
SETTINGS = {
    "plain": {"served_model_names": ("tiny", "other")},
    "full": {
        "served_model_names": ("tiny",),
        "api": FULL,
        "http": HttpConfig(enable_request_id_headers=True),
    },
}


@pytest.fixture(scope="module", params=SERVERS)
def server(request, tiny_folder):
    policy = "priority" if request.param == "full" else "fcfs"
    engine = EngineConfig(
        block_size=32, num_gpu_blocks=200, max_num_seqs=16, max_model_len=CONTEXT, scheduling_policy=policy
    )
    timing = TimingConfig(speedup_ratio=50.0)
    own = SETTINGS[request.param]
    config = StandInConfig(model=str(tiny_folder), model_path=str(tiny_folder), engine=engine, timing=timing, **own)
    with served_in_thread(config) as client:
        yield request.param, client


@pytest.mark.parametrize("name", CASES)
def test_a_request_is_answered_as_vllm_answers_it_unless_a_difference_is_known(server, name):
    flags, client = server
    is_different = name in DIFFERENT or (flags == "full" and name in DIFFERENT_IF_FULL)
    assert (ask(client, CASES[name]) == RECORDED[flags][name]) is not is_different


STEPS = {"max_tokens": 6, "ignore_eos": True, "stream": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def drafting(tiny_folder):
    drafts = {"num_speculative_tokens": 3, "acceptance_rates": "1,1,1", "drafting_ms": 1}
    engine = EngineConfig(block_size=32, num_gpu_blocks=200, max_model_len=CONTEXT, **drafts)
    config = StandInConfig(
        model="tiny", model_path=str(tiny_folder), engine=engine, timing=TimingConfig(speedup_ratio=50.0)
    )
    with served_in_thread(config) as client:
        yield client


def choices(client, path, **body):
    with client.stream("POST", path, json=STEPS | body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    return [choice for line in lines for choice in json.loads(line)["choices"] if choice.get("token_ids")]


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}])
def test_the_tokens_of_a_step_that_verifies_drafts_share_an_event(drafting, more):
    found = choices(drafting, "/v1/completions", model="tiny", prompt="once", **more)
    assert [len(choice["token_ids"]) for choice in found] == [1, 4, 1]
    assert [choice["finish_reason"] for choice in found] == [None, None, "length"]
    if more:
        assert [len(choice["logprobs"]["tokens"]) for choice in found] == [1, 4, 1]


def test_a_step_that_a_stop_string_cuts_ends_the_answer_with_what_is_before_it(drafting):
    whole = choices(drafting, "/v1/completions", model="tiny", prompt="once")
    text = whole[1]["text"]
    found = choices(drafting, "/v1/completions", model="tiny", prompt="once", stop=[text[2:4]])
    cut = (whole[0]["text"] + text).index(text[2:4])
    assert "".join(choice["text"] for choice in found) == (whole[0]["text"] + text)[:cut]
    assert len(found) == 2
    assert (found[-1]["finish_reason"], found[-1]["stop_reason"]) == ("stop", text[2:4])
    assert len(found[-1]["token_ids"]) <= 4
