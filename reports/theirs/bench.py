"""What `vllm bench serve --save-result` and SGLang's `bench_serving --output-file` wrote: an object per run.

Of vLLM's, --save-detailed keeps when each request was sent, so it becomes a record. SGLang keeps no such times.
"""

import itertools
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from reports.figures import metrics
from reports.figures.load import sent_as
from reports.figures.metrics import Statistics, Throughput
from reports.record.records import MAX_S, Record, Requests
from reports.theirs.measured import Measured, gap_rows, of_figures, of_runs, statistics

Seconds = Annotated[float, Meta(ge=-MAX_S, le=MAX_S)]
Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
OF_CHUNKS = "its ITL is a gap between chunks, however many tokens they have"
OF_STREAMS = "an answer ends there with its stream, which may be after its last token: in E2E and TPOT"


class BenchRun(msgspec.Struct, frozen=True):
    """The figures that both have; `None` where a version lacks them."""

    duration: Annotated[float, Meta(gt=0, le=MAX_S)]
    completed: Count
    request_throughput: float
    output_throughput: float
    total_input_tokens: int
    total_output_tokens: int
    failed: Count = 0
    num_prompts: Count | None = None
    request_rate: float | str | None = None
    max_concurrency: int | None = None
    latencies: list[Seconds] | None = None


class Detailed(msgspec.Struct, frozen=True):
    """vLLM's lists, with an item per request."""

    input_lens: list[Count]
    output_lens: list[Count]
    ttfts: list[Seconds]
    start_times: list[Seconds]
    errors: list[str]
    itls: list[list[Seconds]] | None = None
    latencies: list[Seconds] | None = None


def is_like_vllm(first: dict[str, Any]) -> bool:
    """Return whether it is vLLM's."""
    return {"request_throughput", "total_token_throughput", "completed"} <= first.keys()


def is_like_sglang(first: dict[str, Any]) -> bool:
    """Return whether it is SGLang's."""
    return {"request_throughput", "total_throughput", "completed"} <= first.keys()


def read_vllm(objects: list[dict[str, Any]]) -> dict[str, Measured]:
    """Return the runs by their load; `--append-result` writes several into a file."""
    return _named([(value, _vllm(value)) for value in objects])


def read_sglang(objects: list[dict[str, Any]]) -> dict[str, Measured]:
    """Return the runs by their load."""
    return _named([(value, _figures(value, "SGLang bench_serving", "e2e_latency", OF_STREAMS)) for value in objects])


def _named(found: list[tuple[dict[str, Any], Measured]]) -> dict[str, Measured]:
    """Name runs by their own label or load, and by their place where these are equal."""
    names = [str(value.get("label") or value.get("tag") or run.load or "") for value, run in found]
    return {
        name if names.count(name) == 1 and name else f"{name} ({place})".strip(): run
        for place, (name, (_, run)) in enumerate(zip(names, found, strict=True), 1)
    }


def _vllm(value: dict[str, Any]) -> Measured:
    if not {"start_times", "ttfts", "output_lens", "input_lens", "errors"} <= value.keys():
        return _figures(value, "vllm bench serve", "e2el", "run it with --save-detailed for intervals")
    run, details = msgspec.convert(value, BenchRun), msgspec.convert(value, Detailed)
    if details.itls is None and details.latencies is None:
        raise ValueError("there are neither latencies nor itls, so it is not known when answers ended")
    lists = [each for each in msgspec.structs.astuple(details) if each is not None]
    if len({len(each) for each in lists}) != 1:
        raise ValueError("the lists of its requests differ in length")
    if not any(not error for error in details.errors):
        raise ValueError("no request succeeded")
    record = _record(details, run.duration)
    gaps = len(record.gaps)
    is_by_token = gaps == sum(max(length - 1, 0) for length in details.output_lens)
    lacks = () if is_by_token or not gaps else (OF_CHUNKS,)
    return of_runs([record], tool="vllm bench serve", load=sent_as(run.max_concurrency, run.request_rate), lacks=lacks)


def _record(details: Detailed, wall_s: float) -> Record:
    """Return the requests of a run; in a closed loop, and there only, nothing is known of when they should be sent."""
    sent = np.array(details.start_times) - min(details.start_times)
    answered = np.array([not error for error in details.errors], bool)
    first = sent + details.ttfts
    if details.latencies is not None:
        last = sent + details.latencies
    else:
        last = first + [sum(gaps) for gaps in details.itls or ()]
    order = sent.argsort(kind="stable")

    def known(times: Any) -> Any:
        return np.where(answered, times, np.nan)[order]

    requests = Requests.of(
        intended_s=sent[order],
        sent_s=sent[order],
        first_token_s=known(first),
        last_token_s=known(last),
        done_s=known(last),
        isl=np.array(details.input_lens)[order],
        osl=np.array(details.output_lens)[order],
        first_chunk_tokens=answered[order].astype(int),
        error=[details.errors[place] for place in order],
    )
    gaps = list(itertools.chain.from_iterable(details.itls or ()))
    return Record("", requests, gap_rows(gaps), wall_s, 1, is_live=True)


def _figures(value: dict[str, Any], tool: str, end_to_end: str, *lacks: str) -> Measured:
    run = msgspec.convert(value, BenchRun)
    failed = run.failed or max((run.num_prompts or run.completed) - run.completed, 0)

    def figures(name: str, count: int) -> Statistics:
        keys = {"mean": "mean", "p50": "median", **{share: share for share in ("p90", "p95", "p99")}}
        known = {ours: value.get(f"{theirs}_{name}_ms") for ours, theirs in keys.items()}
        return statistics(count, msgspec.convert(known, dict[str, Annotated[float, Meta(le=MAX_S)] | None]))

    whole = figures(end_to_end, run.completed)
    if not whole.count and run.latencies:  # vLLM keeps these, and leaves E2EL out unless it is asked for
        whole = metrics.describe(np.array([latency for latency in run.latencies if latency > 0]))
    num_gaps = max(run.total_output_tokens - run.completed, 0)
    return of_figures(
        {
            "ttft": figures("ttft", run.completed),
            "tpot": figures("tpot", run.completed),
            "itl": figures("itl", num_gaps),
            "e2e": whole,
        },
        answered=run.completed,
        failed=failed,
        rates=Throughput(run.request_throughput, run.output_throughput),
        tokens=(run.total_input_tokens / max(run.completed, 1), run.total_output_tokens / max(run.completed, 1)),
        tool=tool,
        load=sent_as(run.max_concurrency, run.request_rate),
        lacks=(*lacks, OF_CHUNKS),
    )
