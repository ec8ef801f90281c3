"""Points of a sweep or a plan are taken up only if nothing that they depend on has changed."""

import json
import subprocess
import sys

import pytest

from tests.support.commands import dynabench

MODE = "from serving.router import Policy\n{}\nclass Mine(Policy):\n    def costs(self, c):\n        return [{} for i, n in enumerate(c.num_requests)]\n"
CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 8,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 32000,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}
EDITED_WHILE_READ = """import runpy, sys
opened = []
def edit(event, args):
    if event == "open" and str(args[0]) == "trace.jsonl":
        opened.append(args)
        if len(opened) == 2:
            with open("trace.jsonl") as old:
                rows = old.readlines()
            with open("trace.jsonl", "w") as new:
                new.writelines(rows[:-20])
sys.addaudithook(edit)
runpy.run_module("dynabench", run_name="__main__")
"""
"""Runs dynabench, and edits the workload before it is opened for the second time."""
OWN_PLANNER = """from serving.planner import Policy, Proposal
class Mine(Policy):
    default_interval_s = 10.0
    def _propose_one(self, now, facts, state):
        return Proposal({}, "as many")
"""


def swept(folder, *flags):
    return dynabench(
        "sweep",
        "--max-requests",
        "30",
        "--router-mode",
        "kv",
        "--jobs",
        "1",
        "--out",
        folder / "out",
        *flags,
        cwd=folder,
    )


def refused(done, *, difference):
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1
    return f"out contains another sweep: {difference}; choose another results folder with --out" in done.stderr


@pytest.mark.parametrize("edited", ["mine.py", "near.py"])
def test_a_router_mode_whose_file_was_edited_is_simulated_again(tmp_path, edited):
    (tmp_path / "mine.py").write_text(MODE.format("import sys; sys.path.append('.'); import near", "float(n)"))
    (tmp_path / "near.py").write_text("x = 1\n")
    flags = ("--router-mode", "mine.py", "--vary", "workers=4")
    assert swept(tmp_path, *flags).returncode == 0
    assert "2 of 2 points are already simulated" in swept(tmp_path, *flags).stdout
    with (tmp_path / edited).open("a") as file:
        file.write("# other\n")
    assert refused(swept(tmp_path, *flags), difference=f"{edited} has changed")


def test_a_model_whose_config_was_edited_is_simulated_again(tmp_path):
    config = tmp_path / "model" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps(CONFIG))
    flags = ("--model", "model", "--gpu", "h100")
    assert swept(tmp_path, *flags).returncode == 0
    config.write_text(json.dumps(CONFIG | {"num_hidden_layers": 40}))
    assert refused(swept(tmp_path, *flags), difference="model has changed")


def test_a_file_of_step_times_that_was_edited_is_read_again(tmp_path):
    times = tmp_path / "times.csv"
    rows = "prefill_tokens,num_decodes,kv_tokens,step_ms\n512,0,0,20\n4096,0,0,100\n0,1,512,8\n0,8,9000,{}\n"
    times.write_text(rows.format(10))
    flags = ("--vary", "timing_file=times.csv")
    done = swept(tmp_path, *flags)
    assert done.returncode == 0, done.stderr
    times.write_text(rows.format(99))
    assert refused(swept(tmp_path, *flags), difference="times.csv has changed")


def test_a_workload_is_the_same_by_another_path_and_another_with_other_content(tmp_path):
    row = '{"timestamp": %d, "input_length": 9, "output_length": 2, "hash_ids": [1]}\n'
    trace, folder = tmp_path / "mix.jsonl", tmp_path / "deeper"
    trace.write_text(row % 0 + row % 9)
    (tmp_path / "link.jsonl").symlink_to("mix.jsonl")
    folder.mkdir()
    (folder / "out").symlink_to("../out")
    assert swept(tmp_path, "mix.jsonl").returncode == 0
    for path in (trace, "link.jsonl"):
        assert "1 of 1 points are already simulated" in swept(tmp_path, path).stdout
    assert "1 of 1 points are already simulated" in swept(folder, "../mix.jsonl").stdout
    (tmp_path / "other.jsonl").write_text(row % 0 + row % 8)
    assert refused(swept(tmp_path, "other.jsonl"), difference="other.jsonl is new; mix.jsonl is not used")


def test_points_during_whose_simulation_a_file_changed_are_of_no_use(tmp_path):
    edit = "open(__file__, 'a').write('# other')"
    (tmp_path / "mine.py").write_text(MODE.format(f"def edited(n):\n    {edit}\n    return n\n", "edited(n)"))
    flags = ("--router-mode", "mine.py")
    done = swept(tmp_path, *flags)
    assert done.returncode == 2, done.stderr
    assert "mine.py has changed while the sweep ran" in done.stderr
    (tmp_path / "mine.py").write_text(MODE.format("", "float(n)"))
    assert "out exists and is not a sweep" in swept(tmp_path, *flags).stderr


@pytest.mark.parametrize(
    ("flags", "difference"),
    [
        (("--seed", "7"), "--seed was 0 and is 7"),
        (("--num-gpu-blocks", "900"), "pools.worker.num_gpu_blocks was none and is 900"),
        (("--kv-overlap-score-weight", "2"), "router.kv_overlap_score_weight was 1.0 and is 2.0"),
        (("--rate-scale", "2"), "shape.rate_scale was 1.0 and is 2.0"),
    ],
)
def test_a_setting_that_differs_is_named_with_both_values(tmp_path, flags, difference):
    assert swept(tmp_path).returncode == 0
    assert refused(swept(tmp_path, *flags), difference=difference)


def test_a_policy_of_the_planner_that_is_varied_counts_by_its_content(tmp_path):
    (tmp_path / "policy.py").write_text(OWN_PLANNER.format(1))
    flags = ("--vary", "planner=static,policy.py")
    done = swept(tmp_path, *flags)
    assert done.returncode == 0, done.stderr
    (tmp_path / "policy.py").write_text(OWN_PLANNER.format(2))
    assert refused(swept(tmp_path, *flags), difference="policy.py has changed")


def test_a_plan_is_made_again_when_the_model_has_changed(tmp_path):
    config = tmp_path / "model" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps(CONFIG))
    command = (
        "plan", "--model", "model", "--gpu", "h100", "--max-requests", "60", "--slo", "ttft.mean <= 1s",
        "--tensor-parallel-size", "1", "--max-num-batched-tokens", "2048", "--loads", "1", "--router-mode", "kv",
        "--jobs", "1", "--out", "out",
    )  # fmt: skip
    first = dynabench(*command, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    config.write_text(json.dumps(CONFIG | {"num_hidden_layers": 40}))
    again = dynabench(*command, cwd=tmp_path)
    assert (again.returncode, "out contains another plan: model has changed" in again.stderr) == (2, True)


@pytest.mark.parametrize("command", ["plan", "sweep"])
def test_points_of_a_workload_that_changed_before_it_was_read_are_of_no_use(tmp_path, command):
    rows = [{"timestamp": 100 * n, "input_length": 512, "output_length": 8, "hash_ids": [n]} for n in range(60)]
    (tmp_path / "trace.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    flags = (
        "trace.jsonl", "--model", "Qwen/Qwen3-8B", "--gpu", "h100", "--router-mode", "kv", "--jobs", "1", "--out", "out",
    )  # fmt: skip
    more = ("--slo", "ttft.mean <= 1s", "--tensor-parallel-size", "1", "--loads", "1") if command == "plan" else ()
    done = subprocess.run(
        [sys.executable, "-c", EDITED_WHILE_READ, command, *flags, *more], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert f"trace.jsonl has changed while the {command} ran" in done.stderr
