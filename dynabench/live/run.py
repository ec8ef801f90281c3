"""One arm of an experiment over real HTTP, on the wall clock."""

import asyncio
import contextlib
import os
import secrets
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import numpy as np
import uvloop

from dynabench.experiment.settings import MAX_FAILED_SHARE, LiveConfig
from dynabench.interrupt import Interrupt, InterruptError
from dynabench.live.clients import Order, Sent, send_all
from dynabench.live.http_client import clock
from dynabench.live.load import Target
from dynabench.live.stack import LaunchError, LocalStack
from dynabench.live.view import LiveView
from dynabench.virtual.run import check_fits
from mocker import EngineConfig
from reports.records import Record
from serving.frontend.config import FrontendConfig
from serving.model.card import ModelError, vocab_size
from serving.router import RouterConfig, wants_kv_events
from serving.runtime.config import RuntimeConfig
from serving.worker.config import ModelRunConfig, WorkerConfig
from serving.worker.engine import EngineChoice, EngineError, check_installed, make_engine
from workloads import Request, Workload, WorkloadError
from workloads.pacing import LoadConfig
from workloads.tokens import TOKENS, tokens_of

WARMUPS = 8
WARMUP_TOKENS = 8
LATE_S = 0.1
"""A client whose 99th percentile of (sent - intended) is above this spoiled the run."""
BUSY = 0.9
"""So did one that used more of a core than this: its stamps waited for it."""
BEHIND = 0.95
"""So did one that sent at less than this share of the intended rate."""


STOPPING = "interrupted: writing what was measured; requests in progress are given up; Ctrl-C again stops at once"
STOPPING_EARLY = "interrupted while the stack was starting: ending its processes; Ctrl-C again stops at once"


def run_live(
    workload: Workload,
    *,
    live: LiveConfig,
    mode: str,
    engine: EngineConfig,
    router: RouterConfig,
    num_workers: int,
    seed: int,
    load: LoadConfig = LoadConfig(),  # noqa: B008 (frozen)
    view: LiveView | None = None,
    engine_flags: tuple[str, ...] = (),
    on_start: Callable[[float], None] | None = None,
    interrupt: Interrupt | None = None,
) -> Record:
    """Start a fresh stack, replay the workload over HTTP, and stop the stack.

    With `live.url` nothing is started, and whatever answers there is measured; a salt keeps caches of other runs out.
    `on_start` is told when the run begins, on the client's clock. An interrupt ends it early and keeps what came.

    Raises:
        InterruptError: the user asked to end before the stack was up.
        LaunchError: the stack did not start.
        WorkloadError: a request can never fit.
        KeyboardInterrupt: the user asked twice.
    """
    if live.url is None and live.engine == "mocker":
        check_fits(workload, engine)

    async def run(stop: asyncio.Event, is_up: asyncio.Event) -> Record:
        async with _target(live, mode, engine, router, num_workers, seed, engine_flags) as (target, dead):
            is_up.set()
            if live.engine != "mocker":
                await _check_context(workload, target)
            if count := _num_warmups(live, num_workers):
                await warm_up(workload, target, count, live.timeout_s, stop)
            start = clock()
            if on_start is not None:
                on_start(start)
            salt = secrets.token_hex(8) if live.url is not None else ""
            order = Order(workload, target, load, salt, live.timeout_s)
            sent = await send_all(
                order, num_clients=live.clients, stop=stop, on_stats=view.update if view is not None else None
            )
            wall_s = clock() - start
            lost = dead()
        notes = [f"{', '.join(lost)} died during the run"] if lost else []
        notes += spoilt(sent, load, is_complete=not stop.is_set(), max_failed_share=live.max_failed_share)
        return Record(
            mode,
            sent.requests,
            sent.gaps,
            wall_s,
            num_workers * engine.dp_size,
            is_complete=not stop.is_set(),
            notes=tuple(notes),
            facts=sent.facts,
            is_live=True,
        )

    with contextlib.ExitStack() as stack:
        return uvloop.run(_interruptible(run, interrupt or stack.enter_context(Interrupt())))


async def _interruptible(run: Callable[[asyncio.Event, asyncio.Event], Any], interrupt: Interrupt) -> Record:
    """Carry out a run; the first signal ends it early, or abandons it before its stack is up, and the second ends it at once."""
    stop, is_up, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()
    running = asyncio.ensure_future(run(stop, is_up))

    def obey() -> None:
        if not stop.is_set():
            print(STOPPING if is_up.is_set() else STOPPING_EARLY, file=sys.stderr)
        if stop.is_set() or not is_up.is_set():
            running.cancel()
        stop.set()

    with interrupt.heard_by(lambda: loop.call_soon_threadsafe(obey)):
        await asyncio.wait([running])
    if running.cancelled():
        raise KeyboardInterrupt if is_up.is_set() else InterruptError
    result: Record = running.result()
    return result


def _num_warmups(live: LiveConfig, num_workers: int) -> int:
    if live.warmup_requests is not None:
        return live.warmup_requests
    return 0 if live.engine == "mocker" else WARMUPS * num_workers


