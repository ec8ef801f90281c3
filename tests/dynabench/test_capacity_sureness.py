"""How sure a plan's answer is: what is said of the sample and of the model, from a simulation."""

from dynabench.capacity.sureness import sureness_of
from dynabench.deployment.description import Deployment, Pool
from dynabench.experiment.run import source_of
from dynabench.experiment.settings import ExperimentConfig
from dynabench.plan import Arm, Settings
from mocker.timing.config import TimingConfig
from reports.capacity import doubt
from reports.conditions import read
from workloads.shape import ShapeConfig

SETTINGS = Settings(
    Deployment(pools=(Pool(timing=TimingConfig(model="Qwen/Qwen3-8B", gpu="h100")),)),
    ShapeConfig(max_requests=100),
)


def test_the_error_of_means_is_not_taken_for_one_of_percentiles_and_itl_has_no_interval():
    limits = [read(text) for text in ("itl.p99 <= 60ms", "tpot.mean <= 20ms", "ttft.max <= 9s")]
    arm = Arm("a", SETTINGS, {"router_mode": "round-robin"})
    of_itl, of_mean, of_max = (sure.text for sure in sureness_of(arm, source_of((), ExperimentConfig()), 0, limits))
    off = "mean TPOT was 2.6% off for meta-llama/Llama-3.1-70B fp8 on vllm and h100"
    assert f"{off}, and how far a p99 is off is not known" in of_itl
    assert of_itl.endswith("; it has no interval: gaps between tokens are not kept by request.")
    assert f"{off}; the sample's 95% interval, " in of_mean
    assert of_max.endswith("; it has no interval: a maximum is of one request.")


def test_a_limit_within_the_interval_is_met_without_certainty():
    arm = Arm("a", SETTINGS, {"router_mode": "round-robin"})

    def sure(limit):
        [found] = sureness_of(arm, source_of((), ExperimentConfig()), 0, [read(limit)])
        return found

    first = sure("tpot.mean <= 1s")
    assert (first.is_open, doubt([first])) == (False, "")
    within = sure(f"tpot.mean <= {(first.value + first.high) * 500}ms")
    assert within.is_open
    assert "not certain: the 95% interval of such samples holds the limit of tpot.mean" in doubt([first, within])
