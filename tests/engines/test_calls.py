"""Settings as each engine takes them: what --dry-run shows."""

import asyncio
import json
import re
import sys

import pytest

from foundation.extras import install
from serving.runtime.messages import CallError
from serving.worker.config import ModelRunConfig, WorkerConfig, flags_to_arguments
from serving.worker.make import make_engine
from serving.worker.registry import ENGINES
from tests.support.commands import dynamo_run, run


def call(name, flags=(), run=None, **worker):
    """Return the arguments of all calls that make an engine."""
    engine = make_engine(name, WorkerConfig(**({"model_path": "m"} | worker)), ModelRunConfig(**(run or {})), flags)
    return {key: value for made in engine.calls for key, value in made.arguments.items()}


TWO_NODES = {"tensor_parallel_size": 16, "num_nodes": 2, "leader_addr": "10.217.98.122:5000"}


@pytest.mark.parametrize(
    ("name", "run", "worker", "expected"),
    [
        ("vllm", {"tensor_parallel_size": 4}, {}, {"tensor_parallel_size": 4}),
        ("vllm", {"kv_cache_block_size": 32}, {"context_length": 99}, {"block_size": 32, "max_model_len": 99}),
        ("vllm", TWO_NODES, {}, {"nnodes": 2, "node_rank": 0, "master_addr": "10.217.98.122", "master_port": 5000}),
        ("sglang", {"tensor_parallel_size": 4, "base_gpu_id": 4}, {}, {"tp_size": 4, "base_gpu_id": 4}),
        ("sglang", {"kv_cache_block_size": 32}, {"context_length": 99}, {"page_size": 32, "context_length": 99}),
        ("sglang", TWO_NODES, {}, {"nnodes": 2, "node_rank": 0, "dist_init_addr": "10.217.98.122:5000", "tp_size": 16}),
        ("sglang", TWO_NODES | {"node_rank": 1}, {}, {"node_rank": 1}),
        ("trtllm", TWO_NODES, {"context_length": 99}, {"tensor_parallel_size": 16, "gpus_per_node": 8, "max_seq_len": 99}),
        ("llamacpp", {}, {"model_path": "m.gguf", "context_length": 100}, {"n_ctx": 400, "n_seq_max": 4, "n_gpu_layers": -1}),
        ("mistralrs", {}, {"model_path": "d/m.gguf"}, {"quantized_model_id": "d", "quantized_filename": "m.gguf"}),
        ("mistralrs", {}, {"model_path": "d/m.gguf", "model_config": "c"}, {"tok_model_id": "c"}),
    ],
)  # fmt: skip
def test_settings_become_the_engines_own_arguments(name, run, worker, expected):
    given = call(name, run=run, **worker)
    assert {key: given[key] for key in expected} == expected


def test_mistral_rs_refuses_a_seed_that_it_would_ignore():
    engine = make_engine("mistralrs", WorkerConfig(model_path="m"), ModelRunConfig())
    conditions = {"max_tokens": 1, "min_tokens": 0, "ignore_eos": False}
    asked = {"token_ids": [1], "stop_conditions": conditions, "sampling_options": {"seed": 7, "temperature": 0.5}}
    with pytest.raises(CallError, match=r"seed is 7; expected none, or temperature 0: .*-- --seed N") as refused:
        asyncio.run(anext(engine.generate(asked)))
    assert refused.value.kind == "invalid"


def test_a_follower_and_a_worker_without_events_publish_none():
    assert "kv_events_config" in call("sglang")
    assert "kv_events_config" not in call("sglang", run=TWO_NODES | {"node_rank": 1})
    assert "kv_events_config" not in call("vllm", kv_events=False)
    assert "kv_events_config" not in call("vllm", ["--enable-prefix-caching=false"])


def test_arguments_behind_the_dashes_win_over_the_file_and_the_file_over_ours(tmp_path):
    file = tmp_path / "args.json"
    file.write_text(json.dumps({"dtype": "half", "trust_remote_code": True, "tensor_parallel_size": 8}))
    run = {"extra_engine_args": file, "tensor_parallel_size": 2}
    given = call("vllm", ["--dtype", "float32"], run)
    assert (given["dtype"], given["trust_remote_code"], given["tensor_parallel_size"]) == ("float32", True, 8)


