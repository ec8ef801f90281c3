"""How to deploy a plan's answer: command lines of engines, and where its router mode exists."""

import shlex

from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.launch import DISK_FOLDER, engine_command, is_quantized_on_loading, stored_weights
from foundation.own_code import base_and_additions
from serving.router.elsewhere import name_elsewhere


def deploy_commands(deployment: Deployment, file: str) -> list[str]:
    """Return the commands that start a deployment: our own, those of each pool's engine, and the router settings."""
    lines = [f"dynabench serve -f {shlex.quote(file)}  # the same deployment with simulated workers, on this host"]
    for pool in deployment.pools:
        words, left_out = engine_command(pool)
        lines.append(f"{shlex.join(words)}  # {', '.join([_note(pool), *left_out])}")
    for role in dict.fromkeys(pool.role for pool in deployment.pools):
        if sum(pool.replicas * pool.dp_size for pool in deployment.pools if pool.role == role) == 1:
            continue  # nothing to choose from
        mode = deployment.mode_of(role)
        lines.append(
            f"router{'' if role == 'aggregated' else f' for {role} workers'}: {mode} ({_where(deployment, mode)})"
        )
    return lines


def _note(pool: Pool) -> str:
    """Say how many engines there are, and what no flag expresses."""
    timing, count = pool.timing, pool.gpus_per_worker
    parts = [f"start {pool.replicas}"] + [pool.role] * (pool.role != "aggregated")
    parts.append(f"{count} {timing.gpu or 'GPU'} each")
    if pool.mocker.kv_disk_size and timing.host_times == "vllm":
        parts.append(f"{DISK_FOLDER} on a disk with {pool.mocker.kv_disk_size:g} GiB free: vLLM does not limit it")
    if timing.quantization not in (None, stored_weights(timing)) and not is_quantized_on_loading(timing):
        parts.append(f"use a checkpoint with {timing.quantization} weights")
    return ", ".join(parts)


def _where(deployment: Deployment, mode: str) -> str:
    """Return a mode's name elsewhere, with the settings that it has there."""
    if found := name_elsewhere(mode, deployment.router):
        return found
    base, additions = base_and_additions(mode)
    found = name_elsewhere(base, deployment.router) if additions else None
    return f"dynabench only; without +{'+'.join(additions)} {found}" if found else "dynabench only"
