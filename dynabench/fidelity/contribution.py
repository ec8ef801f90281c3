"""What a comparison with real runs says to others: rows of measured and simulated means, for `validate --contribute`."""

from collections.abc import Mapping
from pathlib import Path

from dynabench.arm import Settings
from dynabench.deployment.description import Pool
from dynabench.experiment.model_error import load_of
from dynabench.experiment.own_points import PRECISIONS, SOURCE, SPLIT, Row, read_points
from foundation.errors import UserError
from mocker.models.catalog import bundled_id
from mocker.timing.catalog import find_gpu
from reports.fidelity import ArmFidelity, Runs

WHY = "a contribution says how far off --model and --gpu are; "


def check_contributable(settings: Settings, path: Path) -> None:
    """Refuse what rows could not say, and a file that cannot have them, before anything is measured.

    Raises:
        UserError: step times are not those of a bundled model and GPU, the engines have what no column names, or the file
            is not one of points.
    """
    if path.exists():
        read_points(path)
    elif not path.absolute().parent.is_dir():
        raise UserError(f"contribute {path}: there is no folder {path.parent}")
    (pool,) = settings.deployment.pools
    timing = pool.timing
    if timing.timing_name != "roofline" or timing.model is None:
        raise UserError(f"{WHY}give both, and no other step times")
    if timing.host_times != pool.engine_type:
        raise UserError(f"{WHY}leave out --timed-as, so that times are those of {pool.engine_type}")
    if timing.speedup_ratio != 1 or timing.decode_speedup_ratio != 1:
        raise UserError(f"{WHY}leave out --speedup-ratio and --decode-speedup-ratio")
    if bundled_id(timing.model) is None:
        raise UserError(f"{WHY}name a bundled model of the same shape (`dynabench hardware` lists them)")
    if timing.pipeline_parallel_size > 1 or (pool.engine_type == "vllm" and pool.mocker.num_speculative_tokens):
        raise UserError(f"{WHY}it has no columns for pipelines and speculation")


def contributed(settings: Settings, runs: Mapping[str, Runs], found: Mapping[str, ArmFidelity]) -> list[Row]:
    """Return a row for each router mode: means over its runs.

    Args:
        settings: the simulated deployment; `check_contributable` has passed it.
        runs: real and simulated runs, by router mode.
        found: how close they came.

    Raises:
        UserError: nothing was answered, no answer had two tokens, or a mean is 0.
    """
    (pool,) = settings.deployment.pools
    return [_engine(pool) | _load(pool, runs[mode]) | _figures(found[mode]) for mode in runs]


def _engine(pool: Pool) -> Row:
    timing = pool.timing
    assert timing.model is not None
    assert timing.gpu is not None
    model, gpu = bundled_id(timing.model), find_gpu(timing.gpu).name
    assert model is not None
    size, ranks = timing.tensor_parallel_size, pool.dp_size
    experts = size * ranks if timing.enable_expert_parallel else 1
    return {
        "silicon_data_source": SOURCE,
        "measured": "",
        "backend": pool.engine_type,
        "backend_version": (pool.mocker.engine_version or "") if pool.engine_type == "vllm" else "",
        "model_path": model,
        "system": gpu,
        "gpu": gpu,
        "precision": PRECISIONS.get(timing.shape.weights, timing.shape.weights),
        "drafts": "False",
        "moe_backend": timing.moe_backend,
        "tp_size": str(size),
        "attention_dp_size": str(ranks),
        "moe_tp_size": str(1 if timing.enable_expert_parallel else size),
        "moe_ep_size": str(experts),
        "split": SPLIT,
        "problem": "",
    }


def _load(pool: Pool, runs: Runs) -> Row:
    """Return what each engine did, on average over the real runs."""
    loads = [load for run in runs.real if (load := load_of(run.measured, pool.replicas)) is not None]
    if not loads:
        raise UserError("nothing was answered, so there is nothing to contribute")
    concurrency, isl, osl = (max(1, round(sum(column) / len(loads))) for column in zip(*loads, strict=True))
    count = str(concurrency)
    return {"isl": str(isl), "osl": str(osl), "concurrency": count, "batch_size": count}


def _figures(found: ArmFidelity) -> Row:
    rows = {row.name: row for row in found.deviations}
    if not {"ttft.mean", "tpot.mean"} <= set(rows):
        raise UserError("answers of one token have no TPOT, so there is nothing to contribute")
    figures: Row = {}
    for metric in ("ttft", "tpot"):
        row = rows[f"{metric}.mean"]
        means = {f"silicon_{metric}_ms": f"{row.real * 1e3:.4f}", metric: f"{row.simulated * 1e3:.4f}"}
        if not all(map(float, means.values())):
            raise UserError(f"a mean {metric.upper()} is 0, so there is nothing to contribute")
        figures |= means
    return figures
