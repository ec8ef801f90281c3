"""The command line of vllm serve; tests/real_engines/test_vllm_flags.py compares it with vLLM's own parser."""

import shlex

import pytest

from serving.stand_in.vllm.flags.arguments import arguments
from serving.stand_in.vllm.flags.command_line import FORMER, differing, in_flags, parse_arguments


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("m", {"model": "m"}),
        ("--port 1", {"port": 1}),
        ("m --max_model_len=8k -tp 2", {"model": "m", "max_model_len": 8000, "tensor_parallel_size": 2}),
        ("-tp=2 -q fp8 m", {"tensor_parallel_size": 2, "quantization": "fp8", "model": "m"}),
        ("--max-num-batched-tokens 8K", {"max_num_batched_tokens": 8192}),
        ("--max-num-batched-tokens 1.5m", {"max_num_batched_tokens": 1_500_000}),
        ("--max-model-len auto", {"max_model_len": -1}),
        ("--max-model-len -1", {"max_model_len": -1}),
        ("-O3", {"optimization_level": "3"}),
        ("-O=1", {"optimization_level": "1"}),
        ("-O 2 m", {"optimization_level": "2", "model": "m"}),
        ("--no-enable-prefix-caching -ep", {"enable_prefix_caching": False, "enable_expert_parallel": True}),
        ("--api-key a b --port 1", {"api_key": ["a", "b"], "port": 1}),
        ("--middleware a --middleware b", {"middleware": ["a", "b"]}),
        ("--hf-token", {"hf_token": True}),
        ("--max-cpu-loras None", {"max_cpu_loras": None}),
        ("--moe-backend DEEP-gemm", {"moe_backend": "deep_gemm"}),
        ("--device-ids 0,GPU-1", {"device_ids": [0, "GPU-1"]}),
        ('--allowed-origins ["*"]', {"allowed_origins": ["*"]}),
        ("--lora-modules a=b", {"lora_modules": [{"name": "a", "path": "b"}]}),
        ("--gpu-memory-util 0.5", {"gpu_memory_utilization": 0.5}),
        ("--model m --port 1", {"model": "m", "port": 1}),
        ("m --port 1 --port 2", {"model": "m", "port": 2}),
    ],
)
def test_words_are_read_as_vllm_reads_them(words, expected):
    assert parse_arguments(words.split()) == expected


def test_dotted_flags_are_entries_of_one_json_object():
    words = "--kv-transfer-config.kv_connector NixlConnector --kv_transfer_config.kv_connector_extra_config.x.y=80m"
    words += " --kv-transfer-config.kv_connector_extra_config.backends+ UCX,LIBFABRIC"
    words += " --kv-transfer-config.kv_connector_extra_config.backends+=GDS"
    extra = {"x": {"y": 80_000_000}, "backends": ["UCX", "LIBFABRIC", "GDS"]}
    expected = {"kv_connector": "NixlConnector", "kv_connector_extra_config": extra}
    assert parse_arguments(words.split()) == {"kv_transfer_config": expected}


def test_dotted_flags_replace_the_whole_object_given_as_json():
    words = ["--kv-events-config.hwm", "5", "--kv-events-config", '{"topic": "a"}']
    assert parse_arguments(words) == {"kv_events_config": {"hwm": 5}}


