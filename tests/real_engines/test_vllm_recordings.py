"""vLLM is recorded in the ways that its CPU build can run, and the mocker takes the same steps."""

import json
import random

import pytest

from tests.support import commands

pytestmark = pytest.mark.timeout(300)
ENGINE = {
    "num_gpu_blocks": 15,
    "block_size": 32,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 96,
    "max_model_len": 384,
}


def scenario(rng, **engine):
    """Long prompts in a small cache; the model says a prompt's last token again as its second one, so some stop there."""
    shared = rng.choices(range(2, 2048), k=70)
    requests = []
    for number in range(20):
        prompt = rng.choices(range(2, 2048), k=rng.randrange(8, 150))
        request = {"id": f"r{number}", "max_tokens": rng.randrange(4, 60), "arrival_step": number // 2}
        match number % 4:
            case 0:
                request |= {"prompt": shared + prompt}
            case 1:
                request |= {"prompt": prompt, "stop_token_ids": [prompt[-1], 5]}
            case 2:
                request |= {"prompt": prompt}
            case 3:
                request |= {"prompt": [1] * len(prompt), "ignore_eos": False}  # 1 is the end token
        requests.append(request)
    requests[1]["max_tokens"] = 2  # it stops where its length ends it
    return {"name": "stops", "engine": ENGINE | engine, "requests": requests}


WINDOWS = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 2048,
    "max_position_embeddings": 2048,
    "sliding_window": 64,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 32,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""Five layers with windows, one without."""
STATES = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 128,  # the CPU's kernel can no others
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.25,
    "vocab_size": 2048,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""Three layers with states, one that keeps all tokens."""
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
LORA = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 4, "max_lora_rank": 8}


def drafting():
    """What speculates, with the drafter of vLLM that needs no model."""
    return scenario(random.Random(3), speculative_config=NGRAM, num_gpu_blocks=13)


def with_adapters():
    """Three adapters and one slot for them, beside speculation."""
    asked = scenario(random.Random(3), **LORA, speculative_config=NGRAM)
    for number, request in enumerate(asked["requests"]):
        if number % 4:
            request["adapter"] = f"adapter {number % 3}"
    return asked


def with_windows():
    """A model with groups of layers; some prompts repeat an earlier one and go on."""
    asked = scenario(random.Random(3), num_gpu_blocks=60)
    requests = asked["requests"]
    for earlier, later in zip(requests[2:6], requests[12:16], strict=True):
        later["prompt"] = earlier["prompt"] + later["prompt"][:20]
    return asked | {"model": WINDOWS}


def with_states():
    """A model with states; some prompts go on after an earlier one."""
    settings = {"dtype": "bfloat16", "enable_prefix_caching": True, "mamba_cache_mode": "align"}
    asked = scenario(random.Random(3), num_gpu_blocks=60, max_model_len=1024, **settings)
    del asked["engine"]["block_size"]  # vLLM makes blocks as large as a state
    requests = asked["requests"]
    for request in requests:
        request["prompt"] = request["prompt"] + request["prompt"][:150]
    for earlier, later in zip(requests[2:8], requests[12:18], strict=True):
        later["prompt"] = earlier["prompt"] + later["prompt"][:200]
    return asked | {"model": STATES}


def with_a_draft_model():
    return scenario(random.Random(3), speculative_config={"method": "draft_model", "num_speculative_tokens": 2})


def in_stages():
    return scenario(random.Random(3), pipeline_parallel_size=2)


def recorded_from(tmp_path, asked):
    """Record a scenario; return what its settings were, and its rows."""
    (tmp_path / "scenario.json").write_text(json.dumps(asked))
    done = dynabench(tmp_path, "record", "--scenario", "scenario.json", "--out", "steps.jsonl")
    assert done.returncode == 0, done.stderr[-3000:]
    head, *rows = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    return head["scenario"]["resolved"], rows


def total(rows, key):
    return sum(sum(row.get(key, {}).values()) for row in rows)


def matches(tmp_path):
    done = dynabench(tmp_path, "verify", "steps.jsonl")
    assert "matches vLLM" in done.stdout, done.stdout


def dynabench(home, *arguments):
    environment = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return commands.dynabench(*arguments, cwd=home, timeout=200, env=environment)


