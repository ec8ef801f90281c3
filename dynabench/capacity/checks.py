"""What a plan refuses before anything is simulated: sizes that were not measured, and limits that cannot be judged."""

from collections.abc import Sequence

from dynabench.arm import Settings
from dynabench.capacity.candidates import has_one_size
from dynabench.capacity.settings import PlanConfig
from dynabench.experiment.axes import setting_of
from dynabench.experiment.limits import check_values, num_values
from dynabench.experiment.settings import ExperimentConfig
from dynabench.experiment.source import Source
from foundation.errors import UserError
from mocker.timing.catalog import find_gpu
from mocker.timing.config import TimingConfig
from reports.figures.conditions import Condition
from reports.figures.metrics import LEAST_SAMPLES
from workloads import Workload
from workloads.pacing import LoadConfig


def check_plan(config: PlanConfig, experiment: ExperimentConfig, settings: Settings, source: Source) -> None:
    """Refuse what no layout can have, and limits that nothing can be shown to meet.

    Raises:
        UserError: a size was not measured, or a limit cannot be judged.
        ValueError: a GPU is not known.
    """
    if not experiment.limits:
        raise UserError("a plan needs limits: use --slo, such as --slo 'ttft.p99 <= 2s', or --slo-preset")
    (pool,) = settings.deployment.pools
    if pool.timing.is_generic and not config.price:
        raise UserError(
            "a plan needs the step times of your engine: use --model and --gpu (`dynabench hardware` lists them), --price with "
            "several GPUs, or --timing-file"
        )
    _check_gpus(config, experiment, pool.timing)
    _check_sizes(config, pool.timing)
    workload = source(settings.shape)
    check_values(experiment.limits, workload, settings.load)
    _check_counts(experiment.limits, workload, settings.load)


def _check_gpus(config: PlanConfig, experiment: ExperimentConfig, timing: TimingConfig) -> None:
    """Refuse unknown GPUs, and sizes that no layout can have, before the workload is read."""
    if timing.timing_name != "roofline":
        return
    gpus = [find_gpu(name) for name in (config.prices or [timing.gpu]) if name is not None]
    if timing.gpu is not None and find_gpu(timing.gpu).name not in [gpu.name for gpu in gpus]:
        raise UserError(
            f"gpu {timing.gpu} has no price, and a plan chooses among GPUs that have one; add --price {timing.gpu}=..., or "
            "leave --gpu out"
        )
    varied = {setting_of(text) for text in experiment.vary}
    if not gpus or "gpu" in varied:
        return
    possible = {1}.union(*(gpu.all_reduce for gpu in gpus))
    if "tensor_parallel_size" not in varied and not possible.intersection(config.tensor_parallel_size):
        sizes, names = (
            " or ".join(map(str, part)) for part in (config.tensor_parallel_size, [gpu.name for gpu in gpus])
        )
        raise UserError(f"tensor_parallel_size {sizes} was not measured on {names}; expected one of {sorted(possible)}")


def _check_sizes(config: PlanConfig, timing: TimingConfig) -> None:
    """Refuse several sizes if there are step times for only one."""
    sizes = config.tensor_parallel_size
    if has_one_size(config, timing) and len(sizes) > 1 and sizes != PlanConfig().tensor_parallel_size:
        raise UserError(
            f"tensor_parallel_size {' and '.join(map(str, sizes))} are given; expected only the one used to measure "
            "the step times; "
            "run one plan for each"
        )


def _check_counts(limits: Sequence[Condition], workload: Workload, load: LoadConfig) -> None:
    """Refuse percentiles of too few values: no layout could be shown to meet them."""
    for limit in limits:
        statistic, count = limit.statistic or "", num_values(limit.metric, workload, load)
        least = LEAST_SAMPLES[int(statistic[1:])] if statistic.startswith("p") else 0
        if count < least:
            of = "gaps between tokens" if limit.metric == "itl" else "requests"
            more = " with more than one token" * (limit.metric in ("tpot", "ttst"))
            raise UserError(
                f"slo '{limit}' cannot be judged from {count:,} {of}{more}; a {statistic} needs {least:,}: use more of "
                "the workload, or limit a lower percentile"
            )
