"""Compare the two simulations, `rehearse` (live code on virtual time) and `simulate`, request by request; print a table.

    python benchmarks/agreement_of_simulations.py [--requests 200] [--only kv]

Each case is a deployment and a workload. Without a reason to differ, a case must be the same in both: the worker of each
request, what it found cached, and each time to 2 microseconds. The exit code is 1 if such a case differs. The cases are
also a test, with fewer requests (tests/dynabench/test_agreement_of_simulations.py), and the table is in docs/rehearsal.md.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from dynabench.arm import Run, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.overhead import OverheadConfig
from dynabench.rehearsal.agreement import Difference, differences, rehearsed
from dynabench.virtual.run import simulate
from mocker import EngineConfig
from reports.record.records import Requests
from serving.life import DisaggregationConfig
from serving.router import ROUTER_MODES, RouterConfig
from workloads import Workload
from workloads.pacing import LoadConfig
from workloads.synthesize import SynthConfig, synthesize

BLOCK = 512
ROUTER = RouterConfig(max_queue_depth=None)
"""Only live routers refuse requests when all workers are full."""
NO_OVERHEAD = OverheadConfig(request_overhead_ms=0, prompt_overhead_us=0, request_spacing_ms=0, answer_overhead_ms=0)
"""Delays outside of the engine, which a GPU's step times bring along."""

REPORTS = "live routers learn loads from reports, four a second"
NAMES = "the mode hashes blocks, whose names in a trace are not those of live prompts"
FRAMES = "a process sends at most one frame a millisecond to another, so a token may come 1 ms later"
PORTS = "live workers that read KV from one prefill worker at the same time do not share its port"
DRAWS = "whether a draft is accepted is drawn from the request's number, which a live engine gives itself"
REASONS = {"llmd-weighted": REPORTS, "chwbl": NAMES, "dualmap": NAMES}
"""Why a router mode differs."""
FRAME_S = 0.0010001


class Case(NamedTuple):
    """A deployment and a workload."""

    name: str
    deployment: Deployment
    workload: Workload
    load: LoadConfig = LoadConfig()
    why: str = ""
    """Why the two may differ; empty: they may not."""
    within_s: float | None = 0.0
    """By how much times may differ (s); None: decisions may differ, too."""


def made(requests: int, **settings: Any) -> Workload:
    """Make a workload whose prompts share prefixes."""
    dials = {"isl": 900, "osl": 40, "prefix_groups": 5, "rate": 30, "turns": 2} | settings
    return Workload("made", BLOCK, synthesize(SynthConfig(requests=requests, **dials)))


def busy(requests: int) -> Workload:
    """Make a workload whose queues change between two load reports."""
    return made(requests, rate=60, isl=2000)


def deployed(mode: str = "kv", workers: int = 4, *, pool: Pool | None = None, **parts: Any) -> Deployment:
    """Return workers of one kind."""
    parts = {"router": ROUTER, "overhead": NO_OVERHEAD} | parts
    return Deployment(router_mode=mode, pools=(replace(pool or Pool(), replicas=workers),), **parts)


def engine(**settings: Any) -> Pool:
    """Return a pool whose scheduler is vLLM's."""
    return Pool(mocker=EngineConfig(**settings))


def apart(mode: str, prefill: int = 2, decode: int = 2, *, engine_type: str = "vllm", **parts: Any) -> Deployment:
    """Return prefill and decode workers."""
    pool = Pool(engine_type=engine_type)  # type: ignore[arg-type]
    pools = (
        replace(pool, name="prefill", role="prefill", replicas=prefill),
        replace(pool, name="decode", role="decode", replicas=decode),
    )
    return Deployment(router_mode=mode, pools=pools, router=ROUTER, overhead=NO_OVERHEAD, **parts)


def cases(requests: int) -> Iterator[Case]:
    """Yield every case, with workloads of so many requests."""
    many = made(requests)
    yield Case("1 worker", deployed("round-robin", 1), made(requests, rate=8))
    for mode in ROUTER_MODES:
        if not mode.startswith("oracle"):
            why, workload = REASONS.get(mode, ""), busy(requests) if mode == "llmd-weighted" else many
            yield Case(f"4 workers, {mode}", deployed(mode), workload, why=why, within_s=None if why else 0.0)
    yield Case("16 workers, kv", deployed(workers=16), made(requests, rate=120))
    yield from _loads(requests)
    yield from _routers(many)
    yield from _engines(requests, many)
    yield from _apart(made(requests, rate=8))


def _loads(requests: int) -> Iterator[Case]:
    kv, waits = deployed(), {"turns": 4, "rate": 6, "wait_for_answers": True}
    yield Case("kv, turns that wait for answers", kv, made(requests, **waits))
    yield Case("kv, 16 requests at a time", kv, made(requests, turns=1), LoadConfig(concurrency=16))
    yield Case("kv, 8 sessions at a time", kv, made(requests, turns=4), LoadConfig(session_concurrency=8))
    yield Case("kv, at most 8 requests at a time", kv, made(requests), LoadConfig(max_concurrency=8))
    bursts = [msgspec.structs.replace(one, arrival_s=round(one.arrival_s, 1)) for one in made(requests).requests]
    yield Case("kv, bursts every 0.1 s", kv, Workload("bursts", BLOCK, bursts))


def _routers(many: Workload) -> Iterator[Case]:
    yield Case("kv, no KV events", deployed(router=replace(ROUTER, use_kv_events=False)), many)
    yield Case("kv, temperature 0.5", deployed(router=replace(ROUTER, router_temperature=0.5)), many)
    yield Case("least-loaded+stale(500)", deployed("least-loaded+stale(500)"), many)
    yield Case("kv+bound(1.2)", deployed("kv+bound(1.2)"), many)