@pytest.fixture(params=[None, True], ids=["default", "asynchronous"])
def recorded(tmp_path, request):
    """A recording as vLLM does by default, which on CPUs is synchronously, and one made asynchronously."""
    engine = {} if request.param is None else {"async_scheduling": request.param}
    (tmp_path / "scenario.json").write_text(json.dumps(scenario(random.Random(3), **engine)))
    done = dynabench(tmp_path, "record", "--scenario", "scenario.json", "--out", "steps.jsonl")
    assert done.returncode == 0, done.stderr[-3000:]
    return tmp_path


def test_what_is_recorded_verifies_with_chunks_preemptions_and_stops(recorded):
    head, *rows = [json.loads(line) for line in (recorded / "steps.jsonl").read_text().splitlines()]
    is_async = head["scenario"]["resolved"]["async_scheduling"]
    assert is_async == head["scenario"]["engine"].get("async_scheduling", False)
    assert all(row["updated"] == (row["step"] - 1 if is_async else row["step"]) for row in rows[1:])
    reasons = [reason for row in rows for reason in row["finished"].values()]
    assert sorted(set(reasons)) == ["length", "stop"]
    assert len(reasons) == 20
    assert any(row["preempted"] for row in rows if "preempted" in row)
    assert any(any(row.get("wasted", ())) for row in rows) == is_async
    done = dynabench(recorded, "verify", "steps.jsonl")
    assert "matches vLLM" in done.stdout, done.stdout


def test_drafts_of_the_n_gram_drafter_are_recorded_and_verify(tmp_path):
    resolved, rows = recorded_from(tmp_path, drafting())
    assert (resolved["spec_method"], resolved["num_speculative_tokens"]) == ("ngram", 3)
    assert total(rows, "drafts") > total(rows, "accepted") > 20
    assert total(rows, "wasted")  # tokens after one that ends the answer
    assert any(row.get("preempted") for row in rows)
    matches(tmp_path)


def test_adapters_are_recorded_and_verify(tmp_path):
    resolved, rows = recorded_from(tmp_path, with_adapters())
    assert resolved["max_loras"] == 1
    named = {(event.get("adapter"), event.get("adapter_number")) for row in rows for event in row["events"]}
    assert {name for name, _ in named} >= {"adapter 0", "adapter 1", "adapter 2"}
    assert len({number for _, number in named}) == len(named)
    assert total(rows, "drafts")
    matches(tmp_path)


def test_groups_of_layers_are_recorded_and_verify(tmp_path):
    resolved, rows = recorded_from(tmp_path, with_windows())
    assert [group["kind"] for group in resolved["groups"]] == [*["sliding_window"] * 5, "full_attention"]
    tables = [table for row in rows for tables in row.get("tables", {}).values() for table in tables]
    assert any(0 in table for table in tables)  # blocks that a window has left
    assert total(rows, "new")  # hits
    assert any(row.get("junction") for row in rows)
    assert any(row.get("preempted") for row in rows)
    assert {event.get("group") for row in rows for event in row["events"]} == set(range(6))
    matches(tmp_path)


def test_states_of_layers_are_recorded_and_verify(tmp_path):
    resolved, rows = recorded_from(tmp_path, with_states())
    assert [group["kind"] for group in resolved["groups"]] == [*["mamba"] * 3, "full_attention"]
    assert resolved["block_size"] == 128
    assert total(rows, "new")  # hits
    assert {event.get("group") for row in rows for event in row["events"]} == set(range(4))
    matches(tmp_path)


def test_drafts_of_another_model_are_recorded_and_verify(tmp_path):
    resolved, rows = recorded_from(tmp_path, with_a_draft_model())
    assert (resolved["spec_method"], resolved["num_speculative_tokens"]) == ("draft_model", 2)
    assert total(rows, "accepted") > 100
    matches(tmp_path)


def test_batches_in_two_stages_are_recorded_and_verify(tmp_path):
    resolved, rows = recorded_from(tmp_path, in_stages())
    assert resolved["pipeline_parallel_size"] == 2
    assert any(row["updated"] == row["step"] - 1 for row in rows)
    assert any(row.get("preempted") for row in rows)
    assert not any("duration_ms" in row for row in rows)
    matches(tmp_path)


def test_settings_that_vllm_refuses_are_one_line(tmp_path):
    refused = scenario(random.Random(3), max_model_len=100_000)
    (tmp_path / "scenario.json").write_text(json.dumps(refused))
    done = dynabench(tmp_path, "record", "--scenario", "scenario.json", "--out", "steps.jsonl")
    assert done.returncode == 2
    assert "rejects the settings of the scenario" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "steps.jsonl").exists()
