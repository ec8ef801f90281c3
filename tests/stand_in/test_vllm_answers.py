"""The stand-in answers as `vllm serve` did when its answers were recorded: `vllm_answers.json`, by tests/real_engines."""

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
