"""Compare the simulator with real vLLM on this machine's CPU: calibrate, then validate on other workloads.

    DYNABENCH_ENGINE's environment/bin/python benchmarks/fidelity_cpu.py FOLDER [--repeats 3] [--only NAME ...]

This needs vLLM (`.ci/engines vllm` makes an environment with its CPU build). The calibrations and a report for each
workload are saved in FOLDER, and existing ones are not measured again.
"""

import argparse
import importlib.util
import json
import os
from pathlib import Path

from dynabench.arm import ClientConfig, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.flags import (
    LivePoolConfig,
    MeasuredFrontendConfig,
    MeasuredRouterConfig,
    running_pools,
    simulated_pools,
)
from dynabench.experiment.settings import ExperimentConfig
from dynabench.fidelity.calibrate import run_calibration
from dynabench.fidelity.settings import CalibrateConfig, ValidateConfig
from dynabench.fidelity.validate import run_validation
from dynabench.terminal import Terminal
from foundation.files import new_file
from mocker.timing.config import TimingConfig
from reports.tables.fidelity import distances, fidelity_grid
from workloads import Workload
from workloads.formats import mooncake
from workloads.synthesize import SynthConfig, synthesize

BLOCK = 32
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "load_format": "dummy",
    "gpu_memory_utilization": 0.2,
    "max_num_seqs": 16,
    "block_size": BLOCK,
    "max_model_len": 2048,
    "max_num_batched_tokens": 512,
}
MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
BLOCKS = {"pressure": 66}
COMMON = {"block_size": BLOCK, "prefix_blocks": 0, "seed": 7}
WORKLOADS = {
    "chat": SynthConfig(requests=48, rate=1.6, isl=120, osl=40, max_isl=600, **COMMON),
    "bursts": SynthConfig(
        requests=48, rate=1.4, arrival="gamma", burstiness=0.25, isl=100, osl=40, max_isl=600, **COMMON
    ),
    "chunks": SynthConfig(requests=24, rate=0.45, isl=900, osl=24, spread=0.3, max_isl=1900, **COMMON),
    "sharing": SynthConfig(
        requests=48, rate=1.6, isl=60, osl=30, prefix_groups=3, max_isl=900, **(COMMON | {"prefix_blocks": 14})
    ),
    "pressure": SynthConfig(requests=60, rate=4.0, isl=120, osl=100, max_isl=500, **COMMON),
}
TWO_WORKERS = {
    "two workers": SynthConfig(
        requests=64, rate=2.2, isl=50, osl=30, prefix_groups=6, max_isl=900, **(COMMON | {"prefix_blocks": 14})
    ),
    "two workers, turns": SynthConfig(
        requests=64,
        rate=0.8,
        isl=110,
        osl=30,
        turns=5,
        think_time_s=4.0,
        prefix_groups=4,
        max_isl=1500,
        **(COMMON | {"prefix_blocks": 4}),
    ),
}


def make_model(folder: Path) -> Path:
    """Make the folder of a model that is a few sizes larger than the tiny one, with random weights."""
    path = folder / "model"
    if not path.exists():
        source = Path(__file__).parents[1] / "examples" / "tiny_model.py"
        specification = importlib.util.spec_from_file_location("tiny_model", source)
        assert specification is not None
        assert specification.loader is not None
        tiny = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(tiny)
        tiny.make(path)
        (path / "model.safetensors").unlink()
        config = json.loads((path / "config.json").read_text()) | MODEL
        (path / "config.json").write_text(json.dumps(config))
    return path


def arguments_file(folder: Path, blocks: int) -> Path:
    """Write vLLM's arguments."""
    path = folder / f"engine-{blocks}.json"
    path.write_text(json.dumps(ENGINE | {"num_gpu_blocks_override": blocks}))
    return path


def main() -> None:
    """Calibrate for one and for two engines, validate on every workload, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--duration", type=float, default=150.0, help="seconds for each calibration")
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one core per engine, as for two workers
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    folder, console = options.folder, Terminal(width=100)
    folder.mkdir(parents=True, exist_ok=True)
    model = str(make_model(folder))
    for workers in (1, 2):
        out = folder / f"calibration-{workers}.json"
        if not out.exists():
            config = CalibrateConfig(
                out=out,
                workers=workers,
                duration_s=options.duration,
                extra_engine_args=arguments_file(folder, 1500),
                steps=folder / f"steps-{workers}",
            )
            run_calibration(model, config, console)
    for name, config in (WORKLOADS | TWO_WORKERS).items():
        results = folder / name.replace(", ", "-").replace(" ", "-")
        if results.exists() or (options.only and name not in options.only):
            continue
        workers, modes = (2, ("round-robin", "kv")) if name in TWO_WORKERS else (1, ("round-robin",))
        blocks = BLOCKS.get(name, 1500)
        path = folder / f"{results.name}.jsonl"
        path.unlink(missing_ok=True)
        workload = Workload(name, config.block_size, synthesize(config))
        with new_file(path) as file:
            mooncake.write(workload, file)
        timing = TimingConfig(model=model, timing_file=str(folder / f"calibration-{workers}.json"))
        experiment = ExperimentConfig(router_mode=modes, repeats=options.repeats, out=results, trace_block_size=BLOCK)
        flags = LivePoolConfig(workers=workers, engine="vllm", extra_engine_args=arguments_file(folder, blocks))
        router, frontend = MeasuredRouterConfig(), MeasuredFrontendConfig()
        real = Deployment(pools=running_pools(flags, model), router=router, frontend=frontend)
        simulated = Deployment(pools=simulated_pools(flags, Pool(timing=timing)), router=router)
        settings = Settings(simulated, client=ClientConfig())
        found = run_validation((path,), ValidateConfig(), experiment, settings, console, real=real)
        for arm, part in found.fidelity.arms.items():
            console.print(name, *fidelity_grid(arm, part).tables(console.width), distances(part))
        console.print(found.fidelity.best)


if __name__ == "__main__":
    main()
