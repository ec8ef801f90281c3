"""A small run of round numbers, for tests of what is made of one."""

import dataclasses

import numpy as np

from reports.record.fleet import FleetChange, FleetUse, Headcount, PoolFleet
from reports.record.pools import LinkUse, PoolUse, TierTraffic, TierUse, Use
from reports.record.records import Record, Requests

MANIFEST = {
    "title": "t", "subtitle": "s", "created": "2026-01-01", "limits": [], "bound_s": None, "workers": {"a": 2}, "engine": {"block_size": 64},
    "arms": {"a": {"router_mode": "kv"}}, "router": {}, "versions": {"dynabench": "1"}, "workload": {"name": "w", "requests": 2}, "command": "c", "load": {},
}  # fmt: skip
"""What experiment.json may hold of such runs."""

FIELDS = {field.name for field in dataclasses.fields(Record)}


def run(arm="a", ttft=(1.0, 2.0), **changes):
    """A request a second, sent a quarter late; the first token after `ttft`, the last of ten tokens 9 s behind it.

    Changes are columns of its requests (None in a list: unknown), or fields of the record.
    """
    count = len(ttft)
    first = np.arange(count) + np.array(ttft, float)
    columns = {
        "worker": np.arange(count) % 2,
        "intended_s": np.arange(count, dtype=float),
        "sent_s": np.arange(count) + 0.25,
        "admitted_s": np.arange(count, dtype=float),
        "first_byte_s": first,
        "first_token_s": first,
        "last_token_s": first + 9.0,
        "done_s": first + 9.0,
        "isl": np.full(count, 100),
        "osl": np.full(count, 10),
        "first_chunk_tokens": np.ones(count, int),
        "cached_tokens": np.arange(count) * 50 % 100,
        "predicted_tokens": np.zeros(count, int),
        "preemptions": np.zeros(count, int),
    }
    fields = {"gaps": np.array([[1.0, 0, 0, 9, count]]), "wall_s": 0.1, "num_workers": 2}
    fields |= {name: changes.pop(name) for name in FIELDS if name in changes}
    return Record(arm, Requests.of(**columns | changes), **fields)


def live(arm="a", **changes):
    """Three requests, the last failed: 10 tokens in 9 chunk gaps of a second, and 1 token; the streams end half a second later."""
    columns = {
        "ttft": (1.0, 2.0, 1.0),
        "osl": [10, 1, 0],
        "first_token_s": [1.25, 3.25, None],
        "last_token_s": [10.25, 3.25, None],
        "done_s": [10.75, 3.75, 2.5],
        "error": ["", "", "500"],
        "gaps": np.array([[1.0, 0, 0, 1, 1]] * 9),
        "is_live": True,
    }
    return run(arm, **columns | changes)


HOST = TierUse(
    "worker", "host", 2,
    capacity_bytes=2.0 * (1 << 30), capacity_tokens=4096, full=0.5,
    read=TierTraffic(2e9, 4, Use(0.25, 0.5)), written=TierTraffic(8e9, 6, Use(0.5, 0.75)), evicted_chunks=7, flushes=3, stall_s=0.5,
)  # fmt: skip
"""The memory of two hosts, of a GiB each."""


def busy(gpu_s):
    """Two workers of one GPU each that took steps for so many GPU-seconds."""
    return (PoolUse("worker", "aggregated", 2, 2, Use(0.5, 0.5), gpu_s),)


def tiered(arm="tiered", gpu_s=8.0, **changes):
    """Requests whose prompts of 100 tokens had 30 on the GPU and 20 in host memory."""
    count = len(changes.get("ttft", (1.0, 2.0)))
    columns = {"cached_tokens": [50] * count, "host_tokens": [20] * count}
    return run(arm, **{"tiers": (HOST,), "pools": busy(gpu_s)} | columns | changes)


APART = (PoolUse("prefill", "prefill", 2, 4, Use(0.25, 0.5)), PoolUse("decode", "decode", 2, 2, Use(0.75, 1.0)))
LINKS = (
    LinkUse("prefill", 2, Use(0.125, 0.25), Use(0.0, 0.0)),
    LinkUse("decode", 2, Use(0.0, 0.0), Use(0.125, 0.1875)),
    LinkUse("racks", 1, Use(0.5, 0.5), Use(0.0, 0.0)),
)


def apart(arm="apart", **changes):
    """Two requests that worker 0 prefills and worker 2 answers, with a second between any two times of each."""
    columns = {
        "intended_s": [0.0, 10.0],
        "sent_s": [0.0, 10.0],
        "prefill_queued_s": [0.0, 10.0],
        "admitted_s": [1.0, 11.0],
        "prefill_worker": [0, 0],
        "prefill_end_s": [2.0, 12.0],
        "decode_queued_s": [2.0, 12.0],
        "decode_blocks_s": [3.0, 13.0],
        "transfer_start_s": [3.0, 13.0],
        "transfer_end_s": [4.0, 14.0],
        "decode_start_s": [4.5, 14.5],
        "first_token_s": [5.0, 15.0],
        "second_token_s": [6.0, 16.0],
        "last_token_s": [14.0, 24.0],
        "worker": [2, 2],
    }
    return run(arm, **{"num_workers": 4, "pools": APART, "links": LINKS} | columns | changes)


GROWN = FleetUse(
    pools=(
        PoolFleet(
            "worker", "aggregated", gpus_per_worker=2,
            history=(
                Headcount(0.0, pending=0, starting=0, ready=1, draining=0),
                Headcount(30.0, pending=1, starting=1, ready=1, draining=0),
                Headcount(50.0, pending=0, starting=0, ready=3, draining=0),
                Headcount(80.0, pending=0, starting=0, ready=2, draining=1),
            ),
            gpu_s=440.0, failed_starts=1.0, died=1.0, died_s=(60.0,),
        ),
    ),
    length_s=100.0, planner="hpa", decisions=10, notes={"a load is not known": 2}, lost=3,
    changes=(FleetChange(30.0, "worker", 1, 3, "queue is 7, its target 3"), FleetChange(80.0, "worker", 3, 2, "queue is 0")),
)  # fmt: skip
"""Workers of two GPUs: 30 s one of them, 20 s one and one that starts, 50 s three, of which one leaves for the last 20 s."""


def planned(arm="hpa", fleet=GROWN, **changes):
    """A request a second for 100 s, each with its first token after a second, but in the times 20 to 50 s after three."""
    late = [3.0 if 20 <= second < 50 else 1.0 for second in range(100)]
    return run(arm, ttft=late, fleet=fleet, pools=busy(110.0), **changes)
