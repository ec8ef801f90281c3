"""What `dynabench model` and the head of a run say of a model."""

import json
import re

import pytest

from mocker.models.catalog import model_configs
from tests.support.commands import dynabench

NEMOTRON = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"


def folder(path, config, **more):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config | more))
    return path


def test_a_model_is_described_in_a_line_and_in_figures():
    done = dynabench("model", NEMOTRON, "--gpu", "h100")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        f"{NEMOTRON}: 31.6 B parameters, 3.6 B active; 6 of 52 layers keep KV, 23 keep a state; BF16 weights, BF16 KV\n"
    )
    assert "6,144 bytes a token" in done.stdout
    assert "tokens on each engine" in done.stdout


def test_the_costs_of_steps_on_a_gpu_are_printed_as_flags_of_a_router(tmp_path):
    flags = ("--gpu", "h100", "--tensor-parallel-size", "4")
    printed = dynabench("model", "llama-3.1-70b", *flags).stdout
    ready = next(line for line in printed.splitlines() if "--step-base-ms" in line).split()
    assert ready[::2] == [
        f"--step-{name}" for name in ("base-ms", "prefill-us", "decode-us", "context-ns", "budget-tokens")
    ]
    costs = json.loads(dynabench("model", "llama-3.1-70b", *flags, "--json").stdout)["step_costs"]
    assert [float(value) for value in ready[1::2]] == pytest.approx(list(costs.values()), rel=1e-3)
    # 131 GiB of weights at 4 times 3,350 GB/s take 10 ms; a prompt token is 2 FLOP for each
    assert 10 < costs["step_base_ms"] < 50
    assert costs["step_prefill_us"] > 70e9 * 2 / (4 * 989e12) * 1e6
    assert "--step-base-ms" not in dynabench("model", "llama-3.1-70b").stdout


def test_the_figures_are_json_for_programs():
    done = dynabench("model", NEMOTRON, "--json", "--gpu", "h100", "--tensor-parallel-size", 2)
    found = json.loads(done.stdout)
    assert found["parameters"] == pytest.approx(31_577_937_344, rel=0.001)
    assert found["active_parameters"] == pytest.approx(3.58e9, rel=0.01)
    assert found["layers"] == {"linear_attention": 23, "moe": 23, "full_attention": 6}
    assert (found["weights"], found["kv_bytes_per_token"], found["context_length"]) == ("bfloat16", 6144, 262144)
    assert found["room"]["kv_tokens"] > 1_000_000
    assert any("times of layers with a state" in note for note in found["notes"])


def test_the_head_of_a_run_says_what_was_understood(tmp_path):
    flags = ["--model", "openai/gpt-oss-120b", "--gpu", "h200", "--max-requests", 5, "--router-mode", "kv"]
    done = dynabench("simulate", *flags, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert (
        "Model: openai/gpt-oss-120b: 116.8 B parameters, 5.7 B active; 18 of 36 layers keep KV"
        in done.stdout.replace("\n", " ")
    )
    assert "KV groups: 1 sliding_window (128), 1 full_attention, of up to 18 layers; " in done.stdout.replace("\n", " ")
    assert "Approximated" not in done.stdout
    page = (tmp_path / "out" / "report.html").read_text()
    assert "116.8 B parameters, 5.7 B active" in page


def test_a_name_that_promises_other_weights_than_the_file_is_noted(tmp_path):
    config = model_configs()["meta-llama/Llama-3.1-8B"]
    plain, named = folder(tmp_path / "plain", config), folder(tmp_path / "Llama-FP8", config)
    assert "Note" not in dynabench("model", plain).stdout
    assert "the name says FP8" in dynabench("model", named).stdout


def test_weights_may_be_described_beside_the_file(tmp_path):
    path = folder(tmp_path / "Llama-FP8", model_configs()["meta-llama/Llama-3.1-8B"])
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    assert "FP8 weights, FP8 KV" in dynabench("model", path).stdout.replace("and BF16 ", "")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "it has no model_type"),
        ({"model_type": "mystery"}, "architecture mystery is not known"),
        ({"model_type": "llama", "hybrid_override_pattern": "M*M*"}, "hybrid_override_pattern"),
    ],
)
def test_what_is_not_understood_is_refused_in_a_line_with_the_way_out(tmp_path, config, message):
    base = (
        {}
        if "model_type" not in config or config["model_type"] == "mystery"
        else model_configs()["meta-llama/Llama-3.1-8B"]
    )
    path = folder(tmp_path / "model", base | config)
    done = dynabench("model", path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "read-model-as" in done.stderr.replace("_", "-")
    assert done.stderr.count("\n") == 1
    assert dynabench("simulate", "--model", path, "--gpu", "h100", "--out", tmp_path / "o").returncode == 2


def test_an_unknown_architecture_can_be_read_as_a_known_one(tmp_path):
    path = folder(tmp_path / "model", model_configs()["meta-llama/Llama-3.1-8B"], model_type="mystery", mystery_size=3)
    done = dynabench("model", path, "--read-model-as", "llama")
    assert "8.0 B parameters" in done.stdout


def test_a_plan_says_what_was_understood(tmp_path):
    flags = ["--model", "openai/gpt-oss-120b", "--gpu", "h200", "--slo", "ttft.p50 <= 9s", "--max-requests", 40]
    flags += ["--tensor-parallel-size", 1, "--max-num-batched-tokens", 8192, "--loads", 1, "--max-gpus", 4]
    done = dynabench("plan", *flags, "--out", tmp_path / "out")
    assert "Model: openai/gpt-oss-120b: 116.8 B parameters" in done.stdout, done.stderr


def test_groups_of_layers_and_the_sizes_of_their_blocks_are_named():
    done = dynabench("model", "Qwen/Qwen3.5-35B-A3B", "--gpu", "h100")
    assert re.search(r"room for KV .* in \d+ blocks of 1,056", done.stdout)
    assert "KV groups      3 mamba, 1 full_attention" in done.stdout
