"""The progress of a benchmark: the load that runs, the curve so far, and about how long it will still take."""

import time

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dynabench.arm import Arm
from dynabench.benchmark.settings import BenchConfig
from dynabench.live.timeline import Stats
from dynabench.live.view import Animated
from dynabench.terminal import Terminal
from reports.figures.cells import milliseconds, number
from reports.sweep.curve import throughput, unit
from reports.sweep.points import Point

SHOWN = 12
"""Loads of the curve that are shown while it is measured."""
USUAL = 7
"""Loads that a climb takes, about: for the time that is left."""


class BenchView(Animated):
    """An animated view on a terminal, else a line for each load, on stderr."""

    def __init__(self, console: Terminal, config: BenchConfig) -> None:
        """Show nothing yet."""
        self._num_loads, self._duration_s = config.num_loads, config.duration_s
        self._started = time.monotonic()
        self._arm: Arm | None = None
        self._points: list[Point] = []
        super().__init__(console)

    def begin(self, arm: Arm) -> None:
        """Note which load runs now."""
        self._arm = arm

    def update(self, stats: Stats) -> None:
        """Show the latest progress."""
        if self._live is not None and self._arm is not None:
            self._live.update(Group(*self._curve(), *self._running(stats, self._arm)), refresh=True)

    def keep(self, point: Point) -> None:
        """Note what came of a load."""
        self._points.append(point)
        if self._live is None:
            self._console.report(f"{time.monotonic() - self._started:4.0f} s  {_line(point)}")

    def _curve(self) -> list[RenderableType]:
        shown = self._points[-SHOWN:]
        most = max((throughput(point) for point in shown), default=0.0)
        return [
            Text(f"{_bar(throughput(point), most)} {_line(point)}", no_wrap=True, overflow="ellipsis")
            for point in shown
        ]

    def _running(self, stats: Stats, arm: Arm) -> list[RenderableType]:
        load = arm.settings.load
        whole = load.warmup_s + self._duration_s
        head = Table.grid(padding=(0, 1))
        head.add_row(
            Text(arm.name, no_wrap=True, overflow="ellipsis"), ProgressBar(whole, min(stats.now_s, whole), width=16),
            f"{stats.now_s:.0f} of about {whole:.0f} s",
        )  # fmt: skip
        failed = f", {stats.num_failed:,} failed" * bool(stats.num_failed)
        ttft = "-" if stats.ttft_ms is None else f"{stats.ttft_ms[0]:.0f} ms"
        counts = f"{stats.num_ended:,} answer{'s' * (stats.num_ended != 1)}{failed}, TTFT {ttft}"
        return [head, Text(f"{counts}{self._left(whole - stats.now_s)}", no_wrap=True, overflow="ellipsis")]

    def _left(self, of_this_s: float) -> str:
        """Say about how long it will still take, by the loads so far."""
        done = len(self._points)
        left = (self._num_loads or USUAL) - done - 1
        if not done or left < 0:
            return ""
        each = sum(point.wall_s for point in self._points) / done
        return f", about {max(of_this_s, 0.0) + left * each:.0f} s left"


def _line(point: Point) -> str:
    return (
        f"{point.name}: {number(throughput(point))} {unit(point)}, TTFT p50 {milliseconds(point.ttft_sched.p50)} ms, "
        f"ITL p50 {milliseconds(point.itl.p50)} ms" + f", {point.failed:,} failed" * bool(point.failed)
    )


def _bar(value: float, most: float, width: int = 8) -> str:
    share = value / most if most else 0.0
    return ("█" * round(share * width)).ljust(width)
