"""The command lines that a plan ends with are ones that `vllm serve` takes."""

import pytest

from dynabench.deployment.description import Pool
from dynabench.deployment.launch import vllm_command
from mocker import EngineConfig
from mocker.timing.config import TimingConfig

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]  # vLLM's imports warn

ALL = EngineConfig(
    num_gpu_blocks=5000, max_num_active_seqs=64, max_num_batched_tokens=512, max_model_len=8192, enable_prefix_caching=False,
    enable_chunked_prefill=False, scheduling_policy="priority", async_scheduling=False, watermark=0.01,
    scheduler_reserve_full_isl=False, long_prefill_token_threshold=256, long_prefill_token_threshold_adaptive=True,
    kv_load_failure_policy="recompute", dp_size=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def parser():
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


@pytest.mark.parametrize("role", ["aggregated", "prefill", "decode"])
@pytest.mark.parametrize("engine", [EngineConfig(max_num_batched_tokens=512), ALL], ids=["chosen", "all"])
@pytest.mark.parametrize("weights", [None, "bfloat16", "fp8", "fp4", "int4"])
def test_vllm_takes_the_command_line_of_a_plan(parser, role, engine, weights):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args

    timing = TimingConfig(
        model="meta-llama/Llama-3.1-70B", gpu="b200", tensor_parallel_size=4, quantization=weights, kv_cache_dtype="fp8",
        max_cudagraph_capture_size=1024, moe_backend="marlin",
    )  # fmt: skip
    program, command, *words = vllm_command(Pool(role=role, mocker=engine, timing=timing))
    assert (program, command) == ("vllm", "serve")
    parsed = parser.parse_args(words)
    validate_parsed_serve_args(parsed)
    taken = AsyncEngineArgs.from_cli_args(parsed)
    assert parsed.model_tag == "meta-llama/Llama-3.1-70B"
    assert taken.tensor_parallel_size == 4
    assert taken.data_parallel_size == engine.dp_size
    assert taken.num_gpu_blocks_override == engine.num_gpu_blocks
    assert taken.max_model_len == (engine.max_model_len or -1)
    assert (taken.moe_backend, taken.max_cudagraph_capture_size) == ("marlin", 1024)
    assert taken.quantization == ("fp8" if weights == "fp8" else None)
    for name in (
        "max_num_batched_tokens", "max_num_seqs", "block_size", "max_num_active_seqs", "scheduling_policy", "watermark",
        "long_prefill_token_threshold",
    ):  # fmt: skip
        assert getattr(taken, name) == getattr(engine, name), name
    for name in ("enable_prefix_caching", "enable_chunked_prefill", "scheduler_reserve_full_isl", "async_scheduling"):
        assert getattr(taken, name) in (getattr(engine, name), None), name
    if role == "aggregated":
        assert taken.kv_transfer_config is None
    else:
        assert taken.kv_transfer_config.is_kv_transfer_instance
        assert taken.kv_transfer_config.is_kv_producer == (role == "prefill")
        assert taken.kv_transfer_config.kv_load_failure_policy == engine.kv_load_failure_policy


@pytest.mark.parametrize("role", ["aggregated", "prefill"])
def test_vllm_takes_host_memory_and_a_disk_from_the_command_line_of_a_plan(parser, role):
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.engine.arg_utils import AsyncEngineArgs

    host = EngineConfig(kv_offloading_size=8, kv_disk_size=100, blocks_per_chunk=4, eviction_policy="arc")
    words = vllm_command(
        Pool(role=role, mocker=host, timing=TimingConfig(model="meta-llama/Llama-3.1-8B", gpu="h100"))
    )[2:]
    taken = AsyncEngineArgs.from_cli_args(parser.parse_args(words))
    config = taken.kv_transfer_config
    expected = {
        "blocks_per_chunk": 4,
        "eviction_policy": "arc",
        "spec_name": "TieringOffloadingSpec",
        "secondary_tiers": [{"type": "fs", "root_dir": "KV_FOLDER"}],
    }
    if role == "aggregated":
        assert taken.kv_offloading_size == 8
        assert config.kv_connector_extra_config == expected
        return
    assert taken.kv_offloading_size is None
    inner = [KVTransferConfig(**each) for each in config.kv_connector_extra_config["connectors"]]
    assert [KVConnectorFactory.get_connector_class(each).__name__ for each in (config, inner[1])] == [
        "MultiConnector",
        "OffloadingConnector",
    ]
    assert inner[1].kv_connector_extra_config == expected | {"cpu_bytes_to_use": 8 << 30}


@pytest.mark.parametrize("method", ["ngram", "eagle3", "mtp"])
def test_vllm_takes_the_speculation_of_a_plan(parser, method):
    from vllm.engine.arg_utils import AsyncEngineArgs

    engine = EngineConfig(num_speculative_tokens=3, speculative_method=method, acceptance_length=2.4)
    timing = TimingConfig(model="meta-llama/Llama-3.1-70B", gpu="b200", tensor_parallel_size=4)
    taken = AsyncEngineArgs.from_cli_args(parser.parse_args(vllm_command(Pool(mocker=engine, timing=timing))[2:]))
    assert (taken.speculative_config["method"], taken.speculative_config["num_speculative_tokens"]) == (method, 3)


def test_vllm_takes_cuda_graphs_of_decodes_alone_from_the_command_line_of_a_plan(parser):
    from vllm.engine.arg_utils import AsyncEngineArgs

    timing = TimingConfig(model="meta-llama/Llama-3.1-70B", gpu="b200", max_cudagraph_capture_size=0)
    taken = AsyncEngineArgs.from_cli_args(parser.parse_args(vllm_command(Pool(timing=timing))[2:]))
    assert taken.compilation_config.cudagraph_mode.name == "FULL_DECODE_ONLY"