def test_trtllm_takes_yaml(tmp_path):
    file = tmp_path / "extra.yaml"
    file.write_text("backend: pytorch\nkv_cache_config:\n  event_buffer_max_size: 1024\n")
    given = call("trtllm", run={"extra_engine_args": file})
    assert given["backend"] == "pytorch"
    assert given["kv_cache_config"] == {
        "tokens_per_block": 32,
        "event_buffer_max_size": 1024,
        "enable_block_reuse": True,
    }


def test_settings_of_tiers_pass_through():
    given = call("sglang", ["--enable-hierarchical-cache", "--hicache-size=64", "--hicache-storage-backend=file"])
    assert (given["enable_hierarchical_cache"], given["hicache_size"], given["hicache_storage_backend"]) == (
        True,
        64,
        "file",
    )
    cache = call("trtllm", ["--kv-cache-config", '{"host_cache_size": 1000000000}'])["kv_cache_config"]
    assert (cache["host_cache_size"], cache["enable_block_reuse"]) == (1_000_000_000, True)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], {}),
        (["--enforce-eager"], {"enforce_eager": True}),
        (["--max-num-seqs", "8", "--enforce-eager"], {"max_num_seqs": 8, "enforce_eager": True}),
        (["--max-num-seqs=8"], {"max_num_seqs": 8}),
        (["--a-b=x-y-z"], {"a_b": "x-y-z"}),
        (["--ratio=0.5", "--on=false", "--nothing=null"], {"ratio": 0.5, "on": False, "nothing": None}),
        (['--deep={"a-b": [1, 2]}'], {"deep": {"a-b": [1, 2]}}),
        (["--offset", "-3"], {"offset": -3}),
        (["--key=a=b"], {"key": "a=b"}),
        (["--lora-modules", "a=x", "b=y", "--c"], {"lora_modules": ["a=x", "b=y"], "c": True}),
        (['--lora-modules=["a=x"]', "b=y"], {"lora_modules": ["a=x", "b=y"]}),
        (["--lora-modules=a=x", "b=y"], {"lora_modules": ["a=x", "b=y"]}),
    ],
)
def test_flags_become_arguments(flags, expected):
    assert flags_to_arguments(flags) == expected


