"""Arguments of vllm serve, made into the settings of a stand-in."""

import json
import shlex

import pytest

from mocker.timing.config import TimingConfig
from serving.stand_in.simulation import SimulationConfig
from serving.stand_in.vllm.flags.command_line import parse_arguments
from serving.stand_in.vllm.settings.settings import about_times, stand_in_config, without_effect

LLAMA = "meta-llama/Llama-3.1-8B"
DEEPSEEK = "deepseek-ai/DeepSeek-V3"


def made(line, environment=None, **own):
    return stand_in_config(parse_arguments(shlex.split(line)), SimulationConfig(**own), environment=environment or {})


@pytest.mark.parametrize(
    ("gpu", "seqs", "tokens"), [("h100", 1024, 8192), ("b200", 1024, 16_384), ("a100", 256, 2048), (None, 1024, 8192)]
)
def test_defaults_are_vllms_on_the_gpu(gpu, seqs, tokens):
    config = made(LLAMA, gpu=gpu)
    engine = config.engine
    assert (engine.max_num_seqs, engine.max_num_batched_tokens, engine.block_size) == (seqs, tokens, 16)
    assert (engine.max_model_len, config.timing.gpu_memory_utilization) == (131_072, 0.92)
    assert engine.enable_prefix_caching and engine.is_async and engine.enable_chunked_prefill
    assert (config.http.port, config.served_model_names) == (8000, (LLAMA,))


@pytest.mark.parametrize(
    ("flags", "seqs", "tokens"),
    [
        ("--performance-mode throughput", 2048, 16_384),
        ("--max-num-seqs 4 --max-model-len 100", 4, 400),
        ("--max-num-batched-tokens 512", 512, 512),
        ("--no-enable-chunked-prefill --max-model-len 20k", 1024, 20_000),
        ("--max-num-batched-tokens 2K --max-num-scheduled-tokens 2048", 1024, 2048),
    ],
)
def test_the_limits_of_a_step_follow_from_other_flags_as_in_vllm(flags, seqs, tokens):
    engine = made(f"{LLAMA} {flags}", gpu="h100").engine
    assert (engine.max_num_seqs, engine.max_num_batched_tokens) == (seqs, tokens)


def test_low_latency_experts_make_the_default_step_small():
    flags = f"{DEEPSEEK} -dp 8 -ep --all2all-backend deepep_low_latency"
    assert made(flags, gpu="h200").engine.max_num_batched_tokens == 256


def test_a_sequence_as_long_as_fits_is_allowed_on_request():
    flags = f"{LLAMA} --num-gpu-blocks-override 100"
    assert made(f"{flags} --max-model-len auto", gpu="h100").engine.max_model_len == 99 * 16
    with pytest.raises(ValueError, match="--max-model-len 1584"):
        made(flags, gpu="h100")


def test_memory_for_kv_is_counted_in_blocks():
    block = 16 * 131_072  # bytes: 32 layers, 8 heads of 128, keys and values, 2 bytes
    flags = f"{LLAMA} --kv-cache-memory-bytes {100 * block + 1} --max-model-len auto"
    assert made(flags, gpu="h100").engine.num_gpu_blocks == 100
    assert made(f"{flags} --kv-cache-dtype fp8", gpu="h100").engine.num_gpu_blocks == 200


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ("-dp 4", (4, 0, False, 4)),
        ("-dp 4 --data-parallel-rank 3", (4, 3, True, 1)),
        ("-dp 4 -dpl 2 -dpr 2", (4, 2, False, 2)),
        ("-dp 4 -dph -dpl 1 -dpr 3", (4, 3, True, 1)),
        ("-dp 4 -dpl 4", (4, 0, False, 4)),
    ],
)
def test_ranks_are_numbered_as_in_vllm(flags, ranks):
    config = made(f"{DEEPSEEK} {flags}")
    assert (config.ranks.size, config.ranks.first, config.ranks.is_external, config.engine.dp_size) == ranks


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("-dp 0", "expected at least 1"),
        ("-dp 4 -dpl 2", "none can join a stand-in"),
        ("-dp 4 -dph", "expected --data-parallel-size-local"),
        ("-dp 4 -dpe", "expected --data-parallel-rank"),
        ("-dp 4 --data-parallel-rank 4", "expected from 0 to 3"),
        ("-dp 4 --data-parallel-rank 1 -dpl 2", "expected 1 with"),
        ("-dp 4 -dph -dpe", "expected one of them"),
    ],
)
def test_ranks_that_contradict_each_other_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        made(f"{DEEPSEEK} {flags}")


