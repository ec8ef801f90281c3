"""Measure a live router in front of hundreds of mocker workers on this machine: discovery, KV events, decisions, snapshots.

    python benchmarks/many_ranks.py [--ranks 64 256] [--processes 4] [--streams 64] [--seconds 10]

The workers are data-parallel ranks, many in each process. This process is the router: it follows their events, routes the
prompts of its streams (half a system prompt that others share, half their own), and sends them. Then a second router joins
and fetches the snapshots of all ranks at once.
"""

import argparse
import asyncio
import contextlib
import gc
import itertools
import os
import resource
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import numpy as np
import uvloop

from serving.frontend.prepared import PreparedPrompt
from serving.model.card import ModelCard
from serving.model.watch import watch_cards
from serving.router import RouterConfig
from serving.router.index import PrefixIndex
from serving.routing.following import traits_of
from serving.routing.live import LiveRouting
from serving.routing.placement import WantedRank
from serving.runtime.address import EndpointAddress
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.messages import pack_u32, pack_u64
from serving.worker.protocol import PreprocessedRequest, StopConditions

ADDRESS = EndpointAddress("many", "backend", "generate")
BLOCK_SIZE = 16
SYSTEM_PROMPTS = 50


class Routed:
    """A router of its own in this process."""

    def __init__(self, runtime: DistributedRuntime, cards: dict[str, ModelCard]) -> None:
        self.routing = LiveRouting(
            runtime,
            ADDRESS,
            mode="kv",
            config=RouterConfig(),
            block_size=BLOCK_SIZE,
            seed=0,
            traits=partial(traits_of, cards),
        )
        index = self.routing.core.index
        assert isinstance(index, PrefixIndex)
        self.index = index
        self.picks_s: list[float] = []
        self.picks_cpu_s: list[float] = []
        self.ttfts_s: list[float] = []
        self.num_blocks = 0

    async def stream(self, prompts: "Prompts", tokens: int, until: float) -> None:
        """Send one request after the other."""
        routing = self.routing
        while (started := time.perf_counter()) < until:
            prompt = prompts.next()
            placing, placing_cpu = time.perf_counter(), time.thread_time()
            placement = routing.pick(WantedRank(len(prompt.tokens), prompt.hashes))
            self.picks_s.append(time.perf_counter() - placing)
            self.picks_cpu_s.append(time.thread_time() - placing_cpu)
            request = PreprocessedRequest(
                token_ids=pack_u32(prompt.tokens),
                sequence_hashes=pack_u64(np.array(prompt.hashes, np.uint64)),
                stop_conditions=StopConditions(max_tokens=tokens, ignore_eos=True),
                dp_rank=placement.rank.dp_rank,
            )
            is_first = True
            async for _ in routing.send(placement, request):
                if is_first:
                    is_first = False
                    self.ttfts_s.append(time.perf_counter() - started)
                    routing.on_first_token(placement)
            routing.on_finish(placement)
            self.num_blocks += len(prompt.hashes) - placement.overlap_blocks

    async def until_like(self, num_blocks: int) -> None:
        """Wait until the index has this many blocks."""
        while len(self.index) < num_blocks:
            await asyncio.sleep(0.01)


