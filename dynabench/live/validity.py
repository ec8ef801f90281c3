"""Decide whether a run is valid: the client, or failed requests, can distort it."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from dynabench.arm import MAX_FAILED_SHARE
from dynabench.live.broken_off import NOT_SENT
from dynabench.live.clients import ClientRecords
from dynabench.live.http_client import NO_CONNECTION
from workloads.pacing import LoadConfig

LATE_S = 0.1
"""A client whose 99th percentile of (sent - intended) is above this distorted the run."""
BUSY = 0.9
"""A client that used more than this share of a core distorted the run, because its timestamps were delayed."""
BEHIND = 0.95
"""A client that sent at less than this share of the intended rate distorted the run."""


CLIENT = "the client "
"""How a reason begins that is the client's own."""


def is_client_limited(notes: Sequence[str]) -> bool:
    """Return whether the client itself distorted a run, by what makes it invalid."""
    return any(note.startswith(CLIENT) for note in notes)


def spoilt(
    sent: ClientRecords, load: LoadConfig, *, is_complete: bool, max_failed_share: float = MAX_FAILED_SHARE
) -> list[str]:
    """Return the reasons why a run is not valid: failed requests, or the client itself."""
    requests, notes = sent.requests, []
    if requests.failure and not np.any(requests.error == NO_CONNECTION):
        return [*requests.failure]
    attempted = requests.error[requests.is_measured]
    counts = Counter(error for error in attempted if error)
    if num_unconnected := counts.pop(NO_CONNECTION, 0):
        notes.append(
            f"{CLIENT}may open no more connections, so {num_unconnected:,} of {len(attempted):,} requests were not sent: the "
            "server answers more slowly than requests come; lower the rate, or raise the limit (ulimit -Hn)"
        )
    # Turns that were not sent have their cause in another request's error.
    causes = Counter({error: count for error, count in counts.items() if not error.startswith(NOT_SENT)}) or counts
    if counts.total() > max_failed_share * len(attempted):
        notes.append(
            f"{counts.total():,} of {len(attempted):,} requests failed ({counts.total() / len(attempted):.1%}, more than "
            f"--max-failed-share {max_failed_share:.3g}), most often with: {causes.most_common(1)[0][0]}"
        )
    known = ~requests.sent_s.mask
    intended, actual = requests.intended_s[known], requests.sent_s.data[known]
    if not len(intended):
        return notes
    if load.max_concurrency is None:
        late = float(np.percentile(actual - intended, 99))
        if late > LATE_S:
            notes.append(
                f"{CLIENT}was late: 1% of the requests were sent at least {late * 1000:.0f} ms late "
                f"(limit {LATE_S * 1000:.0f} ms); lower the rate, or send from several processes (--clients 2)"
            )
        span, took = float(np.ptp(intended)), float(np.ptp(actual))
        if not load.is_closed and is_complete and span > 1 and span / took < BEHIND:
            notes.append(f"{CLIENT}sent at {span / took:.0%} of the intended rate; lower the rate, or use --clients 2")
    busy = sent.facts["cpu_share"]
    if busy > BUSY:
        notes.append(
            f"{CLIENT}used {busy:.0%} of a core, so its timestamps are late; lower the rate, or use --clients 2"
        )
    return notes
