"""The error of simulated times: what measured points that are most like a case say, and that their intervals hold."""

import csv
import math
from importlib.resources import files

import numpy as np
import pytest

from dynabench.experiment.model_error import (
    FAR,
    Case,
    Load,
    Points,
    Ratios,
    case_of,
    kind_of,
    model_error,
    published_points,
)
from mocker.models.catalog import find_model
from mocker.timing.config import TimingConfig
from tests.support.commands import dynabench

LLAMA = "meta-llama/Llama-3.1-70B"


def quoted(model, gpu="h100", *, load=None, **settings):
    return model_error(TimingConfig(model=model, gpu=gpu, **settings), load)


def test_nine_of_ten_points_lie_within_the_intervals_of_other_cases():
    points = published_points()
    keys = [case.key for case in points.cases]
    within = {"ttft": [], "tpot": []}
    for place in range(0, len(keys), 3):
        case, others = points.cases[place], np.array([key != keys[place] for key in keys])
        error = points.error_of(case, find_model(case.model), others)
        for metric, found in within.items():
            low, high = error.of(metric)[0].interval
            found.append(low <= math.exp(points.logs[metric][place]) <= high)
    assert all(0.82 <= np.mean(found) <= 0.96 for found in within.values()), within


def test_a_measured_case_is_its_own_nearest():
    found = quoted(LLAMA, quantization="fp8", tensor_parallel_size=4)
    assert (found.nearest, found.distance) == (Case("vllm", LLAMA, "h100", "fp8", 4), 0.0)
    assert str(found) == f"{found.points} published points of {LLAMA} fp8 on vllm and h100"
    assert found.tpot.mean_error < 0.06


@pytest.mark.parametrize(
    ("model", "gpu", "settings", "differs"),
    [
        (LLAMA, "h100", {}, "here, weights are bfloat16"),
        ("Qwen/Qwen2.5-72B", "h100", {}, "here, the model has 72.7 B parameters, not 70.6 B and weights are bfloat16"),
        (LLAMA, "h100", {"timed_as": "sglang", "quantization": "fp8"}, "here, the engine is sglang"),
        (LLAMA, "l40s", {"quantization": "fp8"}, "here, the GPU is l40s"),
    ],
)
def test_what_differs_from_the_nearest_case_is_said(model, gpu, settings, differs):
    found = quoted(model, gpu, tensor_parallel_size=8, **settings)
    assert found.differs == differs
    assert f"published points of {found.nearest} ({differs})" in found.text


def judged(kernels, **settings):
    """Return what points say of gpt-oss if those on Hopper ran with such kernels."""
    text = files("dynabench.experiment").joinpath("published_points.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    for row in rows:
        is_it = row["backend"] == "vllm" and "gpt-oss" in row["model_path"] and row["gpu"] in ("h100", "h200")
        row |= {"moe_backend": kernels if is_it else "auto"}
    timing = TimingConfig(model="openai/gpt-oss-120b", gpu="h200", **settings)
    return Points(rows).error_of(case_of(timing), timing.shape)


def test_runs_with_other_kernels_are_less_like_a_case_and_that_is_said():
    own, asked = judged("marlin"), judged("marlin", moe_backend="marlin")
    said = "published points of openai/gpt-oss-120b fp4 on vllm and h200 with moe_backend marlin"
    assert str(own) == f"the nearest measured case, {own.points} {said} (here, moe_backend is auto)"
    assert str(asked) == f"{asked.points} {said}"
    assert own.distance == asked.distance + 0.5
    assert own.tpot.spread > asked.tpot.spread
    assert judged("auto").distance == asked.distance


def test_kernels_that_vllm_chooses_itself_are_the_same_case_if_they_are_named():
    kimi = {"model": "moonshotai/Kimi-K2.5", "gpu": "h200", "tensor_parallel_size": 8}
    usual, named = (case_of(TimingConfig(**kimi, moe_backend=name)) for name in ("auto", "marlin"))
    assert usual == named


def test_what_is_far_away_is_only_a_hint_and_less_certain():
    near, far = quoted(LLAMA, quantization="fp8", tensor_parallel_size=8), quoted("Qwen/Qwen3-0.6B", "l40s")
    assert near.distance < FAR < far.distance
    assert (" only a hint" in near.text, " only a hint" in far.text) == (False, True)
    widths = [high / low for low, high in (near.tpot.interval, far.tpot.interval)]
    assert widths[0] * 1.5 < widths[1]


def test_a_load_like_that_of_measurements_is_nearer():
    points = published_points()
    case = next(one for one in points.cases if one[:4] == ("vllm", LLAMA, "h100", "fp8"))
    settings = {"quantization": "fp8", "tensor_parallel_size": case.num_gpus}
    assert quoted(LLAMA, load=case.load, **settings).distance == 0
    assert quoted(LLAMA, load=Load(case.load.concurrency, case.load.isl / 9, case.load.osl), **settings).distance > 0


def test_chances_are_those_of_the_points():
    ratios = Ratios(np.log([0.9, 1.0, 1.2, 2.0]), np.array([0.1, 0.4, 0.4, 0.1]), 0.001)
    assert [round(ratios.below(limit), 3) for limit in (0.8, 0.95, 1.1, 1.5, 3.0)] == [0.0, 0.1, 0.5, 0.9, 1.0]
    assert ratios.blurred(0.5).below(1.0) == pytest.approx(0.5, abs=0.15)
    low, high = ratios.interval
    assert low == pytest.approx(0.9, rel=0.01)
    assert high == pytest.approx(2.0, rel=0.01)
    assert ratios.mean_error == pytest.approx(0.1 / 9 + 0.4 / 6 + 0.05)


def test_kinds_of_models_are_told_apart():
    names = (LLAMA, "deepseek-ai/DeepSeek-R1", "openai/gpt-oss-120b", "Qwen/Qwen3.5-397B-A17B")
    assert [kind_of(find_model(name)) for name in names] == [
        "dense",
        "latent mixture",
        "windowed mixture",
        "hybrid mixture",
    ]


@pytest.mark.parametrize("divided", ["speedup_ratio", "decode_speedup_ratio"])
def test_divided_step_times_are_not_judged_by_measurements(divided):
    assert model_error(TimingConfig(model=LLAMA, gpu="h100", **{divided: 2.0})) is None


def test_step_times_from_elsewhere_have_no_such_error():
    assert model_error(TimingConfig()) is None
    assert model_error(TimingConfig(timing="constant")) is None


def test_divided_step_times_have_no_known_error(tmp_path):
    flags = ("--model", LLAMA, "--gpu", "h100", "--tensor-parallel-size", "4", "--max-requests", "20")
    done = dynabench("simulate", *flags, "--speedup-ratio", "2", cwd=tmp_path).stdout
    assert "Model error: not known, because the step times are divided; compare arms only." in done.replace("\n", " ")


def test_the_command_that_describes_a_model_says_it_where_there_is_a_gpu():
    done = dynabench("model", "meta-llama/Llama-3.1-8B", "--gpu", "h100")
    assert f"model error    {quoted('meta-llama/Llama-3.1-8B').text}" in " ".join(done.stdout.split()).replace(
        "model error ", "model error    "
    )
    assert "model error" not in dynabench("model", "meta-llama/Llama-3.1-8B").stdout
