"""Measure a stand-in for `vllm serve`: what it carries on one core, what HTTP adds to its times, what many of them take.

    python benchmarks/stand_in.py [load] [idle] [itl] [replicas]      (default: all of them)

The server has one core and the clients another. A gap between tokens is compared with the step that the engine was told
to take, so its error contains the server's timers, the kernel's scheduling and the clients' own clock.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import uvloop

from serving.engines.processes import descendants

MODEL = "stand-in"
STEP_S = 0.010
DONE = b"data: [DONE]"
SERVE = """
import json, sys
from mocker.timing.config import TimingConfig
from serving.stand_in.config import HttpConfig, StandInConfig
from serving.stand_in.server import serve_stand_in
from serving.supervision.process import run_process
http = HttpConfig(host="127.0.0.1", port=int(sys.argv[1]))
timing = TimingConfig(timing="constant", **json.loads(sys.argv[2]))
run_process(lambda stopping: serve_stand_in(StandInConfig(model="stand-in", http=http, timing=timing), stopping))
"""
END = b"\r\n\r\n"


class Answer:
    """One request over a connection of its own that is kept: when each of its events came."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.sent_s = 0.0
        self.events_s: list[float] = []

    async def ask(self, prompt: str, tokens: int) -> "Answer":
        """Send a request and read its answer."""
        body = msgspec.json.encode(
            {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
        )
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        self.events_s, self.sent_s, last = [], time.perf_counter(), b""
        self.writer.write(head.encode() + END + body)
        while DONE not in last:
            data = await self.reader.read(1 << 16)
            if not data:
                raise SystemExit(f"the server hung up after {last[-300:]!r}")
            self.events_s += [time.perf_counter()] * data.count(b"data: {")
            last = (last + data)[-200:] if len(data) < 200 else data[-200:]
            if b"HTTP/1.1 4" in data or b"HTTP/1.1 5" in data:
                raise SystemExit(data.decode(errors="replace"))
        while not last.endswith(b"0" + END):  # the last chunk may come apart
            last += await self.reader.read(1 << 16)
        return self


@asynccontextmanager
async def answers(port: int, count: int) -> AsyncIterator[list[Answer]]:
    """Open connections."""
    made = [Answer(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(count)]
    try:
        yield made
    finally:
        for each in made:
            each.writer.close()


@asynccontextmanager
async def served(
    *flags: str, is_pinned: bool = True, timing: dict[str, object] | None = None
) -> AsyncIterator[tuple[int, int]]:
    """Run `dynabench vllm`, or the same server with step times that no flag gives; yield its port and process id."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "dynabench", "vllm", MODEL, "--host", "127.0.0.1", "--port", str(port), *flags]
    if timing is not None:
        command = [sys.executable, "-c", SERVE, str(port), json.dumps(timing)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        if is_pinned:
            os.sched_setaffinity(process.pid, {0})
        while True:
            try:
                (await asyncio.open_connection("127.0.0.1", port))[1].close()
                break
            except OSError:
                if process.poll() is not None:
                    raise SystemExit("the server did not start") from None
                await asyncio.sleep(0.05)
        yield port, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and those below it."""
    used = 0.0
    for each in (pid, *descendants(pid)):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        used += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used


def memory_mb(pid: int) -> float:
    """Return the memory of a process and those below it, what they share counted once (MB)."""
    lines = [
        line
        for each in (pid, *descendants(pid))
        for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
        if line.startswith("Pss:")
    ]
    return sum(int(line.split()[1]) for line in lines) / 1000


async def load(seconds: float) -> None:
    """Measure what one core carries if steps take no time."""
    for count, tokens in ((1, 64), (64, 64), (256, 64), (64, 1)):
        async with served("--speedup-ratio", "0") as (port, pid), answers(port, count) as clients:
            await asyncio.gather(*(each.ask("warm", 4) for each in clients))
            until, before, done = time.perf_counter() + seconds, cpu_s(pid), 0

            async def repeat(number: int, client: Answer, until: float = until, tokens: int = tokens) -> int:
                turns = 0
                while time.perf_counter() < until:
                    turns += 1
                    await client.ask(f"{number} {turns} " + "x" * 64, tokens)
                return turns

            done = sum(await asyncio.gather(*map(repeat, range(count), clients)))
            took = seconds
            print(
                f"load: {count:4} streams of {tokens:3} tokens: {done / took:7,.0f} requests/s "
                f"{done * tokens / took:9,.0f} tokens/s, {(cpu_s(pid) - before) / done * 1e6:6,.0f} us CPU a request",
                flush=True,
            )


async def idle(count: int) -> None:
    """Measure what HTTP adds to the time to the first token of a lone request."""
    step = 1000 * STEP_S
    async with (
        served(timing={"constant_prefill_ms": step, "constant_decode_ms": step}) as (port, _),
        answers(port, 1) as (client,),
    ):
        added = []
        for number in range(count):
            answer = await client.ask(f"{number} " + "x" * 200, 2)
            added.append(1000 * (answer.events_s[0] - answer.sent_s - STEP_S))
            await asyncio.sleep(0.01)
    print("idle: TTFT beyond the step:", _percentiles(added), flush=True)


async def itl(streams: int, tokens: int) -> None:
    """Measure how far the gaps between tokens are from the steps."""
    async with (
        served(timing={"constant_prefill_ms": 0, "constant_decode_ms": 1000 * STEP_S}) as (port, _),
        answers(port, streams) as clients,
    ):
        await asyncio.gather(*(each.ask("warm", 4) for each in clients))
        done = await asyncio.gather(*(each.ask(f"{at} hello", tokens) for at, each in enumerate(clients)))
    gaps = np.concatenate([np.diff(each.events_s[2 : tokens - 1]) for each in done])
    errors = 1000 * np.abs(gaps - STEP_S)
    print(f"itl: {streams} streams, error of {len(gaps):,} gaps:", _percentiles(errors), flush=True)


async def replicas(count: int, seconds: float) -> None:
    """Measure what many stand-ins take that have nothing to do."""
    started = time.perf_counter()
    async with served("--replicas", str(count), is_pinned=False) as (port, pid):
        while True:
            try:
                async with answers(port + count - 1, 1) as (last,):
                    await last.ask("hello", 1)
                break
            except OSError:
                await asyncio.sleep(0.05)
        ready, before = time.perf_counter() - started, cpu_s(pid)
        await asyncio.sleep(seconds)
        used = (cpu_s(pid) - before) / seconds
        print(
            f"replicas: {count}: ready in {ready:.1f} s, {memory_mb(pid):,.0f} MB, idle {100 * used:.2f}% of a core, "
            f"{1 + len(descendants(pid))} processes",
            flush=True,
        )


def _percentiles(values_ms: Sequence[float] | np.ndarray) -> str:
    return "  ".join(
        f"p{at} {value:.2f} ms" for at, value in zip((50, 90, 99), np.percentile(values_ms, (50, 90, 99)), strict=True)
    )


async def run(wanted: Sequence[str]) -> None:
    """Measure what was asked for."""
    os.sched_setaffinity(0, {os.cpu_count() - 1 if os.cpu_count() else 0})
    if "load" in wanted:
        await load(5)
    if "idle" in wanted:
        await idle(300)
    if "itl" in wanted:
        await itl(64, 300)
    if "replicas" in wanted:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        await replicas(50, 20)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["load", "idle", "itl", "replicas"])
    uvloop.run(run(parser.parse_args().what))