def test_ranks_whose_steps_depend_on_each_other_are_simulated_together_or_not_at_all():
    assert made(f"{DEEPSEEK} -dp 8 -ep", gpu="h200").engine.dp_size == 8
    with pytest.raises(ValueError, match="need all of them in one stand-in"):
        made(f"{DEEPSEEK} -dp 8 -ep --data-parallel-rank 1", gpu="h200")
    with pytest.raises(ValueError, match="expected --enable-expert-parallel"):
        made(f"{DEEPSEEK} -dp 8", gpu="h200")
    with pytest.raises(ValueError, match="only if the model has experts"):
        made(f"{LLAMA} -dp 8 --data-parallel-rank 1")


def test_kv_is_handed_over_by_role():
    config = {"kv_connector": "NixlConnector", "kv_role": "kv_producer", "engine_id": "one"}
    config |= {"kv_connector_extra_config": {"kv_lease_duration": 7}, "kv_load_failure_policy": "recompute"}
    sides = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.2", "VLLM_NIXL_SIDE_CHANNEL_PORT": "7000"}
    found = made(f"{LLAMA} --kv-transfer-config '{json.dumps(config)}'", sides)
    handover = found.kv_handover
    assert (handover.role, handover.engine_id) == ("kv_producer", "one")
    assert (handover.side_channel_host, handover.side_channel_port) == ("127.0.0.2", 7000)
    assert (found.engine.kv_role, found.engine.kv_load_failure_policy) == ("kv_producer", "recompute")
    assert found.lease.kv_lease_duration_s == 7


def test_kv_that_would_go_back_to_prefill_is_refused():
    config = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    config |= {"kv_connector_extra_config": {"bidirectional_kv_xfer": True}}
    with pytest.raises(ValueError, match=r"bidirectional_kv_xfer true: .*; leave it out"):
        made(f"{LLAMA} --kv-transfer-config '{json.dumps(config)}'")


def test_kv_is_kept_in_host_memory_alone_or_beside_a_handover():
    assert made(f"{LLAMA} --kv-offloading-size 10").engine.kv_offloading_size == 10
    connectors = [
        {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
        {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 2 << 30}},
    ]
    both = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    both |= {"kv_connector_extra_config": {"connectors": connectors}}
    found = made(f"{LLAMA} --kv-transfer-config '{json.dumps(both)}'")
    assert (found.engine.kv_offloading_size, found.kv_handover.role, found.engine.kv_role) == (2, "kv_both", None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("--kv-transfer-config.kv_connector NixlConnector", "kv_role: expected one of"),
        (
            "--kv-transfer-config.kv_connector MooncakeConnector",
            "kv_connector MooncakeConnector: expected NixlConnector",
        ),
        (
            '--kv-offloading-size 1 --kv-transfer-config {"kv_connector":"NixlConnector","kv_role":"kv_both"}'.replace(
                '"', '\\"'
            ),
            "vLLM would drop NixlConnector",
        ),
    ],
)
def test_connectors_that_are_not_simulated_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        made(f"{LLAMA} {config}")


def test_kv_events_are_published_only_if_they_are_enabled():
    on = "--kv-events-config.enable_kv_cache_events true"
    assert made(f"{LLAMA} --kv-events-config.topic a").kv_events is None
    assert made(f"{LLAMA} {on} --kv-events-config.publisher null").kv_events is not None  # JSON's null: as enabled
    assert made(f"{LLAMA} {on} --kv-events-config.publisher '\"null\"'").kv_events is None
    events = made(f"{LLAMA} {on} --kv-events-config.topic kv --kv-events-config.buffer_steps 5").kv_events
    assert (events.topic, events.buffer_steps, events.endpoint) == ("kv", 5, "tcp://*:5557")
    with pytest.raises(ValueError, match="--kv-events-config: hwm must be"):
        made(f"{LLAMA} {on} --kv-events-config.hwm x")


