"""Compare KV tiers with published figures: the same situation with and without the tier, in virtual time.

    python benchmarks/kv_tiers_published.py [--only vllm kvbm hicache ssd agents scaling]

Prints the table of docs/kv-tiers.md in two minutes. Models, GPUs, lengths, users and turns are the source's if it names
them. Other values are chosen here, next to the situation, and docs/kv-tiers.md lists the differences.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from dynabench.arm import Run, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.kv_store import KvStoreConfig
from dynabench.virtual.run import simulate
from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from reports.record.records import Record
from workloads import Request, Workload
from workloads.pacing import LoadConfig

GIB = 1 << 30
VLLM = "https://blog.vllm.ai/2026/01/08/kv-offloading-connector.html"
KVBM = "https://github.com/ai-dynamo/dynamo"
SSD = "https://kvcache-ai.github.io/Mooncake/performance/ssd-offload-benchmark-results.html"
HICACHE = "https://lmsys.org/blog/2025-09-10-sglang-hicache"
AGENTS = "https://blog.vllm.ai/2026/05/06/mooncake-store.html"


class Row(NamedTuple):
    """A published figure, and ours."""

    source: str
    what: str
    published: str
    ours: str


class Turns(NamedTuple):
    """Similar conversations: each turn's prompt includes the earlier turns and their answers."""

    users: int
    turns: int
    first: int
    """Tokens of the first turn, without the tokens that all users share."""
    more: int
    """New tokens of each later turn."""
    osl: int
    common: int = 0
    """Tokens at the beginning of every prompt."""
    delay_s: float = 0.0
    """Mean time between an answer and the next turn."""
    has_barrier: bool = False
    """Whether a round begins only when the previous one has ended for all users."""
    apart_s: float = 0.0
    """Time between the first turns of two users."""


def conversations(what: Turns, *, block_size: int = 512, seed: int = 0) -> Workload:
    """Make the requests, round by round."""
    rng = np.random.default_rng(seed)
    common = what.common // block_size
    requests = []
    for turn in range(what.turns):
        length = what.common + what.first + turn * (what.more + what.osl)
        full = length // block_size
        for user in range(what.users):
            number = turn * what.users + user
            own = [(user + 1 << 24) + place for place in range(common, full)]
            tail = [(number + 1) << 40] if length % block_size else []
            before = range((turn - 1) * what.users, turn * what.users) if what.has_barrier else [number - what.users]
            requests.append(
                Request(
                    user * what.apart_s,
                    length,
                    what.osl,
                    (*range(common), *own, *tail),
                    session=str(user),
                    after=tuple(before) if turn else (),
                    delay_s=float(rng.exponential(what.delay_s)) if turn else 0.0,
                )
            )
    return Workload("turns", block_size, requests)


