"""Decide which GPUs each of several engines on this host gets, and how much of their memory.

Engines expect to have their GPUs (without a GPU: the host) to themselves, and take nine tenths of the memory. Here each
gets the GPUs that the fewest others use, and engines that share a GPU, or the host, divide its memory:

    4 engines of 2 GPUs on GPUs 0 to 3:  0,1  2,3  0,1  2,3, each with 45% of the memory
"""

import dataclasses
import functools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from serving.worker.config import WorkerConfig
from serving.worker.make import make_engine
from serving.worker.registry import ENGINES, EngineChoice

VISIBLE = "CUDA_VISIBLE_DEVICES"
OF_A_GPU = 0.9
"""Share of a GPU's memory that the engines on it take together."""

OF_A_HOST = 0.5
"""Share of the free memory on a host without a GPU. They fill it at once, and other programs need some, too."""

GPU_COUNTS = (
    "tensor_parallel_size", "tp_size", "pipeline_parallel_size", "pp_size", "data_parallel_size", "dp_size",
)  # fmt: skip
"""Arguments of engines that multiply the GPUs they use."""


class GpuHost(NamedTuple):
    """The GPUs and the memory to divide."""

    gpus: Sequence[str]
    free_memory: float
    """Share of the host's memory that is free."""


class Allotment(NamedTuple):
    """What one engine gets: its settings with its share of the memory, and the environment that names its GPUs."""

    choice: EngineChoice
    environment: dict[str, str]
    gpus: tuple[str, ...]
    memory_fraction: float | None
    """Share of the memory of each of its GPUs, or of the host; None: the engine's default, or the user's choice."""


@functools.cache
def this_host() -> GpuHost:
    """Inspect this host, only once, so that all arms of an experiment get the same memory."""
    facts = dict(line.split(":") for line in _read(Path("/proc/meminfo")).splitlines())
    sizes = {name: int(facts[name].split()[0]) for name in ("MemTotal", "MemAvailable") if name in facts}
    free = sizes["MemAvailable"] / sizes["MemTotal"] if len(sizes) == 2 else 1.0
    return GpuHost(visible_gpus(os.environ, Path("/dev")), free)


def visible_gpus(environment: Mapping[str, str], devices: Path) -> tuple[str, ...]:
    """Return the NVIDIA GPUs that programs started here may use, as `CUDA_VISIBLE_DEVICES` names them."""
    if (named := environment.get(VISIBLE)) is not None:
        return tuple(name.strip() for name in named.split(",") if name.strip() not in ("", "-1"))
    count = sum(path.name.removeprefix("nvidia").isdigit() for path in devices.glob("nvidia*"))
    return tuple(map(str, range(count)))


def allot(wanted: Sequence[tuple[EngineChoice, WorkerConfig]], host: GpuHost) -> list[Allotment]:
    """Divide a host among engines.

    Raises:
        ValueError: an engine's settings do not fit it, or it needs more GPUs than there are.
    """
    counts = [num_gpus(choice, worker, len(host.gpus) // len(wanted)) for choice, worker in wanted]
    places = assign(counts, host.gpus)
    loads = {gpu: sum(gpu in place for place in places) for gpu in host.gpus}
    found = []
    for (choice, worker), gpus in zip(wanted, places, strict=True):
        if choice.run.base_gpu_id:  # the user chose the GPU
            found.append(Allotment(choice, {}, (), None))
            continue
        num_sharing = max((loads[gpu] for gpu in gpus), default=len(wanted))
        environment = {VISIBLE: ",".join(gpus)} if gpus else {}
        found.append(Allotment(choice, environment, gpus, None))
        is_alone = bool(gpus) and num_sharing == 1
        if is_alone or choice.run.memory_fraction is not None or not ENGINES[choice.name].memory_argument:
            continue
        fraction = _floor((OF_A_GPU if gpus else OF_A_HOST * host.free_memory) / num_sharing)
        given = choice._replace(run=dataclasses.replace(choice.run, memory_fraction=fraction))
        if _memory_fraction(given, worker) == fraction:  # the user's arguments do not override it
            found[-1] = Allotment(given, environment, gpus, fraction)
    return found


def assign(counts: Sequence[int], gpus: Sequence[str]) -> list[tuple[str, ...]]:
    """Give each engine as many GPUs as it needs, those that the fewest others use (without GPUs: none).

    Raises:
        ValueError: an engine needs more than there are.
    """
    if not gpus:
        return [()] * len(counts)
    loads = dict.fromkeys(gpus, 0)
    places = []
    for count in counts:
        if count > len(gpus):
            raise ValueError(f"an engine needs {count} GPUs, but only {len(gpus)} are visible here ({', '.join(gpus)})")
        chosen = sorted(gpus, key=lambda gpu: loads[gpu])[:count]
        for gpu in chosen:
            loads[gpu] += 1
        places.append(tuple(sorted(chosen, key=list(gpus).index)))
    return places


def describe_devices(allotments: Sequence[Allotment]) -> list[str]:
    """Return a line for each kind of engine that says how much of which memory it got."""
    lines = []
    groups: dict[tuple[str, float], list[Allotment]] = {}
    for each in allotments:
        if each.memory_fraction is not None:
            groups.setdefault((each.choice.name, each.memory_fraction), []).append(each)
    for (name, fraction), group in groups.items():
        gpus = sorted({gpu for each in group for gpu in each.gpus})
        who = f"{len(group)} {name} workers share" if len(group) > 1 else f"1 {name} worker uses"
        where = f"GPU {', '.join(gpus)}" if gpus else "this host"
        part = "each takes" if len(group) > 1 else "it takes"
        flag = ENGINES[name].memory_argument
        lines.append(f"{who} {where}: {part} {fraction:.0%} of the memory, unless you set {flag}")
    return lines


def num_gpus(choice: EngineChoice, worker: WorkerConfig, equal_part: int) -> int:
    """Return how many GPUs of this host an engine uses; engines that use all they see get an equal share."""
    arguments = _arguments(choice, worker)
    if not ENGINES[choice.name].memory_argument:
        return max(equal_part, 1)
    shares_ranks = arguments.get("enable_dp_attention")  # SGLang's: data-parallel ranks on the tensor-parallel GPUs
    names = [name for name in GPU_COUNTS if not (shares_ranks and name == "dp_size")]
    return max(math.prod(int(arguments.get(name) or 1) for name in names) // choice.run.num_nodes, 1)


def _memory_fraction(choice: EngineChoice, worker: WorkerConfig) -> Any:
    value: Any = _arguments(choice, worker)
    for name in ENGINES[choice.name].memory_argument.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _arguments(choice: EngineChoice, worker: WorkerConfig) -> dict[str, Any]:
    engine = make_engine(choice.name, worker, choice.run, choice.arguments)
    return {name: value for call in engine.calls for name, value in call.arguments.items()}


def _floor(fraction: float) -> float:
    """Round a fraction down to whole percent, at least one."""
    return max(math.floor(fraction * 100 + 1e-9), 1) / 100


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