def test_keys_come_from_the_command_line_or_else_from_the_environment():
    assert made(f"{LLAMA} --api-key a b", {"VLLM_API_KEY": "c"}).http.api_keys == ("a", "b")
    assert made(LLAMA, {"VLLM_API_KEY": "c"}).http.api_keys == ("c",)
    assert made(LLAMA).http.api_keys == ()
    assert "api_key" not in made(f"{LLAMA} --api-key a").given


def test_variables_of_vllm_count():
    config = made(
        f"{LLAMA} --enable-lora",
        {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOG_STATS_INTERVAL": "2.5", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"},
    )
    assert (config.is_dev_mode, config.logs.stats_interval_s, config.lora.may_change) == (True, 2.5, True)
    with pytest.raises(ValueError, match="VLLM_SERVER_DEV_MODE=yes: expected a whole number"):
        made(LLAMA, {"VLLM_SERVER_DEV_MODE": "yes"})


DRAFTS = f"{LLAMA} --speculative-config.method eagle3 --speculative-config.num_speculative_tokens 3"
SYNTHETIC = "--speculative-config.rejection_sample_method synthetic --speculative-config.synthetic_acceptance"


def test_speculation_takes_vllms_synthetic_acceptance():
    engine = made(f"{DRAFTS} {SYNTHETIC}_length 2.5").engine
    assert (engine.num_speculative_tokens, engine.speculative_method) == (3, "eagle3")
    assert engine.acceptance_rates == "1.0,0.5,0.0"
    assert engine.drafting_ms == 0
    given = made(f"{DRAFTS} {SYNTHETIC}_rates [0.9,0.5,0.25]", gpu="h100").engine
    assert (given.acceptance_rates, given.drafting_ms) == ("0.9,0.5,0.25", None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{LLAMA} -pp 2", "--pipeline-parallel-size 2: this server has no stages yet"),
        (f"{LLAMA} --spec-tokens 3", "--spec-tokens 3: use --speculative-config"),
        (
            f"{LLAMA} --speculative-config.method medusa",
            "method medusa: expected one of ngram, ngram_gpu, draft_model, eagle",
        ),
        (f"{DRAFTS}", 'how many drafts are accepted is not known here; expected "rejection_sample_method"'),
        (f"{LLAMA} --speculative-config []", "expected an object"),
        (f"{DRAFTS} {SYNTHETIC}_length x", "synthetic_acceptance_length x: expected 1 to 4"),
        (f"{DRAFTS} {SYNTHETIC}_rates 5", "expected 3 rates, not 5"),
        (f"{DRAFTS} {SYNTHETIC}_length 5.5", "synthetic_acceptance_length 5.5: expected 1 to 4"),
        (f"{DRAFTS} {SYNTHETIC}_length 2 --speculative-config.draft_sample_method x", "draft_sample_method: it is not"),
        (f"{LLAMA} --no-swa-bounded-replay", "--no-swa-bounded-replay: windows"),
        (f"{LLAMA} --middleware a b.c", "there is no place for this"),
        (f"{LLAMA} --lora-modules a=b", "--lora-modules a=b: expected --enable-lora"),
        (f"{LLAMA} --ssl-keyfile x", "expected --ssl-certfile"),
        (f"{LLAMA} --kv-cache-dtype nvfp4", "--kv-cache-dtype nvfp4: it is not simulated"),
        (f"{LLAMA} --max-num-batched-tokens 9 --no-enable-chunked-prefill", "expected at least 131072"),
        (f"{LLAMA} --max-num-scheduled-tokens 9", "--max-num-scheduled-tokens 9: expected 8192"),
        (f"{LLAMA} --enable-auto-tool-choice", "--enable-auto-tool-choice: expected --tool-call-parser"),
        (
            f"{LLAMA} --kv-transfer-config.kv_connector LMCacheConnectorV1 --kv-transfer-config.kv_role kv_both",
            "--kv-transfer-config.kv_connector LMCacheConnectorV1: expected NixlConnector, ",
        ),
        (f"{LLAMA} --allowed-origins 5", "--allowed-origins 5: expected a JSON list"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_way_out(line, message):
    with pytest.raises(ValueError, match=message):
        made(line)


def test_what_changes_step_times_is_refused_only_where_they_are_a_gpus():
    with pytest.raises(ValueError, match="--enforce-eager: step times of --gpu"):
        made(f"{LLAMA} --enforce-eager", gpu="h100")
    given = parse_arguments([LLAMA, "--enforce-eager", "--attention-backend", "TRITON_ATTN", "-pp", "1"])
    assert stand_in_config(given, environment={}).engine.max_num_seqs == 1024
    told = "accepted without effect: --enforce-eager, --attention-backend"
    assert without_effect(given, SimulationConfig(), TimingConfig()) == told
    assert without_effect({"port": 1}, SimulationConfig(), TimingConfig()) is None


@pytest.mark.parametrize(
    ("line", "gpu", "used"),
    [
        ("openai/gpt-oss-120b --moe-backend MARLIN", "h200", "marlin"),
        ("openai/gpt-oss-120b --moe-backend triton", "h200", "auto"),
        ("openai/gpt-oss-120b --moe-backend marlin", None, "auto"),
        (f"{LLAMA} --moe-backend marlin", "h200", "auto"),
        ("openai/gpt-oss-120b", "h200", "auto"),
    ],
)
def test_kernels_of_experts_count_where_they_were_measured_and_are_named_where_not(line, gpu, used):
    given, own = parse_arguments(shlex.split(line)), SimulationConfig(gpu=gpu)
    timing = stand_in_config(given, own, environment={}).timing
    assert timing.moe_backend == used
    is_idle = used == "auto" and "moe-backend" in line
    assert without_effect(given, own, timing) == ("accepted without effect: --moe-backend" if is_idle else None)


def test_steps_with_prompts_have_cuda_graphs_up_to_the_size_that_vllm_is_told():
    assert made(LLAMA, gpu="b200").timing.max_cudagraph_capture_size is None
    line = f"{LLAMA} --max-cudagraph-capture-size 2048"
    assert made(line, gpu="b200").timing.max_cudagraph_capture_size == 2048


def test_weights_are_fp8_on_request_only_if_they_have_16_bits():
    assert made(f"{LLAMA} -q fp8", gpu="h100").timing.quantization == "fp8"
    assert made(f"{DEEPSEEK} -q fp8 -tp 8", gpu="h200").timing.quantization is None
    with pytest.raises(ValueError, match="of which only fp8 is made"):
        made(f"{LLAMA} -q awq", gpu="h100")


def test_a_model_that_is_not_bundled_needs_a_shape_only_where_times_depend_on_it(tmp_path):
    assert made("nobody/model").timing.model is None
    assert made("nobody/model", gpu="h100", model_shape=LLAMA).engine.max_model_len == 131_072
    with pytest.raises(ValueError, match="--model-shape"):
        made("nobody/model", gpu="h100")


def test_a_folder_gives_tokenizer_and_sampling_parameters_and_an_id_nothing(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "max_new_tokens": 5, "bos_token_id": 1}')
    config = made(str(tmp_path))
    assert (config.model_path, config.api.sampling_defaults) == (str(tmp_path), {"temperature": 0.6})
    over = made(f"{tmp_path} --override-generation-config.max_new_tokens 7 --generation-config vllm")
    assert over.api.sampling_defaults == {"max_tokens": 7}
    assert made(LLAMA).model_path == ""
    assert made(f"{LLAMA} --tokenizer {tmp_path}").model_path == str(tmp_path)


def test_one_line_says_whose_step_times_they_are():
    assert about_times(made(LLAMA).timing).endswith("name a GPU (--gpu h100) or a --timing-file")
    assert about_times(made(LLAMA, gpu="h100").timing) == f"step times: {LLAMA} on 1 h100"