def _engines(requests: int, many: Workload) -> Iterator[Case]:
    h100 = replace(Pool().timing, gpu="h100", model="meta-llama/Llama-3.1-8B")
    drafts, names = {"num_speculative_tokens": 3}, "adapter-0,adapter-1,adapter-2,adapter-3"
    yield Case("kv, few KV blocks (preemptions)", deployed(pool=engine(num_gpu_blocks=200)), many)
    yield Case("kv, no prefix caching", deployed(pool=engine(enable_prefix_caching=False)), many)
    yield Case("kv, synchronous scheduling", deployed(pool=engine(async_scheduling=False)), many)
    yield Case("kv, 4 LoRA adapters", _lora(names), made(requests, turns=1, adapters=4))
    offloads = {"num_gpu_blocks": 200, "kv_offloading_size": 0.5}
    yield Case("kv, host memory", deployed(pool=engine(**offloads)), many)
    yield Case("kv, host memory and disk", deployed(pool=engine(**offloads, kv_disk_size=10)), many)
    two_ranks = deployed(workers=2, pool=engine(dp_size=2))
    yield Case("kv, 2 workers of 2 ranks", two_ranks, many, why=FRAMES, within_s=FRAME_S)
    experts = replace(h100, model="Qwen/Qwen3-30B-A3B", enable_expert_parallel=True)
    shared = deployed(workers=2, pool=replace(engine(dp_size=2), timing=experts))
    yield Case("kv, 2 workers of 2 ranks that share experts", shared, many)
    yield Case("kv, Llama 3.1 8B on H100", deployed(pool=Pool(timing=h100)), many)
    yield Case("kv, pipeline of 2 GPUs", deployed(pool=Pool(timing=replace(h100, pipeline_parallel_size=2))), many)
    sure = EngineConfig(**drafts, acceptance_rates="1,1,0")
    yield Case("kv, drafts, known which are accepted", deployed(pool=Pool(timing=h100, mocker=sure)), many)
    drawn = EngineConfig(**drafts, acceptance_length=2.1)
    yield Case("kv, drafts", deployed(pool=Pool(timing=h100, mocker=drawn)), many, why=DRAWS, within_s=None)
    yield Case("kv, SGLang's scheduler", deployed(pool=Pool(engine_type="sglang")), many)
    yield Case("kv, TensorRT-LLM's scheduler", deployed(pool=Pool(engine_type="trtllm")), many)


def _lora(names: str) -> Deployment:
    return deployed(pool=engine(enable_lora=True, max_loras=2, lora_modules=names))


def _apart(few: Workload) -> Iterator[Case]:
    yield Case("2 prefill, 2 decode, round-robin", apart("round-robin"), few)
    yield Case("2 prefill, 1 decode, kv", apart("kv", decode=1), few)
    yield Case("2 prefill, 2 decode, kv", apart("kv"), few, why=PORTS, within_s=None)
    bypass = DisaggregationConfig(conditional_disagg="isl_or_load")
    yield Case("the same, short prompts stay", apart("kv", disaggregation=bypass), few, why=PORTS, within_s=None)
    meets = DisaggregationConfig(flow="destination-first")
    there = apart("round-robin", disaggregation=meets)
    yield Case("decode workers first, round-robin", there, few, why=FRAMES, within_s=FRAME_S)
    for name in ("sglang", "trtllm"):
        own = apart("round-robin", engine_type=name)
        yield Case(f"2 prefill, 2 decode, {name}", own, few, why=FRAMES, within_s=FRAME_S)


def carried_out(case: Case) -> tuple[Requests, Requests]:
    """Return what each simulation measured: the rehearsal, then the fast one."""
    run = Run.alone(Settings(case.deployment, load=case.load))
    return rehearsed(run, case.workload).requests, simulate(run, case.workload).requests


def unexpected(case: Case, found: list[Difference]) -> list[Difference]:
    """Return the differences for which a case gives no reason."""
    within_s = case.within_s
    if within_s is None:
        return []
    return [one for one in found if not (case.why and one.column.endswith("_s") and one.largest <= within_s)]


def row(case: Case, rehearsed: Requests, simulated: Requests, found: list[Difference]) -> str:
    """Return a row of the table."""
    if not found:
        return f"| {case.name} | {len(rehearsed)} | 0 | 0 | 0 | {f'none here; may: {case.why}' if case.why else ''} |"
    moved = next((one.num_requests for one in found if one.column == "worker"), 0)
    late_s = next((one.largest for one in found if one.column == "first_token_s"), 0.0)
    ours, theirs = (float((each.first_token_s - each.sent_s).mean()) for each in (rehearsed, simulated))
    share = f"{(ours / theirs - 1) * 100:+.1f}%"
    return f"| {case.name} | {len(rehearsed)} | {moved} | {late_s * 1000:.3g} ms | {share} | {case.why or 'defect'} |"


def main() -> int:
    """Print the table; return 1 if a case differs that should not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="requests of each case (default: 200)")
    parser.add_argument("--only", default="", help="only cases with this in their name")
    options, defects = parser.parse_args(), list[str]()
    print(
        "| deployment | requests | other worker | largest difference of TTFT | mean TTFT | why |\n|---|---|---|---|---|---|"
    )
    for case in cases(options.requests):
        if options.only not in case.name:
            continue
        ours, theirs = carried_out(case)
        found = differences(ours, theirs)
        print(row(case, ours, theirs, found), flush=True)
        defects += [f"{case.name}: {one}" for one in unexpected(case, found)]
    for defect in defects:
        print(defect, file=sys.stderr)
    return bool(defects)


if __name__ == "__main__":
    sys.exit(main())