class Prompts:
    """Prompts that share system prompts, drawn once before the clock starts to run."""

    def __init__(self, tokens: int, count: int) -> None:
        rng = np.random.default_rng(1)
        systems = rng.integers(0, 31_000, (SYSTEM_PROMPTS, tokens // 2), np.uint32)
        own = rng.integers(0, 31_000, (count, tokens - tokens // 2), np.uint32)
        whole = [np.concatenate([systems[number % SYSTEM_PROMPTS], tail]) for number, tail in enumerate(own)]
        self._prompts = itertools.cycle([PreparedPrompt(each, BLOCK_SIZE) for each in whole])

    def next(self) -> PreparedPrompt:
        """Return the next one; after the last, the first again."""
        return next(self._prompts)


@contextlib.asynccontextmanager
async def workers(options: argparse.Namespace, num_ranks: int, folder: str) -> AsyncIterator[None]:
    """Run mocker processes with this many ranks together."""
    flags = ["--endpoint", str(ADDRESS), "--model-name", "mock", "--block-size", str(BLOCK_SIZE)]
    flags += ["--dp-size", str(num_ranks // options.processes), "--num-gpu-blocks", str(options.num_gpu_blocks)]
    flags += ["--speedup-ratio", str(options.speedup), "--context-length", "100000"]
    environment = {**os.environ, "DYN_DISCOVERY_DIR": folder, "DYN_LOG": "warn"}
    processes = [
        await asyncio.create_subprocess_exec(sys.executable, "-m", "serving.mocker", *flags, env=environment)
        for _ in range(options.processes)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        await asyncio.gather(*(process.wait() for process in processes))


async def measure(options: argparse.Namespace, num_ranks: int, prompts: Prompts) -> None:
    """Print what a router in front of this many ranks costs."""
    with tempfile.TemporaryDirectory(prefix="dynabench-") as folder:
        runtime = await DistributedRuntime.connect(RuntimeConfig(discovery_dir=folder))
        async with runtime, workers(options, num_ranks, folder):
            cards: dict[str, ModelCard] = {}

            def on_card(key: str, card: ModelCard | None) -> None:
                if card is not None:
                    cards[key] = card
                    router.routing.on_card(card.instance_id)

            router = Routed(runtime, cards)
            started = time.perf_counter()
            await watch_cards(runtime.discovery, on_card, *ADDRESS)
            await router.routing.start()
            while router.routing.num_ranks < num_ranks:
                await asyncio.sleep(0.01)
            found_s = time.perf_counter() - started
            await drive(options, router, prompts, num_ranks, found_s)
            await join(runtime, cards, router)


async def drive(options: argparse.Namespace, router: Routed, prompts: Prompts, num_ranks: int, found_s: float) -> None:
    """Send requests, and print what they cost the router."""
    gc.collect()
    room, used_s = resident_bytes(), time.process_time()
    until = time.perf_counter() + options.seconds
    await asyncio.gather(*(router.stream(prompts, options.tokens, until) for _ in range(options.streams)))
    used_s = time.process_time() - used_s
    count, (p50, p99) = len(router.ttfts_s), np.percentile(router.picks_s, [50, 99]) * 1e6
    cpu_p50, cpu_p99 = np.percentile(router.picks_cpu_s, [50, 99]) * 1e6
    ttft, late = np.percentile(router.ttfts_s, [50, 99]) * 1e3
    print(
        f"{num_ranks:4} ranks, all known after {found_s:.1f} s: {count / options.seconds:,.0f} requests/s, "
        f"TTFT p50 {ttft:.1f} ms, p99 {late:.1f} ms; {router.num_blocks / options.seconds:,.0f} blocks/s stored\n"
        f"     a decision p50 {p50:.0f} us, p99 {p99:.0f} us (of CPU: {cpu_p50:.0f} and {cpu_p99:.0f}); router CPU {used_s / count * 1e6:.0f} us a request; "
        f"{len(router.index):,} blocks, {(resident_bytes() - room) / max(len(router.index), 1):.0f} bytes each",
        flush=True,
    )


async def join(runtime: DistributedRuntime, cards: dict[str, ModelCard], router: Routed) -> None:
    """Start a second router, and print how long it takes until it knows what the first one knows."""
    await asyncio.sleep(0.5)
    known = len(router.index)
    late, started, used_s = Routed(runtime, cards), time.perf_counter(), time.process_time()
    await late.routing.start()
    await late.until_like(known)
    print(
        f"     a second router has all {known:,} blocks after {time.perf_counter() - started:.2f} s "
        f"({time.process_time() - used_s:.2f} s of CPU)",
        flush=True,
    )
    await late.routing.close()
    await router.routing.close()


def resident_bytes() -> int:
    """Return the memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    """Read the command line; each number of ranks runs in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--processes", type=int, default=4, help="of workers")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--num-gpu-blocks", type=int, default=4096)
    parser.add_argument("--speedup", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    prompts = Prompts(options.prompt_tokens, 20_000)
    for num_ranks in options.ranks:
        uvloop.run(measure(options, num_ranks, prompts))


if __name__ == "__main__":
    main()
