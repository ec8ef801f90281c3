"""One server of vLLM, and a stand-in with the same settings, for all tests that only compare the two."""

import contextlib

import httpx
import pytest

from serving.engines.mock.engine import EngineConfig, TimingConfig
from serving.stand_in.config import ApiConfig, HttpConfig, LoraConfig, StandInConfig
from tests.real_engines.serving_vllm import ONE_USE, installed_version, until_ready, vllm_serve
from tests.support.stand_ins import served_in_thread

NUM_BLOCKS, BLOCK, LONGEST, BUDGET = 40, 32, 1024, 512
FLAGS = (
    f"--num-gpu-blocks-override={NUM_BLOCKS}",
    f"--max-model-len={LONGEST}",
    f"--max-num-batched-tokens={BUDGET}",
    "--enable-lora",
    "--enable-tokenizer-info-endpoint",
    "--enable-request-id-headers",
)
ENGINE = EngineConfig(
    engine_version=installed_version(),
    num_gpu_blocks=NUM_BLOCKS,
    block_size=BLOCK,
    max_model_len=LONGEST,
    max_num_batched_tokens=BUDGET,
    max_num_seqs=16,
    async_scheduling=False,  # vLLM's CPU build does without
)


@contextlib.contextmanager
def vllm(folder, log):
    """Run vLLM's server; give a client of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        with vllm_serve(folder, log, *FLAGS) as (url, process):
            until_ready(url, process, log)
            with httpx.Client(base_url=url, timeout=240, limits=ONE_USE) as client:
                yield client


def stand_in(folder):
    """Run the stand-in in a thread; give a client of it."""
    config = StandInConfig(
        model="tiny",
        model_path=str(folder),
        engine=ENGINE,
        timing=TimingConfig(timing="constant", speedup_ratio=20.0),
        http=HttpConfig(enable_request_id_headers=True),
        api=ApiConfig(enable_tokenizer_info_endpoint=True),
        lora=LoraConfig(may_change=True),
        is_dev_mode=True,
    )
    return served_in_thread(config)
