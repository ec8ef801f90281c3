"""What happened in each window of time, in all workers together and in each."""

from typing import Any

import numpy as np
import numpy.typing as npt

from reports.figures.metrics import of_each
from reports.figures.stability import in_system, waiting
from reports.record.records import Floats, MaybeFloats, MaybeInts, Record, Requests


def windows(records: "list[Record]", number: int) -> Floats:
    """Return the edges of this many windows, from the first to the last intended arrival of any run."""
    end = max((float(run.requests.intended_s.max(initial=0.0)) for run in records), default=0.0)
    return np.linspace(0, max(end, 1e-3), number + 1)


def centres(edges: Floats) -> Floats:
    """Return the middles of windows."""
    return (edges[1:] + edges[:-1]) / 2


def ttft(run: Record, edges: Floats, share: float) -> Floats:
    """Return a quantile of TTFT (ms) of the requests due in each window, NaN where there are none."""
    values = of_each(run.requests, "ttft_sched") * 1000
    known = ~np.isnan(values)
    place = np.clip(np.searchsorted(edges, run.requests.intended_s[known], side="right") - 1, 0, len(edges) - 2)
    order = np.argsort(place, kind="stable")
    groups = np.split(values[known][order], np.searchsorted(place[order], np.arange(1, len(edges) - 1)))
    return np.array([float(np.quantile(group, share)) if len(group) else np.nan for group in groups])


def arrivals(requests: Requests, edges: Floats) -> Floats:
    """Return the requests that arrived per second."""
    result: Floats = np.histogram(requests.intended_s, edges)[0] / np.diff(edges)
    return result


def running(requests: Requests, edges: Floats) -> Floats | None:
    """Return how many requests a worker had started; None if the start times are unknown."""
    if not requests.admitted_s.count():
        return None
    return in_system(requests, edges) - waiting(requests, edges)


def queued(requests: Requests, edges: Floats) -> Floats | None:
    """Return how many requests waited for a worker to start; None if the start times are unknown."""
    return waiting(requests, edges) if requests.admitted_s.count() else None


def output_rate(requests: Requests, edges: Floats) -> Floats:
    """Return output tokens per second, assuming that each answer's tokens are evenly spaced."""
    known = requests.succeeded & ~(requests.first_token_s.mask | requests.last_token_s.mask)
    start, stop = requests.first_token_s.data[known], requests.last_token_s.data[known]
    stop = np.maximum(stop, start * (1 + 1e-9) + 1e-6)  # late times are too coarse for a fixed least width
    rate = requests.osl[known] / (stop - start)
    result: Floats = np.diff(_integral(start, rate, edges) - _integral(stop, rate, edges)) / np.diff(edges)
    return np.maximum(result, 0.0)


def kv_pools(records: "list[Record]") -> list[str]:
    """Return the pools whose KV use is known."""
    return list(dict.fromkeys(use.pool for run in records for use in run.kv))


def kv_use(run: Record, pool: str, edges: Floats) -> Floats | None:
    """Return the mean share of a pool's KV blocks in use; None if it is not known."""
    use = next((one for one in run.kv if one.pool == pool and one.shares), None)
    if use is None:
        return None
    ends = np.arange(len(use.shares) + 1) * use.window_s
    total = np.concatenate([[0.0], np.cumsum(use.shares)]) * use.window_s
    known = np.where(edges[1:] <= ends[-1] + use.window_s, 1.0, np.nan)
    widths = np.maximum(np.diff(np.minimum(edges, ends[-1])), 1e-12)
    result: Floats = np.diff(np.interp(edges, ends, total)) / widths * known
    return result


def server_state(run: Record, name: str, edges: Floats) -> Floats | None:
    """Return what the measured server said of its state at the middle of each window; None if it never said it."""
    seen = run.server.at(name) if run.server is not None else []
    if not seen:
        return None
    times, values = np.array(seen).T
    result: Floats = np.interp(centres(edges), times, values, right=np.nan)
    return result


def _integral(times: Floats, weights: Floats, edges: Floats) -> Floats:
    """Integrate, up to each edge, the weights whose times have passed."""
    order = np.argsort(times)
    times, weights = times[order], weights[order]
    total = np.concatenate([[0.0], np.cumsum(weights)])
    moment = np.concatenate([[0.0], np.cumsum(weights * times)])
    count = np.searchsorted(times, edges)
    result: Floats = total[count] * edges - moment[count]
    return result


def work(run: Record, edges: Floats) -> Floats:
    """Return the uncached prompt and output tokens per second sent to each worker, shape (workers, windows)."""
    requests = run.requests
    prompts = requests.isl - requests.cached_tokens.filled(0)
    sums = _sums(run, requests.prompt_worker, prompts, edges) + _sums(run, requests.worker, requests.osl, edges)
    result: Floats = sums / np.diff(edges)
    return result


def hits(run: Record, edges: Floats) -> Floats:
    """Return the share of prompt tokens each worker found in its cache, NaN where no prompt arrived: (workers, windows)."""
    requests = run.requests
    known = requests[~requests.cached_tokens.mask]
    with np.errstate(invalid="ignore"):
        result: Floats = _sums(run, known.prompt_worker, known.cached_tokens.data, edges, known) / _sums(
            run, known.prompt_worker, known.isl, edges, known
        )
    return result


def load(run: Record, edges: Floats) -> Floats:
    """Return the mean number of requests on each worker, shape (workers, windows).

    A request that another worker prefills counts from when it is sent here to be decoded.
    """
    requests = run.requests[run.requests.succeeded]
    apart = ~requests.prefill_worker.mask
    came_s = np.where(apart, requests.decode_queued_s.filled(0), requests.intended_s)
    spans = _spans(run, requests.worker, came_s, requests.done_s, edges)
    if apart.any():
        first = requests[apart]
        spans += _spans(run, first.prefill_worker, first.intended_s, first.prefill_end_s, edges)
    return spans / np.diff(edges)


def _sums(
    run: Record, workers: MaybeInts, amounts: npt.NDArray[Any], edges: Floats, rows: Requests | None = None
) -> Floats:
    """Add up amounts for each worker and window by when their requests were due."""
    windows = len(edges) - 1
    intended_s = (run.requests if rows is None else rows).intended_s
    at = np.searchsorted(edges, intended_s, side="right") - 1
    at = np.where(intended_s == edges[-1], windows - 1, at)
    known = ~workers.mask & (at >= 0) & (at < windows)
    place = workers.data[known] * windows + at[known]
    total = np.bincount(place, weights=amounts[known], minlength=run.num_workers * windows)
    return np.asarray(total, float).reshape(run.num_workers, windows)


def _spans(run: Record, workers: MaybeInts, start: Floats, stop: MaybeFloats, edges: Floats) -> Floats:
    """Add up how long spans lasted in each window, for each worker."""
    known = ~(workers.mask | np.ma.getmaskarray(stop))
    worker, start, end = workers.data[known], start[known], np.ma.getdata(stop)[known]
    passed = [
        np.bincount(worker, np.clip(edge - start, 0, None) - np.clip(edge - end, 0, None), run.num_workers)
        for edge in edges
    ]
    result: Floats = np.diff(np.array(passed, float), axis=0).T
    return result
