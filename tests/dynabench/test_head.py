"""What the head of a report says of several arms."""

from dynabench.deployment.description import Deployment, Pool
from dynabench.experiment.head import BETWEEN_ENGINES, model_errors
from dynabench.experiment.model_error import model_error
from mocker.timing.config import TimingConfig

LLAMA = "meta-llama/Llama-3.1-8B"


def of(gpu="h100", engine_type="vllm", **settings):
    return Deployment(pools=(Pool(engine_type=engine_type, timing=TimingConfig(model=LLAMA, gpu=gpu, **settings)),))


def test_the_error_of_one_case_is_said_once():
    assert model_errors([of(), of()]) == model_error(TimingConfig(model=LLAMA, gpu="h100")).text


def test_errors_of_several_cases_are_one_range_over_all_arms():
    gpus = ("h100", "l40s", "a100", "h200")
    known = [model_error(TimingConfig(model=LLAMA, gpu=gpu)).tpot.interval for gpu in gpus]
    said = model_errors([of(gpu) for gpu in gpus])
    span = f"{min(low for low, _ in known):.2f} to {max(high for _, high in known):.2f}"
    assert said.startswith(f"in 9 of 10 cases, the real mean TPOT is {span} times the simulated, the real mean TTFT ")
    assert said.count("in 9 of 10 cases") == said.count("the nearest measured case") == 1
    assert " or " not in said


def test_arms_whose_error_is_unknown_are_kept_apart():
    said = model_errors([of(), of(speedup_ratio=2.0), of(speedup_ratio=4.0)])
    assert said == f"{model_errors([of()])}; in other arms: {model_errors([of(speedup_ratio=2.0)])}"
    assert model_errors([of(speedup_ratio=2.0)]).startswith("not known, because the step times are divided")


def test_errors_of_engines_are_named_by_engine():
    said = model_errors([of(), of(engine_type="sglang")])
    assert said == f"vllm: {model_errors([of()])}; sglang: {model_errors([of(engine_type='sglang')])}{BETWEEN_ENGINES}"
