"""Measure how many tokens per second the live stack carries in a closed loop, with everything on this machine.

    python benchmarks/live.py [--clients 1 64 256] [--workers 4] [--tokens 64] [--seconds 8]
    python benchmarks/live.py --text --prompt-tokens 16000 --model-path FOLDER     # of benchmarks/text_model.py

Engines run at speedup 1000, as in the NVIDIA Dynamo figures used for comparison, so that the stack is the limit.
"""

import argparse
import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import uvloop

from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.flags import MeasuredRouterConfig
from dynabench.live.stack import LocalStack
from mocker.timing.config import TimingConfig
from serving.engines.processes import descendants
from serving.frontend.config import FrontendConfig
from serving.runtime.config import RuntimeConfig
from serving.worker.config import ModelRunConfig, WorkerConfig
from workloads.tokens import tokens_of

HEADERS = {"content-type": "application/json"}
Prompts = Callable[[int, int], list[int] | str]
"""Makes the prompt of a client's turn; no two are alike."""


def prompts(options: argparse.Namespace) -> Prompts:
    """Return the function that makes the prompts."""
    if options.text:
        import text_model

        texts = text_model.prompts(Path(options.model_path), options.prompt_tokens, 64)
        return lambda number, turn: f"{number} {turn} {texts[(31 * number + turn) % len(texts)]}"
    among = tokens_of(options.vocab_size)

    def tokens(number: int, turn: int) -> list[int]:
        rng = np.random.default_rng(number * 1_000_003 + turn)
        drawn: list[int] = rng.integers(among.start, among.stop, options.prompt_tokens).tolist()
        return drawn

    return tokens


async def client(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    number: int,
    tokens: int,
    until: float,
    ttfts: list[float],
    prompt: Prompts,
) -> int:
    """Send one request after the other; return the number of tokens received."""
    received, turn = 0, 0
    while time.perf_counter() < until:
        turn += 1
        body = msgspec.json.encode(
            {"model": model, "prompt": prompt(number, turn), "max_tokens": tokens, "stream": True, "ignore_eos": True}
        )
        started, first = time.perf_counter(), 0.0
        async with session.post(f"{url}/v1/completions", data=body) as response:
            if response.status != 200:
                raise SystemExit(f"HTTP {response.status}: {(await response.text())[:300]}")
            async for data in response.content.iter_any():
                first = first or time.perf_counter()
                received += data.count(
                    b"data: {"
                )  # an event per token, and one for the finish reason if that comes separately
        ttfts.append(first - started)
    return received


async def measure(url: str, model: str, clients: int, tokens: int, seconds: float, prompt: Prompts) -> int:
    """Run a number of clients and print a line; return the number of requests."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=HEADERS) as session:
        ttfts: list[float] = []
        await client(session, url, model, 10**6, tokens, time.perf_counter() + 0.5, [], prompt)
        started = time.perf_counter()
        work = [
            client(session, url, model, number, tokens, started + seconds, ttfts, prompt) for number in range(clients)
        ]
        received = sum(await asyncio.gather(*work))
        took = time.perf_counter() - started
    p50, p99 = np.percentile(ttfts, [50, 99]) * 1000
    print(
        f"{clients:4} clients: {received / took:9,.0f} tokens/s  {len(ttfts) / took:7,.0f} requests/s  "
        f"TTFT p50 {p50:.1f} ms  p99 {p99:.1f} ms",
        flush=True,
    )
    return len(ttfts)


def cpu_s(stack: LocalStack) -> dict[str, float]:
    """Return the CPU seconds of each process of a stack, with its descendants, and of this process."""
    used = {"client": time.process_time()}
    for name, pid in stack.group.processes.items():
        used[name] = 0.0
        for each in (pid, *descendants(pid)):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            used[name] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used


async def run(options: argparse.Namespace) -> None:
    """Measure each number of clients, with our own stack or the server at a URL."""
    prompt = prompts(options)
    pool = Pool(
        replicas=options.workers,
        engine=options.engine or "mocker",
        timing=TimingConfig(speedup_ratio=1000.0),
        run=ModelRunConfig(extra_engine_args=options.extra_engine_args),
        worker=WorkerConfig(
            model_path=options.model_path,
            model_name=options.model,
            context_length=None if options.engine else 100_000,
        ),
    )
    deployment = Deployment(
        pools=(pool,),
        router_mode="kv",
        router=MeasuredRouterConfig(),
        frontend=FrontendConfig(http_port=0, http_workers=options.http_workers),
        runtime=RuntimeConfig(etcd_endpoints=options.etcd, nats_server=options.nats) if options.etcd else None,
    )
    for clients in options.clients:
        if options.url:
            await measure(options.url, options.model, clients, options.tokens, options.seconds, prompt)
            continue
        stack = LocalStack(deployment)
        async with stack:
            before = cpu_s(stack)
            count = await measure(stack.url, stack.model, clients, options.tokens, options.seconds, prompt)
            spent = {name: used - before[name] for name, used in cpu_s(stack).items()}
            total = sum(spent.values())
            frontends = sum(used for name, used in spent.items() if name.startswith("frontend"))
            shares = "  ".join(f"{name} {used / total:.0%}" for name, used in spent.items())
            print(
                f"              CPU a request: {total / count * 1e6:,.0f} us, of it {shares}; "
                f"frontend {frontends / count * 1e6:,.0f} us"
            )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--text", action="store_true", help="send the prompts as text (needs --model-path)")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--http-workers", type=int, default=1, help="frontend processes")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--etcd", default="", help="run our stack over these etcd servers, with --nats")
    parser.add_argument("--nats", default="")
    parser.add_argument("--url", default="", help="measure this server instead, with the same client")
    parser.add_argument("--model", default="mock")
    parser.add_argument("--model-path", default="", help="folder with a tokenizer (none: tokens are bytes)")
    parser.add_argument("--engine", default="", help="run this engine with --model-path instead of the mocker")
    parser.add_argument("--extra-engine-args", type=Path)
    parser.add_argument("--vocab-size", type=int, default=31_000, help="prompts are made of the model's tokens")
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
