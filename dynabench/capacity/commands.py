"""How to deploy what a plan found: command lines of engines, and where its router mode exists."""

import shlex

from dynabench.deployment.description import Deployment, Pool

ELSEWHERE = {
    "random": "NVIDIA Dynamo --router-mode random, SGLang's router --policy random",
    "round-robin": "NVIDIA Dynamo --router-mode round-robin, SGLang's router --policy round_robin, vLLM production-stack "
    "--routing-logic roundrobin",
    "p2c": "SGLang's router --policy power_of_two",
    "kv": "NVIDIA Dynamo --router-mode kv",
    "dynamo-kv": "NVIDIA Dynamo --router-mode kv",
    "sgl-cache-aware": "SGLang's router --policy cache_aware",
    "aibrix-prefix": "AIBrix prefix-cache",
    "prodstack-loadaware": "vLLM production-stack --routing-logic prefixaware",
    "llmd-weighted": "llm-d's scheduler with prefix, KV and queue scorers",
}
"""What a mode is called in other routers; those that are not listed are dynabench's alone."""


def deploy_commands(deployment: Deployment, file: str) -> list[str]:
    """Return what starts a deployment: each pool's engines on vLLM, ours from a file, and the router's setting."""
    lines = [f"dynabench serve -f {shlex.quote(file)}  # the same as simulated workers, on this host"]
    lines += [f"{_vllm(pool)}  # {pool.replicas} of them{_role(pool)}" for pool in deployment.pools]
    for role in dict.fromkeys(pool.role for pool in deployment.pools):
        mode = deployment.mode_of(role)
        where = ELSEWHERE.get(mode.partition("+")[0], "dynabench only")
        lines.append(f"router{'' if role == 'aggregated' else f' of {role} workers'}: {mode} ({where})")
    return lines


def _role(pool: Pool) -> str:
    return "" if pool.role == "aggregated" else f", {pool.role}"


def _vllm(pool: Pool) -> str:
    """Return the command line of vLLM with a pool's settings."""
    engine, timing = pool.mocker, pool.timing
    words = ["vllm", "serve", timing.model or "MODEL", "--tensor-parallel-size", str(timing.tensor_parallel_size)]
    if engine.dp_size > 1:
        words += ["--data-parallel-size", str(engine.dp_size)]
    if timing.enable_expert_parallel:
        words += ["--enable-expert-parallel"]
    words += [
        "--max-num-batched-tokens",
        str(engine.max_num_batched_tokens),
        "--max-num-seqs",
        str(engine.max_num_seqs),
    ]
    words += ["--block-size", str(engine.block_size), "--gpu-memory-utilization", f"{timing.gpu_memory_utilization:g}"]
    if engine.max_model_len is not None:
        words += ["--max-model-len", str(engine.max_model_len)]
    if timing.quantization not in (None, "bfloat16"):
        words += ["--quantization", str(timing.quantization)]
    if timing.kv_cache_dtype != "bfloat16":
        words += ["--kv-cache-dtype", timing.kv_cache_dtype]
    if not engine.enable_prefix_caching:
        words += ["--no-enable-prefix-caching"]
    if pool.role != "aggregated":
        role = "kv_producer" if pool.role == "prefill" else "kv_consumer"
        words += ["--kv-transfer-config", f'{{"kv_connector":"NixlConnector","kv_role":"{role}"}}']
    return shlex.join(words)