def test_numbers_in_settings_may_have_suffixes_but_texts_keep_theirs():
    assert parse_arguments(["--kv-events-config", '{"hwm": 2k, "topic": "8k \\"9k"}']) == {
        "kv_events_config": {"hwm": 2000, "topic": '8k "9k'}
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--port x", "--port x: expected a whole number"),
        ("--gpu-memory-utilization x", "--gpu-memory-utilization x: expected a number"),
        ("--max-num-batched-tokens 1.5K", "--max-num-batched-tokens 1.5K: expected a whole number before K, or 1.5k"),
        ("--max-model-len x", "--max-model-len x: expected a whole number, such as 8192, 8k (8,000) or 8K (8,192), or auto"),
        ("-tp x", "--tensor-parallel-size x: expected a whole number"),
        ("--scheduling-policy x", "--scheduling-policy x: expected one of fcfs, priority"),
        ("--kv-events-config 5", "--kv-events-config 5: expected a JSON object"),
        ("--kv-events-config.hwmm 5", "--kv-events-config.hwmm 5: unknown; expected some of enable_kv_cache_events, "),
        ("--lora-modules a", "--lora-modules a: expected NAME=PATH"),
        ("--port", "--port: expected one argument"),
        ("--kv-events-config.hwm", "--kv-events-config.hwm: expected a value"),
        ("--portt 1", "--portt: unknown to vllm serve 0.32.0; did you mean --port?"),
        ("--gpuu 1", "--gpuu: unknown to vllm serve 0.32.0; did you mean --gpu?"),
        ("--zzzzzz", "--zzzzzz: unknown to vllm serve 0.32.0; dynabench vllm --help=WORD searches them"),
        ("--swap-space 4", "has it no more; use --kv-offloading-size for KV in host memory"),
        ("serve m", "serve: leave it out"),
        ("--use-v2-block-manager", "has it no more; leave it out"),
        ("m n", "n: there is no place for this; vllm serve takes one model, and flags"),
        ("m --model n", "--model n: expected one model, and m is there, too"),
        ("--served-model-name a", "--served-model-name a: expected the model as the first word, too"),
        ("--config=x.yaml", "vllm serve ignores the file otherwise"),
        ("m --config x.yaml", "--config x.yaml: expected a YAML file"),
        ("m --config x.json", "--config x.json: expected a file that ends in .yaml or .yml"),
        ("m --config", "--config: expected a YAML file after it"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_in_one_line(words, message):
    with pytest.raises(ValueError) as refused:
        parse_arguments(words.split(), beside=["--gpu"])
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_flag_of_older_versions_that_asks_for_what_is_so_anyhow_is_accepted(caplog):
    with caplog.at_level("INFO"):
        assert parse_arguments(["m", "--disable-log-requests", "--port", "1"]) == {"model": "m", "port": 1}
    assert "accepted without effect: --disable-log-requests" in caplog.text


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(tmp_path, caplog):
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: theirs\nport: 1\nserved-model-name: [a, b]\nenable-prefix-caching: false\nkv_events_config: {hwm: 7}\n"
    )
    found = parse_arguments(["--config", str(file), "--port", "2"])
    assert found == {
        "model": "theirs",
        "port": 2,
        "served_model_name": ["a", "b"],
        "kv_events_config": {"hwm": 7},
    }
    assert "enable-prefix-caching: false in the file of --config is ignored, as by vllm serve" in caplog.text
    assert parse_arguments(["mine", "--config", str(file)])["model"] == "mine"


def test_a_flag_of_ours_belongs_on_the_command_line(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("gpu: h100\n")
    with pytest.raises(ValueError, match="--gpu in the file of --config: this flag is dynabench's own; it goes on"):
        parse_arguments(["m", "--config", str(file)], beside=["--gpu"])


def test_messages_about_settings_name_the_flags():
    told = in_flags("32 heads cannot be divided over tensor_parallel_size 3; see /max_model_len/x and timing_file")
    assert told == "32 heads cannot be divided over --tensor-parallel-size 3; see /max_model_len/x and timing_file"


def test_only_what_is_not_vllms_default_differs():
    given = parse_arguments(
        shlex.split("m --port 8000 -pp 2 --no-enforce-eager --kv-events-config.hwm 100000 --watermark 0")
    )
    assert differing(given) == {"model": "m", "pipeline_parallel_size": 2}


def test_a_flag_of_an_older_vllm_is_not_one_of_this():
    flags = {flag for argument in arguments().values() for flag in argument.flags}
    assert not flags & FORMER.keys()
