"""What a plan says of the layouts that it does not search."""

from dynabench.capacity.settings import PlanConfig
from dynabench.capacity.unsearched import unsearched
from dynabench.experiment.settings import ExperimentConfig
from mocker.timing.config import TimingConfig

TIMING = TimingConfig(model="Qwen/Qwen3-8B", gpu="h100")


def test_what_was_not_searched_is_said_with_the_flag_that_makes_it():
    assert unsearched(PlanConfig(), ExperimentConfig(), TIMING) == (
        "Not searched: split prefill and decode (--vary prefill_workers=1..3); engines other than vllm "
        "(--vary engine_type=vllm,sglang,trtllm); GPUs other than h100 (--price)."
    )
    fixed = PlanConfig(tensor_parallel_size=(4,), max_num_batched_tokens=(2048,))
    said = unsearched(fixed, ExperimentConfig(), TIMING)
    assert "; tensor parallel sizes other than 4; chunks other than 2,048 tokens;" in said


def test_what_was_searched_is_not_said():
    varied = ExperimentConfig(vary=("prefill_workers=1..3", "timed_as=vllm,sglang"))
    assert unsearched(PlanConfig(price=("h100=2", "h200=3")), varied, TIMING) == ""
    assert "engines" not in unsearched(PlanConfig(), ExperimentConfig(), TimingConfig(timing="constant"))
