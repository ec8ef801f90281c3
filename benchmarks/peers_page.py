"""Write docs/load-generators-compared.md, all of it, from what peers.py measured.

python benchmarks/peers_page.py OUT.json docs/load-generators-compared.md
"""

import json
import statistics
import sys
import textwrap
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

Run = dict[str, Any]
Table = list[str]
NAMES = {
    "dynabench": "dynabench",
    "aiperf": "AIPerf 0.13",
    "guidellm": "guidellm 0.8",
    "vllm": "`vllm bench serve` 0.32",
    "sglang": "SGLang's bench_serving 0.5",
}
START = "start-up"
GOAL_MS = {"mean": 0.3, "p99": 1.0}
"""How far a client's figures may be from the server's stamps."""
ASIDE = "n/a"


class Found:
    """What was measured, by client and job."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.head = found
        self.jobs: list[dict[str, Any]] = found["jobs"]
        self.clients = list(dict.fromkeys(run["client"] for run in found["runs"]))
        self.runs: list[Run] = found["runs"]

    def of(self, client: str, job: str) -> list[Run]:
        """Return the rounds of a client in a job that ended well."""
        return [run for run in self.runs if (run["client"], run["job"]) == (client, job) and "wall_s" in run]

    def values(self, client: str, job: str, value_of: Callable[[Run], float | None]) -> list[float]:
        """Return a value in each round."""
        return [value for run in self.of(client, job) if (value := value_of(run)) is not None]

    def cpu_ms(self, client: str, job: dict[str, Any]) -> list[float]:
        """Return CPU time for each request (ms), without what a run of one request takes."""
        before = self.values(client, START, lambda run: run["cpu_s"])
        base = statistics.median(before) if before else 0.0
        return self.values(client, job["name"], lambda run: (run["cpu_s"] - base) / job["requests"] * 1e3)

    def why_not(self, client: str, job: str) -> str:
        """Say why there are no values."""
        its = [run for run in self.runs if (run["client"], run["job"]) == (client, job)]
        if any("failed" in run for run in its):
            return "it fails: its program ends with an error"
        return next((run["unable"] for run in its if "unable" in run), ASIDE)


def spread(values: Sequence[float], form: str = "{:,.0f}") -> str:
    """Print the median, and the range if there are several."""
    if not values:
        return ASIDE
    low, middle, high = (form.format(value) for value in (min(values), statistics.median(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def speeds(found: Found, job: dict[str, Any]) -> Table:
    """Return requests and CPU time of a job."""
    lines = [
        "| | requests/s | tokens/s | CPU time per request (ms) | requests per CPU second |",
        "|---|---|---|---|---|",
    ]
    for client in found.clients:
        if not found.of(client, job["name"]):
            lines.append(f"| {NAMES[client]} | {found.why_not(client, job['name'])} | | | |")
            continue
        rates = [
            spread(found.values(client, job["name"], itemgetter(key))) for key in ("requests_per_s", "tokens_per_s")
        ]
        cpu = found.cpu_ms(client, job)
        each = [1e3 / value for value in cpu if value > 0]
        lines.append(f"| {NAMES[client]} | {' | '.join(rates)} | {spread(cpu, '{:,.2f}')} | {spread(each)} |")
    return lines


def errors(found: Found, job: dict[str, Any]) -> Table:
    """Return how far each client's own figures are from the server's stamps."""
    lines = ["| | TTFT, mean | TTFT, p99 | time between tokens, mean | its p99 |", "|---|---|---|---|---|"]
    for client in found.clients:
        if not found.of(client, job["name"]):
            lines.append(f"| {NAMES[client]} | {found.why_not(client, job['name'])} | | | |")
            continue
        cells = [spread(off(found, client, job["name"], *what), "{:+.3f}") for what in FIGURES]
        lines.append(f"| {NAMES[client]} | {' | '.join(cells)} |")
    return lines


def doubts(found: Found, job: dict[str, Any]) -> list[str]:
    """Say what clients say against their own measurements."""
    its = {
        client: [run["notes"] for run in found.of(client, job["name"]) if "notes" in run] for client in found.clients
    }
    said = [
        f"- {NAMES[client]} itself calls {len(notes)} of {len(found.of(client, job['name']))} rounds not valid: {notes[0][0]}."
        for client, notes in its.items()
        if notes
    ]
    return wrapped(said)


FIGURES = (("ttft", "mean"), ("ttft", "p99"), ("itl", "mean"), ("itl", "p99"))


def off(found: Found, client: str, job: str, metric: str, statistic: str) -> list[float]:
    """Return a client's figure minus the server's (ms), in each round."""
    place = ("mean", "p99").index(statistic)
    return found.values(client, job, lambda run: run["told_ms"][metric][place] - run["server_ms"][metric][place])


def wrapped(items: Sequence[str]) -> list[str]:
    """Return items of a list in lines that fit a terminal."""
    return [line for item in items for line in textwrap.wrap(item, 118, subsequent_indent="  ")]


def in_short(found: Found) -> list[str]:
    """Say how our client does beside the best of the others."""
    said = []
    for job in found.jobs:
        each = {
            client: statistics.median(cpu)
            for client in found.clients
            if (cpu := found.cpu_ms(client, job)) and job["name"] != START
        }
        others = {client: value for client, value in each.items() if client != "dynabench" and value > 0}
        if "dynabench" in each and others and each["dynabench"] > 0:
            best = min(others, key=lambda client: others[client])
            ratio = others[best] / each["dynabench"]
            said.append(
                f"- {job['name']}: {ratio:,.1f} times as many requests per CPU second as {NAMES[best]}, the best of the others."
            )
        if job["is_timed"] and found.of("dynabench", job["name"]):
            worst = {
                statistic: max(
                    abs(statistics.median(off(found, "dynabench", job["name"], metric, statistic)))
                    for metric in ("ttft", "itl")
                )
                for statistic in GOAL_MS
            }
            meets = all(worst[statistic] <= limit for statistic, limit in GOAL_MS.items())
            said.append(
                f"- {job['name']}: means are within {worst['mean']:.2f} ms of the server's own stamps, and p99 within "
                f"{worst['p99']:.2f} ms ({'within' if meets else 'not within'} our goal of {GOAL_MS['mean']} and {GOAL_MS['p99']:g} ms)."
            )
    return wrapped(said)


def start_up(found: Found) -> Table:
    """Return what a run of one request takes, and what is installed."""
    lines = ["| | time (s) | CPU time (s) | installed (MB) |", "|---|---|---|---|"]
    for client in found.clients:
        wall, cpu = (spread(found.values(client, START, itemgetter(key)), "{:.1f}") for key in ("wall_s", "cpu_s"))
        lines.append(f"| {NAMES[client]} | {wall} | {cpu} | {found.head['installed_mb'][client]:,.0f} |")
    return lines


def page(found: Found) -> str:
    """Return the page."""
    head = found.head
    lines = [
        "# Load generators, compared",
        "",
        "After reading this page, you know what a measurement with `dynabench run --url` costs and how exact it is, beside",
        "AIPerf, guidellm, `vllm bench serve` and SGLang's bench_serving.",
        "",
        "## In short",
        "",
        *in_short(found),
    ]
    for job in found.jobs:
        if job["name"] == START:
            continue
        delays = (
            f"a token each {job['itl_ms']:g} ms after a TTFT of {job['ttft_ms']:g} ms"
            if job["itl_ms"]
            else "the server waits for nothing"
        )
        lines += [
            "",
            f"## {job['name'][0].upper()}{job['name'][1:]}",
            "",
            f"{job['requests']:,} requests of {job['tokens']} tokens, {job['streams']:,} at a time; {delays}.",
            "",
            *speeds(found, job),
            *(["", *said] if (said := doubts(found, job)) else []),
        ]
        if job["is_timed"]:
            lines += ["", "A client's figure minus that of the server's stamps (ms):", "", *errors(found, job)]
    lines += [
        "",
        "## Start-up and size",
        "",
        "A run of one request, with the report; and a package with everything it needs, as far as it is installed here",
        "(SGLang's and vLLM's needs for GPUs are not).",
        "",
        *start_up(found),
        "",
        "## How it was measured",
        "",
        f"On {head['date']}, with {head['cores']} cores that all programs and the server share, and Python {head['python']}: the",
        f"median of {head['rounds']} rounds (and their range). In each round, every client ran once, against a fresh server. The",
        "server counts requests and tokens, and keeps when it wrote the first and the last token of each stream. CPU time is",
        "that of all processes of a client, with its report, less what a run of one request takes.",
        "",
        "- *Time between tokens* is a request's own mean: AIPerf's and guidellm's ITL, vLLM's, SGLang's and our TPOT.",
        "- Answers have one length, so requests come in waves, which is the hardest case for a client; the first wave",
        "  also opens its connections.",
        "- SGLang's ends with the stream, not with its last token.",
        "- In a wave, requests wait in the server's sockets before it reads, and stamps, them. Clients count that time,",
        "  rightly, and the stamps do not have it: it is most of the difference in TTFT.",
        "- Where tokens come one by one (64 and 1,024 streams), each is a read from a socket, which costs every client the",
        "  same in the kernel; so clients differ less there than where many tokens come at once.",
        "- Where the server, or the machine, is full, requests/s are not those of a client; CPU time still is.",
        "",
        "```bash",
        ".ci/engines prepare",
        "python benchmarks/peers.py peers.json",
        "python benchmarks/peers_page.py peers.json docs/load-generators-compared.md",
        "```",
        "",
        "<!-- Written by python benchmarks/peers_page.py. Do not edit. -->",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    source, target = map(Path, sys.argv[1:3])
    target.write_text(page(Found(json.loads(source.read_text()))))


if __name__ == "__main__":
    main()
