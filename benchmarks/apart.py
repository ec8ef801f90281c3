"""Measure the cost of separate prefill and decode workers, with the whole stack on this machine.

    python benchmarks/apart.py throughput [--clients 64 256] [--seconds 8]
    python benchmarks/apart.py ttft [--paths shm tcp] [--tokens 1024 8192 65536] [--requests 9]

`throughput` measures tokens per second of 1+1 and 2+2 mockers, compared with 4 aggregated ones, at speedup 1000, so
that the stack is the limit; transfers take no time. `ttft` measures what the hand-over adds to the TTFT of a single
request beyond the modelled transfer of Llama-3.1-8B's KV (131,072 bytes per token): the median, minus that of an
aggregated worker with the same step times, minus the transfer.
"""

import argparse
import statistics
import time
from typing import Any

import aiohttp
import live
import msgspec
import numpy as np
import uvloop

from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.flags import MeasuredRouterConfig
from dynabench.live.stack import LocalStack
from mocker import EngineConfig
from mocker.network.config import TransferConfig
from mocker.timing.config import TimingConfig
from serving.frontend.config import FrontendConfig
from serving.model.card import Role
from serving.transfer.config import TransferRunConfig
from serving.worker.config import WorkerConfig

BYTES_PER_TOKEN = 131_072
TOKENS = live.tokens_of(31_000)
FREE = TransferConfig(bandwidth_gb_s=0, latency_ms=0)


def deployed(
    counts: dict[Role, int], settings: dict[str, Any], way: TransferRunConfig, links: TransferConfig
) -> Deployment:
    """Return a deployment with these numbers of workers of each role."""
    pools = tuple(Pool(name=role, role=role, replicas=count, **settings) for role, count in counts.items())
    return Deployment(
        pools=pools,
        router_mode="kv",
        router=MeasuredRouterConfig(),
        frontend=FrontendConfig(http_port=0),
        kv_transfer=way,
        transfer=links,
    )


async def throughput(options: argparse.Namespace) -> None:
    """Measure tokens per second of several deployments."""
    prompt = live.prompts(argparse.Namespace(text=False, vocab_size=31_000, prompt_tokens=64))
    settings = {"timing": TimingConfig(speedup_ratio=1000.0), "worker": WorkerConfig(context_length=100_000)}
    sizes: dict[str, dict[Role, int]] = {
        "4 aggregated": {"aggregated": 4},
        "1+1": {"prefill": 1, "decode": 1},
        "2+2": {"prefill": 2, "decode": 2},
    }
    for name, counts in sizes.items():
        for clients in options.clients:
            print(f"{name:12}", end=" ", flush=True)
            async with LocalStack(deployed(counts, settings, TransferRunConfig(), FREE)) as stack:
                await live.measure(stack.url, stack.model, clients, 64, options.seconds, prompt)


async def ttft(options: argparse.Namespace) -> None:
    """Measure what a hand-over adds to a prompt of each length on each path."""
    links = TransferConfig()
    for tokens in options.tokens:
        transfer_s = links.latency_s + tokens * BYTES_PER_TOKEN / links.gpu_bandwidth
        base = await median_ttft(tokens, {"aggregated": 1}, TransferRunConfig(), options.requests)
        for path in options.paths:
            way = TransferRunConfig(transfer=path)
            found = await median_ttft(tokens, {"prefill": 1, "decode": 1}, way, options.requests)
            print(
                f"{tokens:6} tokens {path:5} TTFT {found * 1000:8.1f} ms, aggregated {base * 1000:6.1f} ms, transfer "
                f"{transfer_s * 1000:6.1f} ms: {(found - base - transfer_s) * 1000:+8.1f} ms",
                flush=True,
            )


async def median_ttft(tokens: int, counts: dict[Role, int], way: TransferRunConfig, count: int) -> float:
    """Return the median TTFT (s) of single requests with uncached prompts, without the first one."""
    settings = {
        "mocker": EngineConfig(num_gpu_blocks=1 << 14, max_num_batched_tokens=1 << 17),
        "timing": TimingConfig(timing="constant", constant_prefill_ms=1.0, constant_decode_ms=1.0),
        "worker": WorkerConfig(context_length=200_000),
    }
    rng, found = np.random.default_rng(tokens), []
    async with (
        LocalStack(deployed(counts, settings, way, TransferConfig())) as stack,
        aiohttp.ClientSession(headers=live.HEADERS) as session,
    ):
        for _ in range(count + 1):
            prompt = rng.integers(TOKENS.start, TOKENS.stop, tokens).tolist()
            body = {"model": stack.model, "prompt": prompt, "max_tokens": 2, "stream": True, "ignore_eos": True}
            data = msgspec.json.encode(body)
            started = time.perf_counter()
            async with session.post(f"{stack.url}/v1/completions", data=data) as response:
                response.raise_for_status()
                await response.content.readany()
                found.append(time.perf_counter() - started)
                await response.read()
    return statistics.median(found[1:])


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["throughput", "ttft"])
    parser.add_argument("--clients", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--paths", nargs="+", default=["shm", "tcp"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 65536])
    parser.add_argument("--requests", type=int, default=9)
    options = parser.parse_args()
    uvloop.run(throughput(options) if options.what == "throughput" else ttft(options))


if __name__ == "__main__":
    main()