async def warm_up(workload: Workload, target: Target, count: int, timeout_s: float, stop: asyncio.Event) -> None:
    """Send requests as long as the workload's, evenly from its shortest to its longest prompt, and forget them."""
    ordered = sorted(workload.requests, key=lambda request: request.input_length)
    chosen = [ordered[(len(ordered) - 1) * (place + 1) // count] for place in range(count)]
    requests = [
        Request(0.0, request.input_length, min(request.output_length, WARMUP_TOKENS), (place,))
        for place, request in enumerate(chosen)
    ]
    load = LoadConfig(concurrency=max(count // 4, 1))
    whole = max(ordered[-1].input_length, 1)  # no two prompts share a block
    order = Order(Workload("warm-up", whole, requests), target, load, secrets.token_hex(8), timeout_s)
    await send_all(order, num_clients=1, stop=stop)


def spoilt(sent: Sent, load: LoadConfig, *, is_complete: bool, max_failed_share: float = MAX_FAILED_SHARE) -> list[str]:
    """Say what spoiled the run: failed requests, or the client itself; such a run is not valid."""
    requests, notes = sent.requests, []
    errors = [error for error in requests.error if error]
    if errors and len(errors) == len(requests):
        notes.append(f"every request failed, the first with: {errors[0]}")
        return notes
    attempted = requests.error[requests.is_measured]
    counts = Counter(error for error in attempted if error)
    if counts.total() > max_failed_share * len(attempted):
        notes.append(
            f"{counts.total():,} of {len(attempted):,} requests failed ({counts.total() / len(attempted):.1%}, more than "
            f"--max-failed-share {max_failed_share:.3g}), most often with: {counts.most_common(1)[0][0]}"
        )
    known = ~requests.sent_s.mask
    intended, actual = requests.intended_s[known], requests.sent_s.data[known]
    if not len(intended):
        return notes
    if load.max_concurrency is None:
        late = float(np.percentile(actual - intended, 99))
        if late > LATE_S:
            notes.append(
                f"the client was late: 1% of the requests were sent {late * 1000:.0f} ms or more after their time "
                f"(limit {LATE_S * 1000:.0f} ms); lower the rate, or send from several processes (--clients 2)"
            )
        span, took = float(np.ptp(intended)), float(np.ptp(actual))
        if not load.is_closed and is_complete and span > 1 and span / took < BEHIND:
            notes.append(
                f"the client sent at {span / took:.0%} of the intended rate; lower the rate, or use --clients 2"
            )
    busy = sent.facts["cpu_share"]
    if busy > BUSY:
        notes.append(
            f"the client used {busy:.0%} of a core, so its clock readings came late; lower the rate, or use --clients 2"
        )
    return notes


@contextlib.asynccontextmanager
async def _target(
    live: LiveConfig,
    mode: str,
    engine: EngineConfig,
    router: RouterConfig,
    num_workers: int,
    seed: int,
    engine_flags: tuple[str, ...],
) -> AsyncIterator[tuple[Target, Callable[[], list[str]]]]:
    """Give what is to be measured, and what tells which of its processes died."""
    model = engine.model or "mock"
    if live.url is not None:
        key = os.environ.get("OPENAI_API_KEY", "")
        yield Target(live.url.rstrip("/").removesuffix("/v1"), model, live.prompts, key), list
        return
    is_mocker = live.engine == "mocker"
    worker = WorkerConfig(
        model_name=model if is_mocker else "",
        model_path="" if is_mocker else model,
        kv_events=wants_kv_events(mode, router),
        context_length=engine.num_usable_blocks * engine.block_size + 1 if is_mocker else live.context_length,
    )
    choice = None if is_mocker else _choice(live, worker, engine_flags)
    try:
        tokens = TOKENS if is_mocker else tokens_of(await asyncio.to_thread(vocab_size, model))
    except ModelError as error:
        raise LaunchError(str(error)) from error
    stack = LocalStack(
        frontend=FrontendConfig(
            http_port=live.http_port,
            http_workers=live.http_workers,
            router_mode=mode,
            seed=seed,
            migration_limit=live.migration_limit,
        ),
        router=router,
        worker=worker,
        engine=choice or engine,
        num_workers=num_workers,
        runtime=RuntimeConfig(etcd_endpoints=live.etcd_endpoints, nats_server=live.nats_server)
        if live.etcd_endpoints or live.nats_server
        else None,
    )
    async with stack:
        # mistral.rs gives text: what it holds back of a character comes with the next piece.
        counts_events = live.engine != "mistralrs"
        target = Target(stack.url, stack.model, live.prompts, "", is_ours=counts_events, tokens=tokens, has_nvext=True)
        yield target, lambda: stack.group.dead


def _choice(live: LiveConfig, worker: WorkerConfig, flags: tuple[str, ...]) -> EngineChoice:
    """Return the engine that runs a model, once it is sure that it is there and takes its settings.

    Raises:
        LaunchError: it is not, or does not.
    """
    run = ModelRunConfig(extra_engine_args=live.extra_engine_args)
    try:
        make_engine(live.engine, worker, run, flags)
        check_installed(live.engine)
    except (EngineError, ValueError) as error:
        raise LaunchError(str(error)) from error
    return EngineChoice(live.engine, run, flags)


async def _check_context(workload: Workload, target: Target) -> None:
    """Refuse a workload with a request that the model cannot hold.

    Raises:
        WorkloadError: the first such request, and what would help.
    """
    async with aiohttp.ClientSession() as session, session.get(f"{target.url}/v1/models") as response:
        limit = (await response.json())["data"][0]["max_model_len"]
    for number, request in enumerate(workload.requests):
        if request.input_length + request.output_length > limit:
            raise WorkloadError(
                f"{workload.name}: request {number} has {request.input_length} prompt and {request.output_length} "
                f"output tokens, more than the {limit} of {target.model}'s context; cut prompts with --cap-isl"
            )
