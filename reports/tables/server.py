"""What the measured server says of itself, beside what the client saw."""

from collections.abc import Mapping

from reports.figures.cells import milliseconds, number, share
from reports.figures.server import STATES, TIMES, ServerFigures, StateFigures
from reports.record.pools import GpuUse
from reports.record.server import Bracket
from reports.tables.grid import Grid

PERCENTILES = ("p50", "p90", "p99")
OF_CLIENT = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s"}
"""Times that the client measures, too."""
TITLE = "What does the server say of itself?"


BRIEF = ("prefill time", "ITL", "prompt tokens", "output tokens", *PERCENTILES)
"""What a terminal does not show unless asked for all."""


def server_grid(of: Mapping[str, ServerFigures | None], *, is_whole: bool = True) -> Grid | None:
    """Lay out servers' figures by arm, all of them or those of most interest; None if no server said anything."""
    its = list(of.values())
    if not any(one and one.software for one in its) and not any(one and one.gpus for one in its):
        return None
    rows = [*_times(its), *_states(its), *_counts(its), *_gpus(its)]
    software = ", ".join(dict.fromkeys(name for one in its if one for name in one.software))
    known = [(label, cells) for label, cells in rows if any(cell not in ("-", "n/a") for cell in cells)]
    if not is_whole:
        known = [row for row in known if not any(word in row[0] for word in BRIEF)]
    return Grid(TITLE, list(of), known, _note(its, software))


def _note(its: list[ServerFigures | None], software: str) -> str:
    samples = sum(one.samples for one in its if one)
    text = f"By its own metrics, of {software}: everyone's requests, warm-up included. " * bool(software)
    text += "The client's times are means from sent, of the same stretch of time."
    if any(times.p50 for one in its if one for times in one.times.values()):
        text += (
            " Percentiles are interpolated in the bucket of the server's histogram whose bounds follow: the true value is "
            "somewhere between them."
        )
    return f"{text} Running, waiting, KV and GPUs: mean / highest of {samples:,} samples."


def _times(its: list[ServerFigures | None]) -> list[tuple[str, list[str]]]:
    rows: list[tuple[str, list[str]]] = []
    for name, label in TIMES.items():
        if not any(one and name in one.times for one in its):
            continue
        if name in OF_CLIENT:
            seen = [getattr(one.client, OF_CLIENT[name], None) if one and one.client else None for one in its]
            rows.append((f"{label} mean, client (ms)", [milliseconds(value) for value in seen]))
        of = [one.times.get(name) if one else None for one in its]
        rows.append((f"{label} mean, server (ms)", [milliseconds(one.mean_s if one else None) for one in of]))
        for percentile in PERCENTILES:
            brackets = [getattr(one, percentile) if one else None for one in of]
            rows.append((f"{label} {percentile}, server (ms)", [_bracket(bracket) for bracket in brackets]))
    return rows


def _bracket(bracket: Bracket | None) -> str:
    if bracket is None:
        return "n/a"
    low = milliseconds(bracket.low)
    if bracket.value is None or bracket.high is None:
        return f"above {low}"
    if not bracket.low:  # evenly spread down to 0 is no guess worth showing
        return f"below {milliseconds(bracket.high)}"
    return f"{milliseconds(bracket.value)} [{low}, {milliseconds(bracket.high)}]"


def _states(its: list[ServerFigures | None]) -> list[tuple[str, list[str]]]:
    return [
        (label, [_state(one.states.get(name) if one else None, is_share=name == "kv") for one in its])
        for name, label in STATES.items()
    ]


def _state(state: StateFigures | None, *, is_share: bool) -> str:
    if state is None:
        return "n/a"
    if is_share:
        return f"{share(state.mean)} / {share(state.highest)}"
    return f"{number(state.mean, 1)} / {number(state.highest)}"


def _counts(its: list[ServerFigures | None]) -> list[tuple[str, list[str]]]:
    answered = [one.client.answered if one and one.client else None for one in its]
    return [
        ("requests, client", [number(value) for value in answered]),
        ("requests, server", [number(one.counted if one else None) for one in its]),
        ("prompt tokens, server", [number(one.prompt_tokens if one else None) for one in its]),
        ("output tokens, server", [number(one.output_tokens if one else None) for one in its]),
        ("prefix cache hits", [share(one.hit_share if one else None) for one in its]),
        ("preemptions, server", [number(one.preemptions if one else None) for one in its]),
    ]


def _gpus(its: list[ServerFigures | None]) -> list[tuple[str, list[str]]]:
    gpus = list(dict.fromkeys(gpu.name for one in its if one for gpu in one.gpus))
    rows = [
        (f"GPU {name}", [_gpu({gpu.name: gpu for gpu in one.gpus}.get(name) if one else None) for one in its])
        for name in gpus
    ]
    power = [[gpu.power_w for gpu in one.gpus if gpu.power_w is not None] if one else [] for one in its]
    if len(gpus) > 1:
        rows.append(("all GPUs (W)", [number(sum(watts)) if watts else "n/a" for watts in power]))
    return rows


def _gpu(gpu: GpuUse | None) -> str:
    if gpu is None:
        return "n/a"
    parts = [
        f"{gpu.power_w:,.0f} W" if gpu.power_w is not None else "",
        f"{gpu.busy:.0%} busy" if gpu.busy is not None else "",
        f"{gpu.memory_bytes / 1e9:,.1f} GB" if gpu.memory_bytes is not None else "",
    ]
    if parts[2] and gpu.capacity_bytes:
        parts[2] += f" of {gpu.capacity_bytes / 1e9:,.1f}"
    return ", ".join(filter(None, parts)) or "n/a"
