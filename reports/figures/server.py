"""What a server says of itself, beside what the client saw: figures of an arm's runs, and the difference explained."""

from collections.abc import Sequence
from itertools import chain

import msgspec
import numpy as np

from reports.figures.cells import milliseconds
from reports.figures.metrics import LEAST_SAMPLES, of_each
from reports.record.pools import GpuUse, averaged
from reports.record.records import Floats, Record, Requests
from reports.record.server import Bracket, ClientSide, ServerTimes, ServerUse, added

TIMES = {
    "ttft": "TTFT",
    "queue": "time in the queue",
    "prefill": "prefill time",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2e": "E2E",
}
STATES = {"running": "requests running", "waiting": "requests waiting", "kv": "KV in use"}


class TimeFigures(msgspec.Struct, frozen=True):
    """A time as the server measured it (s); percentiles are None if the sample is too small, or there are no buckets."""

    count: float
    mean_s: float | None
    p50: Bracket | None = None
    p90: Bracket | None = None
    p99: Bracket | None = None


class StateFigures(msgspec.Struct, frozen=True):
    """A state over the samples."""

    mean: float
    highest: float


class ServerFigures(msgspec.Struct, frozen=True):
    """What the server said during an arm's runs, all repeats together."""

    software: list[str]
    problems: list[str]
    explained: str
    """The difference between the client's TTFT and the server's; empty if one is not known."""
    samples: int
    client: ClientSide | None
    same_requests: bool | None
    """Whether the server counted exactly the client's requests; None if it does not count them."""
    counted: float | None
    """The requests that the server counted: those with a first token, or else those that ended."""
    requests: float | None
    preemptions: float | None
    prompt_tokens: float | None
    output_tokens: float | None
    hit_share: float | None
    states: dict[str, StateFigures]
    """By name (`STATES`)."""
    times: dict[str, TimeFigures]
    """By name (`TIMES`)."""
    gpus: list[GpuUse]


def client_side(requests: Requests) -> ClientSide:
    """Return what a client saw, to be set beside what the server says; requests of the warm-up count, too."""
    answered = int(requests.succeeded.sum())
    means = [_mean(of_each(requests, name)) for name in ("ttft", "tpot", "e2e")]
    return ClientSide(answered, len(requests) - answered, *means)


def server_figures(runs: Sequence[Record]) -> ServerFigures | None:
    """Return what the server of an arm's runs said, None if it was not asked."""
    uses = [run.server for run in runs if run.server is not None]
    if not uses:
        return None
    times = _times(uses)
    client = _clients([use.client for use in uses if use.client is not None])
    requests = _sum([use.requests for use in uses])
    counted = times["ttft"].count if "ttft" in times else requests
    is_same = None if client is None or counted is None else 0 <= counted - client.answered <= client.failed
    looked_up = _sum([use.looked_up_tokens for use in uses])
    hits = _sum([use.hit_tokens for use in uses])
    seen = {name: [value for use in uses for _, value in use.at(name)] for name in STATES}
    return ServerFigures(
        software=list(dict.fromkeys(chain.from_iterable(use.software for use in uses))),
        problems=list(dict.fromkeys(chain.from_iterable(use.problems for use in uses))),
        explained=_explained(times, client, counted, is_same=is_same),
        samples=sum(len(use.samples) for use in uses),
        client=client,
        same_requests=is_same,
        counted=counted,
        requests=requests,
        preemptions=_sum([use.preemptions for use in uses]),
        prompt_tokens=_sum([use.prompt_tokens for use in uses]),
        output_tokens=_sum([use.output_tokens for use in uses]),
        hit_share=hits / looked_up if hits is not None and looked_up else None,
        states={name: StateFigures(sum(its) / len(its), max(its)) for name, its in seen.items() if its},
        times={name: _time_figures(one) for name, one in times.items()},
        gpus=averaged([use.gpus for use in uses]),
    )


def remarks(figures: ServerFigures | None) -> list[str]:
    """Say what explains the client's figures, and what the server did not say."""
    if figures is None:
        return []
    return [*([figures.explained] if figures.explained else []), *figures.problems]


def _times(uses: Sequence[ServerUse]) -> dict[str, ServerTimes]:
    """Add up the histograms that the server has of every run; those without a sample are left out."""
    names = [name for name in TIMES if all(name in use.times for use in uses)]
    found = {name: added([use.times[name] for use in uses]) for name in names}
    return {name: one for name, one in found.items() if one.count}


def _time_figures(times: ServerTimes) -> TimeFigures:
    def at(percentile: int) -> Bracket | None:
        return times.quantile(percentile / 100) if times.count >= LEAST_SAMPLES[percentile] else None

    return TimeFigures(times.count, times.mean_s, at(50), at(90), at(99))


def _explained(
    times: dict[str, ServerTimes], client: ClientSide | None, counted: float | None, *, is_same: bool | None
) -> str:
    """Say where the client's TTFT comes from, or why the two sides cannot be compared."""
    if client is None or counted is None:
        return ""
    if not is_same:
        why = (
            "others used it at the same time, or requests were given up"
            if counted > client.answered
            else "others of its processes or replicas answered the rest"
        )
        return (
            f"The server counted {counted:,.0f} requests and the client {client.answered:,} answers: {why}. "
            "What they say cannot be compared."
        )
    ttft_s = times["ttft"].mean_s if "ttft" in times else None
    if ttft_s is None or client.ttft_s is None:
        return ""
    queue_s = times["queue"].mean_s if "queue" in times else None
    queue = f", {queue_s / ttft_s:.0%} of it in its queue" if queue_s is not None and ttft_s else ""
    rest_s = client.ttft_s - ttft_s
    its = f"{milliseconds(ttft_s)} ms by the server's own clock{queue}"
    if rest_s < 0:
        return (
            f"The client's mean TTFT of {milliseconds(client.ttft_s)} ms is less than the {its}: the server's ends after the "
            "token has left, or begins before the request came."
        )
    return (
        f"The client's mean TTFT of {milliseconds(client.ttft_s)} ms is {its}, and {milliseconds(rest_s)} ms outside of it: "
        "network, HTTP, what the server does before its clock starts, and the client."
    )


def _clients(sides: Sequence[ClientSide]) -> ClientSide | None:
    """Put the repeats together; means count by answers."""
    if not sides:
        return None
    answered = sum(side.answered for side in sides)

    def mean(name: str) -> float | None:
        known = [(side.answered, value) for side in sides if (value := getattr(side, name)) is not None]
        total = sum(count for count, _ in known)
        return sum(count * value for count, value in known) / total if total else None

    return ClientSide(answered, sum(side.failed for side in sides), mean("ttft_s"), mean("tpot_s"), mean("e2e_s"))


def _sum(values: Sequence[float | None]) -> float | None:
    """Add up; unknown if any is."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _mean(values: Floats) -> float | None:
    known = values[~np.isnan(values)]
    return max(float(known.mean()), 0.0) if len(known) else None
