"""The progress of a live run: an animated view on a terminal, or else a line every few seconds, on stderr."""

from types import TracebackType
from typing import Protocol, Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dynabench.live.timeline import Stats
from dynabench.progress import LINE_EVERY_S
from dynabench.terminal import Terminal


class View(Protocol):
    """Shows the progress of a run."""

    def update(self, stats: Stats) -> None:
        """Show the latest progress."""

    def say(self, text: str) -> None:
        """Say what happens to the run, where progress is shown."""


class Animated:
    """Something that moves on a terminal while it is entered, and is nothing elsewhere."""

    def __init__(self, console: Terminal) -> None:
        self._console = console
        self._live = Live(console=console, transient=True, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line on stderr, unless the terminal is quiet."""
        self._console.report(text)


class LiveView(Animated):
    """Progress, rates, TTFT, TPOT, requests in flight, and the distribution of recent requests over the workers."""

    def __init__(self, console: Terminal, title: str, total: int, colour: str = "") -> None:
        self._title = title
        self._colour = colour
        self._total = total
        self._before: Stats | None = None
        self._every_s = console.line_every_s or LINE_EVERY_S
        self._line_due_s = self._every_s
        self._rates = (0.0, 0.0)
        super().__init__(console)

    def update(self, stats: Stats) -> None:
        """Show the latest progress."""
        if self._live is None:
            if stats.now_s >= self._line_due_s:
                self._line_due_s = stats.now_s + self._every_s
                self._console.report(self._line(stats))
            return
        before = self._before
        if before is not None and stats.now_s - before.now_s > 0.1:
            span = stats.now_s - before.now_s
            self._rates = (stats.num_ended - before.num_ended) / span, (stats.num_tokens - before.num_tokens) / span
        self._before = stats
        self._live.update(self._shown(stats), refresh=True)

    def _line(self, stats: Stats) -> str:
        """Write a line of progress."""
        failed = f", {stats.num_failed:,} failed" if stats.num_failed else ""
        share = f"{stats.num_ended:,} of {self._total:,} requests{failed}"
        in_flight = f"{stats.num_sent - stats.num_ended:,} in flight"
        return f"{stats.now_s:4.0f} s  {self._title}: {share}, {in_flight}, TTFT {_range(stats.ttft_ms)}"

    def _shown(self, stats: Stats) -> RenderableType:
        head = Table.grid(padding=(0, 1))
        head.add_row(
            Text(self._title, self._colour), ProgressBar(self._total, stats.num_ended, width=24), f"{stats.num_ended:,}/{self._total:,} requests",
            f"{stats.now_s:.0f} s",
        )  # fmt: skip
        requests, tokens = self._rates
        counts = f"{requests:,.1f} requests/s   {tokens:,.0f} tokens/s   in flight {stats.num_sent - stats.num_ended:,}"
        lines: list[RenderableType] = [
            head,
            Text(counts, no_wrap=True, overflow="ellipsis"),
            Text(f"TTFT {_range(stats.ttft_ms)}   TPOT {_range(stats.tpot_ms)}", no_wrap=True, overflow="ellipsis"),
        ]
        if stats.num_failed:
            lines.append(Text(f"failed {stats.num_failed:,}", style="red"))
        known = {worker: count for worker, count in stats.workers.items() if worker >= 0}
        if known:
            most = max(known.values())
            bars = "  ".join(
                f"{worker} {'▁▂▃▄▅▆▇█'[min(count * 8 // (most + 1), 7)]}" for worker, count in known.items()
            )
            lines.append(Text(f"workers  {bars}", overflow="ellipsis", no_wrap=True))
        return Group(*lines)


def _range(values: tuple[float, float] | None) -> str:
    return "-" if values is None else f"{values[0]:.1f} ms (p90 {values[1]:.1f})"
