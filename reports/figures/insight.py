"""What the router did: where hits were lost, how even the load was, and how often a cached prefix was passed over."""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from reports.figures import metrics
from reports.record.records import Flags, Floats, Ints, MaybeInts, Record, Requests

WATERFALL = {
    "endless": "one unlimited cache for all",
    "best": "best worker at that time",
    "predicted": "router's prediction for the worker it chose",
    "actual": "cached tokens the engine found",
}


class Waterfall(msgspec.Struct, frozen=True):
    """The share of prompt tokens cached at each stage (see `WATERFALL`), None if it is not known."""

    endless: float | None
    best: float | None
    predicted: float | None
    actual: float | None


class Imbalance(msgspec.Struct, frozen=True):
    """How uneven the workers' shares are."""

    work_max_over_mean: float = 1.0
    work_cv: float = 0.0
    """Coefficient of variation."""
    work_jain: float = 1.0
    """(sum x)^2 / (W sum x^2): 1 is even, 1/W one worker for all."""
    requests_max_over_mean: float = 1.0


def waterfall(run: Record) -> Waterfall:
    """Return the share of prompt tokens cached at each stage, None if it is not known.

    If the engine found more than was predicted, other requests cached it in the meantime. Modes that do not track what
    workers have cached predict nothing.
    """
    requests = run.requests[run.requests.succeeded]
    follows = not requests.best_tokens.mask.any()

    def share(tokens: MaybeInts) -> float | None:
        return metrics.share(tokens, requests.isl) if len(tokens) else None

    return Waterfall(
        endless=share(requests.endless_tokens),
        best=share(requests.best_tokens) if follows else None,
        predicted=share(requests.predicted_tokens) if follows else None,
        actual=share(requests.cached_tokens),
    )


def affinity_breaks(run: Record) -> float | None:
    """Return the share of requests that went to a worker with less of their prefix than another had, or None."""
    requests = run.requests
    if not len(requests) or requests.best_tokens.mask.any():
        return None
    return float((requests.predicted_tokens < requests.best_tokens).mean())


def imbalance(run: Record) -> Imbalance:
    """Return how uneven the workers' shares are: of work (uncached prompt and output tokens) and of requests.

    Workers that only prefill are compared with each other, and so are the rest; the less even side counts.
    """
    requests = run.requests
    if not requests.worker.count():
        return Imbalance()
    prompts, outputs = _work(run)
    work = _by_worker(run, requests.prompt_worker, prompts) + _by_worker(run, requests.worker, outputs)
    ones = np.ones(len(requests))
    counts = _by_worker(run, requests.worker, ones) + _by_worker(run, requests.prefill_worker, ones)
    sides = [_evenness(work[side], counts[side]) for side in _sides(run) if counts[side].any()]
    return max(sides, key=lambda side: side.work_max_over_mean)


def _by_worker(run: Record, workers: MaybeInts, amounts: npt.NDArray[Any]) -> Floats:
    """Add up the work sent to each worker."""
    known = ~workers.mask
    return np.asarray(np.bincount(workers.data[known], weights=amounts[known], minlength=run.num_workers), float)


def _sides(run: Record) -> list[Flags]:
    """Return which workers only prefill and which do not; all together if none do."""
    if sum(pool.workers for pool in run.pools) != run.num_workers:  # not known
        return [np.ones(run.num_workers, bool)]
    prefills = np.repeat([pool.role == "prefill" for pool in run.pools], [pool.workers for pool in run.pools])
    return [side for side in (prefills, ~prefills) if side.any()]


def _evenness(work: Floats, requests: Floats) -> Imbalance:
    mean = work.mean() or 1.0
    return Imbalance(
        work_max_over_mean=float(work.max() / mean),
        work_cv=float(work.std() / mean),
        work_jain=float(work.sum() ** 2 / (len(work) * (work**2).sum())) if work.any() else 1.0,
        requests_max_over_mean=float(requests.max() / requests.mean()),
    )