def test_a_stray_word_is_no_argument():
    with pytest.raises(ValueError, match="'stray'"):
        flags_to_arguments(["--a", "1", "stray"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["out=vllm", "m", "--base-gpu-id", "4"], "CUDA_VISIBLE_DEVICES"),
        (["out=trtllm", "m", "--base-gpu-id", "4"], "CUDA_VISIBLE_DEVICES"),
        (["out=llamacpp", "m.gguf", "--tensor-parallel-size", "2"], "uses all the GPUs it sees"),
        (["out=mistralrs", "m", "--num-nodes", "2", "--leader-addr", "h:1"], "uses all the GPUs it sees"),
        (["out=llamacpp", "m"], "needs a GGUF file"),
        (["out=vllm"], "needs a model"),
        (["out=vllm", "m", "--num-nodes", "2"], "--leader-addr"),
        (["out=vllm", "m", "--num-nodes", "2", "--leader-addr", "host"], "host:port was expected"),
        (["out=vllm", "m", "--num-nodes", "2", "--leader-addr", "h:1", "--node-rank", "2"], "--node-rank must be from 0 to 1"),
        (["out=trtllm", "m", "--num-nodes", "2", "--leader-addr", "h:1", "--node-rank", "1"], "trtllm-llmapi-launch"),
        (["in=none", "out=vllm", "m", "--num-nodes", "2", "--leader-addr", "h:1", "--node-rank", "1"], "vllm serve m --headless"),
        (["out=trtllm", "m", "--num-nodes", "2", "--leader-addr", "h:1", "--tensor-parallel-size", "3"], "is not a multiple of"),
        (["out=vllm", "m", "--tensor-parallel-size", "0"], "from 1 to 255"),
        (["out=vllm", "m", "--extra-engine-args", "/none.json"], "/none.json"),
        (["out=vllm", "m", "--", "stray"], "'stray'"),
        (["out=echo_full", "--model-name", "x", "--", "-n", "1"], "takes no arguments after --"),
        (["in=http", "out=dyn", "--tensor-parallel-size", "2"], "for workers, not for the frontend"),
        (["in=none", "out=dyn"], "without input"),
        (["in=batch:", "out=mocker"], "invalid in= option"),
        (["in=batch:/none.jsonl", "out=mocker"], "no such file"),
        (["in=text", "m", "out=mocker"], "comes too late"),
        (["out=pystr:"], "needs a file"),
        (["out=pystr:/none.py"], "there is no such file"),
        (["out=pytok:setup.py"], "there is no such file"),
        (["m", "--model-path", "n", "out=vllm"], "comes too late"),
        (["out=vllm", "m", "--model-path", "n"], "given twice"),
        (["in=http", "out=mocker", "--http-workers", "2"], "--http-workers"),
        (["out=mocker", "--batch-concurrency", "0"], "batch_concurrency must be at least 1, not 0"),
        (["out=mocker", "--temperature", "3"], "temperature must be from 0 to 2"),
    ],
)  # fmt: skip
def test_what_does_not_fit_an_engine_is_told_in_one_line(words, message, tmp_path):
    done = dynamo_run(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert re.fullmatch(r"(.* INFO .*\n)?dynamo-run: .*\n", done.stderr)


@pytest.mark.parametrize("name", [name for name, entry in ENGINES.items()])
def test_a_missing_package_is_named_with_what_installs_it(name, tmp_path):
    model = tmp_path / "m.gguf"
    model.touch()
    program = "import sys; sys.modules[sys.argv[1]] = None; from serving.cli.dynamo_run import main; main(sys.argv[2:])"
    words = ["in=http", f"out={name}", str(model)]
    done = run(sys.executable, "-c", program, ENGINES[name].package, *words)
    assert done.returncode == 2
    assert f"{name} needs the Python package {ENGINES[name].package}" in done.stderr
    assert install(name) in done.stderr


def test_dry_run_shows_the_call_and_loads_nothing(tmp_path):
    words = [
        "in=none",
        "out=sglang",
        "/data/R1/",
        "--tensor-parallel-size",
        "16",
        "--num-nodes",
        "2",
        "--node-rank",
        "1",
    ]
    words += ["--leader-addr", "10.217.98.122:5000", "--dry-run", "--", "--trust-remote-code"]
    done = dynamo_run(*words, check=True)
    assert done.stdout == (
        "sglang.Engine(\n    model_path='/data/R1/',\n    incremental_streaming_output=True,\n"
        "    page_size=16,\n    tp_size=16,\n    nnodes=2,\n    node_rank=1,\n"
        "    dist_init_addr='10.217.98.122:5000',\n    trust_remote_code=True,\n)\n"
    )


def test_every_flag_of_the_guide_is_taken():
    usage = (
        "--http-port 8080 --model-path p --model-name n --model-config c --tensor-parallel-size=1 --context-length=100 "
    )
    usage += "--num-nodes=1 --node-rank=0 --leader-addr=127.0.0.1:9876 --base-gpu-id=0 --router-mode kv -v "
    usage += (
        "--kv-overlap-score-weight=1.0 --router-temperature=0.0 --use-kv-events=true --migration-limit=3 --verbosity "
    )
    usage += "--kv-gpu-cache-usage-weight=1.0 --kv-waiting-requests-weight=1.0"
    done = dynamo_run("in=http", "out=vllm", *usage.split(), "--dry-run", check=True)
    assert "max_model_len=100" in done.stdout
    assert done.stderr.count("has no effect") == 2


def test_help_fits_a_terminal():
    done = dynamo_run("--help", check=True)
    assert max(map(len, done.stdout.splitlines())) <= 80
    for way in ("in=text ", "in=stdin ", "in=http ", "in=batch:FILE", "in=dyn://NAME", "in=none ", "out=pystr:FILE"):
        assert f"\n  {way}" in done.stdout


@pytest.mark.parametrize("entry", ENGINES.values(), ids=ENGINES)
def test_each_has_a_module_of_its_own_to_run(entry):
    model = "m.gguf" if entry.command == "llama_cpp" else "m"
    done = run(sys.executable, "-m", f"serving.{entry.command}", model, "--dry-run", check=True)
    assert entry.package in done.stdout


def test_the_default_engine_follows_the_model(tmp_path):
    done = dynamo_run("in=http", "some/model", "--dry-run", check=True)
    assert "using the default engine, out=mistralrs" in done.stderr
    assert "mistralrs.Runner" in done.stdout
