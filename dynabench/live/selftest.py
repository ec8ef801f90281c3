"""The self-test: run the load generator against a server with known delays, and show the error of every metric."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import uvloop
from rich.table import Table

from dynabench.live.bodies import MeasuredServer
from dynabench.live.clients import ClientRecords, Order, send_all
from dynabench.live.known_server import MODEL
from dynabench.live.settings import SelftestConfig
from dynabench.terminal import Terminal
from foundation.errors import UserError
from reports.figures import metrics
from reports.record.records import Record
from serving.runtime.stopping import stop_on_signals
from workloads import Request, Workload
from workloads.pacing import LoadConfig

LIMITS_MS = {"TTFT": 2.0, "ITL": 0.5, "TPOT": 0.1, "E2E": 2.0, "schedule lag": 2.0}
"""Limits of the median's error that a machine meets unless it is overloaded."""


def run_selftest(config: SelftestConfig, console: Terminal) -> int:
    """Measure, print what was sent, expected and measured, and return 1 if a metric is off or a token was lost.

    Raises:
        KeyboardInterrupt: a signal ended it; what was measured until then is no verdict.
    """
    with known_server(config) as url:
        sent = uvloop.run(measure(url, config))
    if sent is None:
        raise KeyboardInterrupt
    run = Record("self-test", sent.requests, sent.gaps, 0.0, 1, is_live=True)
    table = Table(title="Self-test: what the client measured on a server with known delays (ms)", title_justify="left")
    for column in ("metric", "expected", "mean", "p50", "p99", "error of p50"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    bad = []
    for name, (expected, figures) in _results(run, config).items():
        error = (figures.p50 or 0.0) * 1000 - expected
        if not abs(error) <= LIMITS_MS[name]:
            bad.append(f"{name} is off by {error:+.2f} ms (limit {LIMITS_MS[name]:g} ms)")
        cells = [_ms(figures.at(key)) for key in ("mean", "p50", "p99")]
        table.add_row(name, f"{expected:.2f}", *cells, f"{error:+.3f}")
    console.print(table)
    failed = [error for error in sent.requests.error if error]
    wanted, came = config.requests * config.tokens, int(sent.requests.osl.sum())
    if failed:
        bad.append(f"{len(failed)} requests failed, the first with: {failed[0]}")
    if came != wanted:
        bad.append(f"{came:,} of {wanted:,} tokens were counted")
    together = sent.facts["tokens_together"] / max(sent.facts["tokens"], 1)
    console.say(
        f"{len(sent.requests):,} requests, {came:,} of {wanted:,} tokens; client CPU {sent.facts['cpu_share']:.0%} "
        "of a core; "
        f"{together:.1%} of the tokens arrived in one read with others"
    )
    for problem in bad:
        console.item(f"failed: {problem}")
    return 1 if bad else 0


async def measure(url: str, config: SelftestConfig) -> ClientRecords | None:
    """Send the self-test's requests; return None if a signal ended it."""
    # The loop hears of signals itself: an error that a handler raises in one of uvloop's callbacks is lost.
    stop = asyncio.Event()
    stop_on_signals(stop)
    requests = [Request(number / config.rate, 32, config.tokens, (number,)) for number in range(config.requests)]
    order = Order(Workload("self-test", 64, requests), MeasuredServer(url, MODEL, is_ours=True), LoadConfig(), "", 60.0)
    sent = await send_all(order, num_clients=config.clients, stop=stop)
    return None if stop.is_set() else sent


@contextmanager
def known_server(config: SelftestConfig) -> Iterator[str]:
    """Run the server in its own process and yield its address.

    Raises:
        UserError: it does not start.
    """
    delays = {"ttft-ms": config.ttft_ms, "itl-ms": config.itl_ms, "tokens-per-chunk": config.tokens_per_chunk}
    command = [sys.executable, "-m", "dynabench.live.known_server", "--with-parent"]
    command += [f"--{name}={value}" for name, value in delays.items()]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603 (our own words)
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        url = server.stdout.readline().strip()
        if not url:
            raise UserError("the server of the self-test did not start")
        yield url
    finally:
        server.stdin.close()
        server.stdout.close()
        try:
            server.wait(5)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _results(run: Record, config: SelftestConfig) -> dict[str, tuple[float, metrics.Statistics]]:
    """Return the expected value (ms) of each metric, and the measured one."""
    values = metrics.per_request(run.requests)
    chunks = -(-config.tokens // config.tokens_per_chunk)
    behind = config.tokens - min(config.tokens_per_chunk, config.tokens)
    decoding = (chunks - 1) * config.itl_ms
    lag = metrics.describe(metrics.schedule_lag(run.requests))
    results = {"TTFT": (config.ttft_ms, metrics.describe(values["ttft"]))}
    if behind:
        gap = config.itl_ms / config.tokens_per_chunk
        results["ITL"] = (gap, metrics.describe_gaps(metrics.TokenGaps(run.gaps)))
        results["TPOT"] = (decoding / behind, metrics.describe(values["tpot"]))
    results["E2E"] = (config.ttft_ms + decoding, metrics.describe(values["e2e"]))
    results["schedule lag"] = (0.0, lag)
    return results


def _ms(seconds: float | int | None) -> str:
    return "n/a" if seconds is None else f"{np.multiply(seconds, 1000):.3f}"