def covered(means: dict[str, float], bound: float | None) -> dict[str, float]:
    """Return how far each arm's mean is on the way from `random` to a lower bound (1: all the way)."""
    worst = means.get("random")
    if worst is None or bound is None or worst <= bound:
        return {}
    return {arm: (worst - mean) / (worst - bound) for arm, mean in means.items()}


MISSED = 0.05
"""A length that is off by more than this share does not count as the planned one."""
FEW = 0.01
"""The share of the requests that may have another length without a remark."""
MOST_LEVELS = 5
"""The most priorities of which each is listed."""
HELD = 0.05
"""The share of a run in which prefill workers may be out of blocks without a remark."""


COUNTED = {
    "without_usage": "{answers} had no usage: each event with text counts as one token, and their prompts are assumed to have "
    "the workload's lengths",
    "wrong_usage": "{answers} had a usage that cannot be (negative, no number, or more output tokens than were asked for), so the "
    "server's counts are unusable: each event with text counts as one token, and prompts are assumed to have the workload's lengths",
    "without_tokens": "{answers} had no tokens, as this API's come as a whole: there is E2E, and no TTFT, TPOT, ITL or output "
    "tokens/s, so limits on these mean nothing",
    "as_whole": "{answers} came as a whole (--no-stream): there is E2E, and no TTFT, TPOT or ITL, so limits on these mean nothing",
    "uncounted": "{answers} came as a whole and without usage, so it is not known how many tokens they have: output tokens/s leave "
    "them out",
    "without_done": "{answers} had no last event ([DONE], or message_stop of messages); they count, because each said why it "
    "ended",
    "hidden_reasoning": "{answers} had reasoning that the server counted and did not send: TTFT includes it, TPOT and ITL do "
    "not",
    "retried": "{requests} sent again on a new connection, because the server had closed the kept one before it answered; "
    "their times begin with the first sending",
}
"""What is said of facts that count requests, if there are any."""
TRUE = {
    "without_host_time": "its step times have no host time, so synchronous scheduling costs nothing here; use --model and --gpu "
    "to include it",
    "without_gpu": "its step times and number of KV blocks are not those of --model, because --gpu is not given",
    "without_prefixes": "the workload does not say what prompts share, so each had a prefix of its own, and hits are unknown: "
    "modes differ only in how they balance the load, and what they would save by caching is not known",
}
"""What is said of facts that are so or not."""


def remarks(repeats: list[Record]) -> list[str]:
    """Return what a reader should know about an arm's valid runs."""
    found = [
        *_off_lengths(repeats),
        *_by_priority(repeats),
        *_counted(repeats),
        *_histories(repeats),
        *_broken_off(repeats),
    ]
    if len(repeats) > 1 and all(_is_equal(run.requests, repeats[0].requests) for run in repeats[1:]):
        found.append(f"deterministic, so its {len(repeats)} repeats are equal")
    found += [said for fact, said in TRUE.items() if any(run.facts.get(fact) for run in repeats)]
    blocked = max(blocked_share(run) for run in repeats)
    if blocked > HELD:
        found.append(
            f"for {blocked:.0%} of the run, prompts waited while prefill workers computed nothing: their blocks were full of "
            "computed prompts that decode workers had not read yet, so decode workers or links are the bottleneck"
        )
    if error := max(run.facts.get("gap_error", 0.0) for run in repeats):
        found.append(
            f"it has so many times between tokens that they are kept in bins: percentiles of ITL are exact to {error:.1%}"
        )
    if any(run.facts.get("refused") or run.facts.get("cut") for run in repeats):
        found.append(_too_long(repeats))
    if said := held(repeats):
        found.append(said)
    if missed := max(int(run.facts.get("missed_events") or 0) for run in repeats):
        found.append(f"{missed:,} of the events of its fleet were due after its last answer, so they had no effect")
    return found


def _off_lengths(repeats: list[Record]) -> Iterator[str]:
    """Say which lengths are not the workload's."""
    kinds: tuple[tuple[Literal["isl", "osl"], str], ...] = (("isl", "prompts"), ("osl", "answers"))
    for name, what in kinds:
        actual, planned = np.concatenate([_lengths(run.requests, name) for run in repeats], axis=1)
        missed = int((np.abs(actual - planned) > MISSED * planned).sum())
        if missed > FEW * len(planned):
            yield (
                f"{missed:,} of {len(planned):,} {what} are off the workload's length by more than {MISSED:.0%}: they have "
                f"{actual.mean():.4g} tokens on average instead of {planned.mean():.4g}"
            )