def copies(length: int, count: int, *, gap_s: float, block_size: int = 16) -> list[Request]:
    """Return `count` requests that arrive together, and arrive again after a while."""
    blocks = -(-length // block_size)
    ids = [tuple(range(number * blocks, (number + 1) * blocks)) for number in range(count)]
    return [Request(time, length, 1, each) for time in (0.0, gap_s) for each in ids]


def run(
    workload: Workload, mocker: EngineConfig, timing: TimingConfig, load: LoadConfig | None = None, **deployed: Any
) -> Record:
    """Simulate."""
    replicas = deployed.pop("replicas", 1)
    deployment = Deployment(pools=(Pool(replicas=replicas, mocker=mocker, timing=timing),), **deployed)
    return simulate(Run.alone(Settings(deployment, load=load or LoadConfig())), workload)


def ttft(record: Record) -> np.ndarray[Any, Any]:
    """Return each request's TTFT (s), in the order of the workload."""
    order = np.argsort(record.requests.request)
    return np.asarray(record.requests.first_token_s - record.requests.sent_s)[order]


def hits(record: Record, which: slice = slice(None)) -> float:
    """Return the hit share of prompt tokens over all tiers."""
    order = np.argsort(record.requests.request)[which]
    return float(record.requests.cached_tokens.filled(0)[order].sum() / record.requests.isl[order].sum())


def rate(record: Record) -> float:
    """Return requests per second until four fifths have ended, because the last sessions leave workers idle."""
    ends = np.sort(np.asarray(record.requests.last_token_s))
    place = len(ends) * 4 // 5
    return place / float(ends[place - 1])


def less(with_it: float, without: float) -> str:
    """Format the relative change of a figure."""
    return f"{with_it / without - 1:+.0%}"


def vllm() -> Iterator[Row]:
    """Simulate Llama 3.1 8B on one H100: copies at 50 GB/s, as measured there, and GPU memory for only one batch."""
    timing = TimingConfig(model="meta-llama/Llama-3.1-8B", gpu="h100")
    ratios = []
    for length in (1024, 4096, 16384, 65536, 90112):
        once = copies(length, 1, gap_s=200.0)
        other = replace_ids(once[0], 1 << 30, 100.0)  # takes the GPU's blocks in between
        workload = Workload("single", 16, sorted([*once, other], key=lambda request: request.arrival_s))
        engine = EngineConfig(
            block_size=16, num_gpu_blocks=length // 16 + 8, kv_offloading_size=64.0, host_bandwidth_gb_s=50.0
        )
        first, _, again = ttft(run(workload, engine, timing))
        ratios.append(f"{length:,}: {first / again:.1f}x ({first * 1e3:,.0f} to {again * 1e3:,.0f} ms)")
    yield Row(
        VLLM, "TTFT of one prompt, computed against loaded from host memory", "2 to 22x, by length", "; ".join(ratios)
    )
    spans = []
    for size in (0.0, 700.0):
        engine = EngineConfig(block_size=16, num_gpu_blocks=8192, kv_offloading_size=size, host_bandwidth_gb_s=50.0)
        record = run(Workload("many", 16, copies(512, 10_000, gap_s=1000.0)), engine, timing)
        ends = np.sort(record.requests.last_token_s)
        spans.append(float(ends[-1] - 1000.0))
    yield Row(
        VLLM,
        "throughput of 10,000 prompts of 512 tokens, all of them in host memory",
        "up to 9x",
        f"{spans[0] / spans[1]:.1f}x ({512e4 / spans[0]:,.0f} to {512e4 / spans[1]:,.0f} tokens/s)",
    )


def replace_ids(request: Request, first: int, arrival_s: float) -> Request:
    """Return a request of the same length with its own prompt."""
    ids = tuple(range(first, first + len(request.hash_ids)))
    return Request(arrival_s, request.input_length, request.output_length, ids)


def kvbm() -> Iterator[Row]:
    """Simulate Llama 3.1 8B on one H100.

    There are 20 s between turns, and 128 GiB of host memory. The source states no lengths, so two are tried.
    """
    timing = TimingConfig(model="meta-llama/Llama-3.1-8B", gpu="h100")
    found = []
    for more, osl in ((600, 250), (1200, 250)):
        workload = conversations(Turns(80, 10, 2000, more, osl, delay_s=20.0, apart_s=0.5), block_size=64)
        records = [run(workload, EngineConfig(kv_offloading_size=size), timing) for size in (0.0, 128.0)]
        without, with_it = (float(ttft(record).mean()) for record in records)
        few, many = (hits(record) for record in records)
        found.append(f"{more:,} new tokens a turn: {less(with_it, without)} (hits {few:.0%} to {many:.0%})")
    yield Row(KVBM, "mean TTFT with host memory, 80 users, 10 turns", "-40%", "; ".join(found))


def rounds(
    what: Turns, timing: TimingConfig, arms: dict[str, tuple[EngineConfig, KvStoreConfig]]
) -> dict[str, list[tuple[float, float]]]:
    """Return TTFT (s) and hits of each round, per arm; four requests at a time, as in the source."""
    found = {}
    for name, (engine, store) in arms.items():
        record = run(conversations(what, block_size=64), engine, timing, LoadConfig(concurrency=4), kv_store=store)
        each = [slice(turn * what.users, (turn + 1) * what.users) for turn in range(what.turns)]
        found[name] = [(float(ttft(record)[part].mean()), hits(record, part)) for part in each]
    return found


def mean_ttft(of_rounds: list[tuple[float, float]]) -> float:
    """Return the mean over rounds, which all have the same number of requests."""
    return float(np.mean([seconds for seconds, _ in of_rounds]))


def ssd() -> Iterator[Row]:
    """Simulate Qwen3 8B on one A100 of 40 GB: 20 users, 10 rounds of 4,096 tokens.

    The pool of 80 GB is a disk at 50 GB/s here, and the SSDs are a store.
    """
    timing = TimingConfig(model="Qwen/Qwen3-8B", gpu="a100", timed_as="sglang")
    gpu = EngineConfig(num_gpu_blocks=2200, max_model_len=65536)  # 0.88 of 40 GB, minus the weights; positions scaled
    host = replace(gpu, kv_offloading_size=2 * 2200 * 64 * 147456 / GIB, kv_prefetch_policy="wait_complete")
    pool = replace(
        host, kv_disk_size=80e9 / GIB, kv_disk_bandwidth_gb_s=50.0, kv_disk_latency_ms=0.5, kv_disk_lookup_ms=0.5
    )
    drives = KvStoreConfig(kv_store_size=10_000.0, kv_store_bandwidth_gb_s=27.0, kv_store_latency_ms=0.1)
    arms = {
        "GPU": (gpu, KvStoreConfig()),
        "host": (host, KvStoreConfig()),
        "pool": (pool, KvStoreConfig()),
        "SSD": (pool, drives),
    }
    found = rounds(Turns(20, 10, 4096, 4096, 1, has_barrier=True), timing, arms)
    total = {name: mean_ttft(of_rounds) for name, of_rounds in found.items()}
    yield Row(SSD, "mean TTFT, SSDs against GPU only", "-57%", less(total["SSD"], total["GPU"]))
    yield Row(SSD, "mean TTFT, SSDs against the memory pool alone", "-34%", less(total["SSD"], total["pool"]))
    shares = [share for _, share in found["pool"]]
    fall = max(range(1, len(shares)), key=lambda place: shares[place - 1] - shares[place])
    yield Row(
        SSD,
        "where the hits of the memory pool alone fall",
        "83% to 36%, in round 7",
        f"{shares[fall - 1]:.0%} to {shares[fall]:.0%}, in round {fall + 1}",
    )
    slow, (fast, share) = found["pool"][fall][0], found["SSD"][fall]
    yield Row(SSD, "TTFT in that round, the pool alone and with SSDs", "16 s, 7.4 s", f"{slow:.1f} s, {fast:.1f} s")
    yield Row(SSD, "hits with SSDs, there", "above 84%", f"{share:.0%}")


def hicache() -> Iterator[Row]:
    """Simulate Qwen3 235B on eight H100 (the source: H800), as Mooncake measured HiCache.

    There are 80 users, 10 rounds of 2,048 tokens, and 240 GB of host memory.
    """
    timing = TimingConfig(model="Qwen/Qwen3-235B-A22B", gpu="h100", tensor_parallel_size=8, timed_as="sglang")
    gpu = EngineConfig()
    host = replace(gpu, kv_offloading_size=240e9 / GIB, kv_prefetch_policy="timeout")
    store = KvStoreConfig(kv_store_size=760e9 / GIB, kv_store_bandwidth_gb_s=50.0)
    arms = {"GPU": (gpu, KvStoreConfig()), "L2": (host, KvStoreConfig()), "L3": (host, store)}
    found = rounds(Turns(80, 10, 2048, 2048, 1, has_barrier=True), timing, arms)
    last = {name: of_rounds[-1][0] for name, of_rounds in found.items()}
    yield Row(
        HICACHE,
        "TTFT with host memory and a store against GPU only, in the round where it is least",
        "up to -80%",
        less(
            *min(
                ((many[0], few[0]) for many, few in zip(found["L3"], found["GPU"], strict=True)),
                key=lambda p: p[0] / p[1],
            )
        )
        + f" (last round: {less(last['L3'], last['GPU'])}; host memory alone: {less(last['L2'], last['GPU'])})",
    )


KIMI = TimingConfig(model="nvidia/Kimi-K2.5-NVFP4", gpu="b200", tensor_parallel_size=4)


def agent_run(what: Turns, workers: int, store_gib: float) -> Record:
    """Run all sessions of agents at once on workers of four B200, with round robin and 25 GB/s of the store per GPU."""
    engine = EngineConfig(kv_offloading_size=64.0 if store_gib else 0.0, offload_prompt_only=False)
    store = KvStoreConfig(kv_store_size=store_gib, kv_store_bandwidth_gb_s=100.0 * workers)
    return run(
        conversations(what, block_size=128), engine, KIMI, replicas=workers, router_mode="round-robin", kv_store=store
    )


def agents() -> Iterator[Row]:
    """Simulate Kimi K2.5 fp4 on 12 B200.

    Sessions have 33 turns, 5.2 s apart: 12,000 tokens at first, and 2,242 more per turn.
    """
    what = Turns(75, 33, 8000, 2000, 242, common=4096, delay_s=5.2, apart_s=0.2)
    without, with_it = agent_run(what, 3, 0.0), agent_run(what, 3, 4096.0)
    medians = [float(np.median(ttft(record))) for record in (without, with_it)]
    rates = [rate(record) for record in (without, with_it)]
    e2e = [float((record.requests.last_token_s - record.requests.sent_s).mean()) for record in (without, with_it)]
    yield Row(AGENTS, "hits, agents", "1.7% to 92.2%", f"{hits(without):.1%} to {hits(with_it):.1%}")
    yield Row(
        AGENTS,
        "median TTFT, agents",
        "46x lower",
        f"{medians[0] / medians[1]:.0f}x lower ({medians[0]:.2f} to {medians[1]:.2f} s)",
    )
    yield Row(AGENTS, "throughput, agents", "3.8x", f"{rates[1] / rates[0]:.1f}x")
    yield Row(AGENTS, "mean E2E latency, agents", "8.6x lower", f"{e2e[0] / e2e[1]:.1f}x lower")


def scaling() -> Iterator[Row]:
    """Simulate such sessions on 12 and on 36 GPUs: 30 turns, and 75 sessions for each 12 GPUs.

    All sessions share 20,000 tokens, and have 10,000 at first, then 2,048 and 900 of answer per turn.
    """
    rates, shares = [], []
    for part in (1, 3):
        what = Turns(75 * part, 30, 10_000, 2048, 900, common=20_480, apart_s=0.2 / part)
        record = agent_run(what, 3 * part, 8192.0 * part)
        rates.append(rate(record))
        shares.append(hits(record))
    yield Row(
        AGENTS,
        "throughput on 36 GPUs against 12, round robin, with the store",
        "nearly 3x",
        f"{rates[1] / rates[0]:.2f}x",
    )
    yield Row(AGENTS, "hits there", "above 95%", ", ".join(f"{share:.1%}" for share in shares))


SITUATIONS: dict[str, Callable[[], Iterator[Row]]] = {
    "vllm": vllm, "kvbm": kvbm, "hicache": hicache, "ssd": ssd, "agents": agents, "scaling": scaling,
}  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SITUATIONS, default=[*SITUATIONS])
    options = parser.parse_args()
    print("| source | what | published | ours |\n|---|---|---|---|")
    for name in options.only:
        for row in SITUATIONS[name]():
            print(f"| [{name}]({row.source}) | {row.what} | {row.published} | {row.ours} |", flush=True)


if __name__ == "__main__":
    main()
