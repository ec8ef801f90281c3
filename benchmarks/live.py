"""How many tokens a second does the live stack carry? Closed loop, everything on this machine.

    python benchmarks/live.py [--clients 1 64 256] [--workers 4] [--tokens 64] [--seconds 8]

Engines run at speedup 1000, as in the figures of NVIDIA Dynamo this is compared with, so that the stack is the limit.
"""

import argparse
import asyncio
import time

import aiohttp
import msgspec
import numpy as np
import uvloop

from dynabench.launch import LocalStack
from mocker import EngineConfig
from serving.frontend.config import FrontendConfig
from serving.router import RouterConfig
from serving.runtime.config import RuntimeConfig
from serving.serve_engines import WorkerConfig


async def client(
    session: aiohttp.ClientSession, url: str, number: int, tokens: int, until: float, ttfts: list[float]
) -> int:
    """Ask one thing after the other; return the tokens received."""
    received, turn = 0, 0
    while time.perf_counter() < until:
        turn += 1
        prompt = np.random.default_rng(number * 1_000_003 + turn).integers(1000, 30000, 64).tolist()
        body = msgspec.json.encode({"model": "mock", "prompt": prompt, "max_tokens": tokens, "stream": True})
        started, first = time.perf_counter(), 0.0
        async with session.post(f"{url}/v1/completions", data=body) as response:
            async for data in response.content.iter_any():
                first = first or time.perf_counter()
                received += data.count(b'"finish_reason":null')
        ttfts.append(first - started)
    return received


async def measure(clients: int, workers: int, tokens: int, seconds: float, runtime: RuntimeConfig | None) -> None:
    """Run one number of clients against a fresh stack and print a line."""
    stack = LocalStack(
        frontend=FrontendConfig(http_port=0, router_mode="kv"),
        router=RouterConfig(),
        worker=WorkerConfig(),
        engine=EngineConfig(speedup_ratio=1000.0),
        num_workers=workers,
        runtime=runtime,
    )
    async with stack, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        ttfts: list[float] = []
        await client(session, stack.url, 10**6, tokens, time.perf_counter() + 0.5, [])
        started = time.perf_counter()
        work = [client(session, stack.url, number, tokens, started + seconds, ttfts) for number in range(clients)]
        received = sum(await asyncio.gather(*work))
        took = time.perf_counter() - started
    p50, p99 = np.percentile(ttfts, [50, 99]) * 1000
    print(
        f"{clients:4} clients: {received / took:9,.0f} tokens/s  {len(ttfts) / took:7,.0f} requests/s  "
        f"TTFT p50 {p50:.1f} ms  p99 {p99:.1f} ms",
        flush=True,
    )


def main() -> None:
    """Measure each number of clients."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--etcd", default="")
    parser.add_argument("--nats", default="")
    options = parser.parse_args()
    runtime = RuntimeConfig(etcd_endpoints=options.etcd, nats_server=options.nats) if options.etcd else None
    for clients in options.clients:
        uvloop.run(measure(clients, options.workers, options.tokens, options.seconds, runtime))


if __name__ == "__main__":
    main()