def _counted(repeats: list[Record], facts: Iterable[str] = COUNTED) -> Iterator[str]:
    """Say what happened to some requests."""
    for fact in facts:
        if count := _sum(repeats, fact):
            several = "s" * (count > 1)
            requests = f"{count:,} request{several} {'were' if several else 'was'}"
            yield COUNTED[fact].format(answers=f"{count:,} answer{several}", requests=requests)


def of_usage(repeats: list[Record]) -> list[str]:
    """Return what a reader should know about tokens that the server did not count."""
    return list(_counted(repeats, ("without_usage", "wrong_usage")))


def of_conversations(repeats: list[Record]) -> list[str]:
    """Return what a reader should know about conversations: whose answers they repeat, and which ended early."""
    return [*_histories(repeats), *_broken_off(repeats)]


def _histories(repeats: list[Record]) -> Iterator[str]:
    """Say whose answers later turns repeated."""
    repeated, planned = (_sum(repeats, f"{name}_answers") for name in ("repeated", "planned"))
    if not (repeated or planned):
        return
    unmatched = _sum(repeats, "unmatched_results")
    whys = (
        (unmatched, "it has results of tools, for which the server made no matching calls"),
        (planned - unmatched, "the server's had no text, a broken call, or calls without results"),
    )
    of_workload = "; ".join(f"{count:,} because {why}" for count, why in whys if count)
    yield (
        f"later turns repeated {repeated:,} answers of the server"
        + f", and {planned:,} of the workload ({of_workload})" * bool(planned)
    )


def _broken_off(repeats: list[Record]) -> Iterator[str]:
    """Say which conversations ended early."""
    failed, too_long, unsent = (
        _sum(repeats, name) for name in ("broken_conversations", "too_long_conversations", "unsent_turns")
    )
    if unsent:
        whys = ((too_long, "reached the server's context"), (failed, "had a turn that failed"))
        yield (
            f"{failed + too_long:,} conversation{'s' * (failed + too_long > 1)} ended early: "
            + ", ".join(f"{count:,} {why}" for count, why in whys if count)
            + f"; {unsent:,} later turn{'s were' if unsent > 1 else ' was'} not sent, and count{'s' * (unsent == 1)} as failed"
        )


def _sum(repeats: list[Record], fact: str) -> int:
    return sum(int(run.facts.get(fact) or 0) for run in repeats)


def _too_long(repeats: list[Record]) -> str:
    """Say which requests did not fit the context, and what to do."""
    refused, cut, uncut = (_sum(repeats, name) for name in ("refused", "cut", "uncut"))
    total, facts = sum(len(run.requests) for run in repeats), repeats[0].facts
    found = []
    if uncut:
        step = f"a step of {int(facts['prompt']):,} tokens, in which a whole prompt is computed"
        found.append(
            f"{_refused(uncut, total, step)}; cut prompts with --enable-chunked-context, or raise --max-num-tokens"
        )
    if refused == uncut and not cut:
        return found[0]
    room = f"the context of {int(facts['context']):,} tokens"
    if refused > uncut:
        found.append(_refused(refused - uncut, total, room))
    if cut:
        found.append(f"{cut:,} answer{' was' if cut == 1 else 's were'} cut" + f" at {room}" * (refused == uncut))
    found.append(
        "use a model with a longer context (or a larger --max-model-len, if you set it), or --fail-on-too-long to refuse such "
        "a workload"
    )
    return "; ".join(found)


def held(repeats: list[Record]) -> str:
    """Say how many prompts waited until few enough others were decoding, and what to do; nothing if that is hardly any."""
    count, total = _sum(repeats, "held"), sum(len(run.requests) for run in repeats)
    if count <= FEW * total:
        return ""
    longest = max(int(run.requests.isl.max()) for run in repeats)
    return (
        f"{count:,} of {total:,} prompts waited for other requests to end: a prompt is computed in one step, of at most "
        f"{int(repeats[0].facts['prompt']):,} tokens (max_num_tokens), and prompts of up to {longest:,} tokens leave too "
        "little room in it for the decodes; cut prompts with --enable-chunked-context, or raise --max-num-tokens"
    )


