"""The error of simulated times: of the nearest measured case, with what differs, or an average that says so."""

import re
from pathlib import Path

import pytest

from dynabench.experiment.model_error import HELD_OUT, KNOWN, OVERALL, WITHIN, kind_of, model_error
from mocker.models.catalog import find_model, model_configs
from mocker.timing.config import TimingConfig
from tests.support.commands import dynabench

PAGE = (Path(__file__).parents[2] / "docs/fidelity.md").read_text()
LLAMA = "meta-llama/Llama-3.1-70B"


def quoted(model, gpu="h100", **settings):
    return model_error(TimingConfig(model=model, gpu=gpu, **settings)).text


def test_known_errors_are_those_of_the_page_on_fidelity():
    for known in KNOWN:
        rows = [row for row in PAGE.splitlines() if row.startswith("|") and f"| {known.points} |" in row]
        name = known.model.rpartition("/")[2].replace("-", " ").lower()[:9]
        cells = [row for row in rows if name in row.replace("-", " ").lower() and known.gpu in row.lower()]
        assert any(f"{known.tpot * 100:.1f} / " in row and f"{known.ttft * 100:.1f} / " in row for row in cells), known


@pytest.mark.parametrize(
    ("average", "row"),
    [
        (HELD_OUT["vllm"], "**the other half**"),
        (HELD_OUT["trtllm"], "**all other points**"),
        (OVERALL, "all, dense ones on vLLM"),
    ],
)
def test_averages_are_those_of_the_table_and_of_the_first_lines_of_the_page(average, row):
    (found,) = (line for line in PAGE.splitlines() if row in line)
    tpot, ttft = f"{average.tpot * 100:.1f}", f"{average.ttft * 100:.1f}"
    assert f"| {average.points:,} |" in found
    assert f"| {tpot} / " in found
    assert f"| {ttft} / " in found
    (points,) = re.findall(rf"On (?:all )?{average.points:,} .*?(?=\n\d)", PAGE, re.DOTALL)
    assert f"{tpot}%" in points
    assert f"{ttft}%" in points
    assert f"(TPOT {tpot}%, TTFT {ttft}%)" in PAGE


def test_the_overall_average_is_that_of_all_rows():
    points = sum(case.points for case in KNOWN)
    assert points == OVERALL.points
    assert sum(case.points * case.tpot for case in KNOWN) / points == pytest.approx(OVERALL.tpot, abs=0.001)
    assert sum(case.points * case.ttft for case in KNOWN) / points == pytest.approx(OVERALL.ttft, abs=0.001)


def test_the_error_of_a_measured_case_is_its_own():
    assert quoted(LLAMA, quantization="fp8") == (
        "mean TPOT off by 2.6%, mean TTFT by 5.7% on average over "
        "45 published points of meta-llama/Llama-3.1-70B fp8 on vllm and h100"
    )
    assert "60 published points" in quoted(LLAMA, "b200", quantization="fp4")
    assert "31 published points of deepseek-ai/DeepSeek-R1 " in quoted(
        "deepseek-ai/DeepSeek-R1", "h200", timed_as="trtllm"
    )
    assert "31 published points of deepseek-ai/DeepSeek-R1 " in quoted(
        "deepseek-ai/DeepSeek-V3", "h200", timed_as="trtllm"
    )


def test_the_nearest_case_is_quoted_with_what_differs():
    assert quoted(LLAMA).endswith(
        "over 45 published points of the nearest measured case, meta-llama/Llama-3.1-70B fp8 on vllm and h100 "
        "(this model has bfloat16 weights)"
    )
    assert quoted("Qwen/Qwen2.5-72B").endswith(" (this model has 72.7 B parameters, not 70.6 B, and bfloat16 weights)")


@pytest.mark.parametrize("model", ["meta-llama/Llama-3.1-8B", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-32B"])
def test_a_dense_model_of_another_size_does_not_get_the_best_case(model):
    assert quoted(model) == (
        "not measured for this model; held-out average, only a hint here: mean TPOT off by 3.8%, mean TTFT by 12.6% "
        "(82 published points of Llama 3.1 70B on vllm, h100 and b200)"
    )


@pytest.mark.parametrize(
    ("model", "gpu", "engine"),
    [
        ("openai/gpt-oss-20b", "h100", "vllm"),  # a sixth of gpt-oss-120b
        ("Qwen/Qwen3.5-397B-A17B", "b200", "vllm"),  # measured on SGLang only
        ("Qwen/Qwen3.5-27B", "h100", "vllm"),  # dense, but most of its layers keep a state
        (LLAMA, "h100", "sglang"),
    ],
)
def test_what_is_neither_near_nor_dense_on_vllm_gets_the_average_of_all(model, gpu, engine):
    assert quoted(model, gpu, timed_as=engine).startswith(
        "not measured for this model; overall average, only a hint here: mean TPOT off by 12.3%, mean TTFT by 26.3%"
    )


def test_no_case_is_quoted_for_another_kind_or_for_more_than_twice_the_size():
    cases = {str(case): find_model(case.model) for case in KNOWN}
    for model in model_configs():
        for gpu in ("h100", "h200", "b200", "l40s"):
            for engine in ("vllm", "sglang", "trtllm"):
                found = model_error(TimingConfig(model=model, gpu=gpu, timed_as=engine))
                if not found.average_name:
                    shape, case = find_model(model), cases[found.of]
                    assert kind_of(shape) == kind_of(case)
                    assert 1 / WITHIN <= shape.num_parameters / case.num_parameters <= WITHIN
                    assert found.of.endswith(f" on {engine} and {gpu}")


@pytest.mark.parametrize("divided", ["speedup_ratio", "decode_speedup_ratio"])
def test_divided_step_times_are_not_quoted_the_error_of_a_case(divided):
    assert model_error(TimingConfig(model=LLAMA, gpu="h100", **{divided: 2.0})) is None


def test_step_times_from_elsewhere_have_no_such_error():
    assert model_error(TimingConfig()) is None
    assert model_error(TimingConfig(timing="constant")) is None


def test_divided_step_times_have_no_known_error(tmp_path):
    flags = ("--model", LLAMA, "--gpu", "h100", "--tensor-parallel-size", "4", "--max-requests", "20")
    done = dynabench("simulate", *flags, "--speedup-ratio", "2", "--router-mode", "kv", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "Model error: not known, because the step times are divided; compare arms only." in done.stdout


def test_the_model_command_prints_the_same_line_for_a_gpu():
    done = dynabench("model", "meta-llama/Llama-3.1-8B", "--gpu", "h100")
    assert f"  model error    {quoted('meta-llama/Llama-3.1-8B')}" in " ".join(done.stdout.split("\n"))
    assert "model error" not in dynabench("model", "meta-llama/Llama-3.1-8B").stdout