def _refused(count: int, total: int, room: str) -> str:
    do, were = ("does", "was") if count == 1 else ("do", "were")
    return f"{count:,} of {total:,} requests {do} not fit {room} and {were} refused (HTTP 400)"


def _by_priority(repeats: list[Record]) -> list[str]:
    """Say how long requests of each priority waited, if there are several."""
    ttft_s: dict[int, list[Floats]] = {}
    for run in repeats:
        times = metrics.of_each(run.requests, "ttft_sched")
        kept = run.requests.is_measured & ~np.isnan(times) & ~np.ma.getmaskarray(run.requests.priority)
        levels = np.ma.getdata(run.requests.priority)
        for level in np.unique(levels[kept]).tolist():
            ttft_s.setdefault(level, []).append(times[kept & (levels == level)])
    if len(ttft_s) < 2:
        return []
    means = {level: np.concatenate(ttft_s[level]).mean() * 1e3 for level in sorted(ttft_s)}
    shown = [f"{mean:,.4g} ms ({level})" for level, mean in means.items()]
    if len(shown) > MOST_LEVELS:
        shown = [*shown[: MOST_LEVELS - 1], "...", shown[-1]]
    return [f"mean TTFT by priority, the lowest value first: {', '.join(shown)}"]


def _is_equal(one: Requests, other: Requests) -> bool:
    """Return whether two runs had the same requests at the same times."""
    return len(one) == len(other) and all(
        np.array_equal(getattr(one, name).filled(-1), getattr(other, name).filled(-1))
        for name in ("first_token_s", "last_token_s")
    )


def blocked_share(run: Record) -> float:
    """Return the share of the run in which the average prefill worker computed no prompt although some waited for it.

    An idle engine leaves a prompt waiting only if blocks are short, and if nothing runs, computed prompts
    hold them.
    """
    requests = run.requests[~(run.requests.prefill_worker.mask | run.requests.prefill_end_s.mask)]
    workers = np.unique(requests.prefill_worker.data)
    duration = float(run.requests.done_s.max() - run.requests.intended_s.min()) if len(requests) else 0.0
    if not duration:
        return 0.0
    has_blocks = requests.decode_blocks_s <= requests.admitted_s  # if they come first, they are waited for, too
    came_s = np.where(has_blocks.filled(False), requests.decode_blocks_s.data, requests.prefill_queued_s.data)
    came_s = np.fmax(came_s, requests.prefill_queued_s.data)
    begin_s, end_s = requests.admitted_s.data, requests.prefill_end_s.data
    blocked_s = 0.0
    for worker in workers:
        mine = requests.prefill_worker.data == worker
        blocked_s += _covered_s(came_s[mine], end_s[mine]) - _covered_s(begin_s[mine], end_s[mine])
    return blocked_s / duration / len(workers)


def _covered_s(start: Floats, end: Floats) -> float:
    """Return the total time that spans cover (s)."""
    order = np.argsort(start)
    start, end = start[order], end[order]
    before = np.concatenate([[-np.inf], np.maximum.accumulate(end)[:-1]])
    return float(np.maximum(end - np.maximum(start, before), 0.0).sum())


def _lengths(requests: Requests, name: Literal["isl", "osl"]) -> Floats:
    """Return the lengths and their plan, shape (2, requests), of the requests that succeeded and had one."""
    actual, planned = (requests.isl, requests.planned_isl) if name == "isl" else (requests.osl, requests.planned_osl)
    kept = requests.succeeded & ~planned.mask
    return np.array([actual[kept], planned.data[kept]], float)


def _work(run: Record) -> tuple[Ints, Ints]:
    """Return the tokens of prompts and outputs that had to be computed; if hits are not known, whole prompts count."""
    requests = run.requests
    return requests.isl - requests.cached_tokens.filled(0), requests.osl
