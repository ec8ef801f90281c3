"""One run over real HTTP, on the wall clock."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import uvloop

from dynabench.apis import endpoint_of
from dynabench.arm import ClientConfig, Run
from dynabench.deployment.description import OWN, Deployment, Pool
from dynabench.deployment.engines import check_fits, check_one_model, engines_of
from dynabench.deployment.engines import context_of as longest
from dynabench.deployment.processes import check_engines
from dynabench.interrupt import Interrupt, InterruptError
from dynabench.live.bodies import MeasuredServer
from dynabench.live.clients import ClientRecords, Order, send_all
from dynabench.live.enough import Enough
from dynabench.live.fleet import num_ranks_of, offset_of, with_fleet
from dynabench.live.http_client import clock
from dynabench.live.kv_watch import KvWatch
from dynabench.live.models import reported_context
from dynabench.live.server_watch import ServerWatch
from dynabench.live.stack import LocalStack, StackError
from dynabench.live.validity import spoilt
from dynabench.live.view import View
from dynabench.live.warm_up import num_warmups, warm_up
from dynabench.planner.programs import check_planner
from reports.figures.adapters import adapters_asked
from reports.record.pools import KvOverTime, PoolUse
from reports.record.records import Record
from serving.model.card import Role
from serving.model.errors import ModelError
from serving.model.files import vocab_size
from serving.router import wants_kv_events
from workloads import Workload, WorkloadError
from workloads.describe import ends
from workloads.media import refuse_media
from workloads.tokens import TOKENS, tokens_of

STOPPING = "interrupted: writing the results so far without the requests in progress; Ctrl-C again stops at once"
STOPPING_EARLY = "interrupted while the stack was starting: stopping its processes; Ctrl-C again stops at once"


def measure(
    run: Run,
    workload: Workload,
    *,
    view: View | None = None,
    on_start: Callable[[float], None] | None = None,
    interrupt: Interrupt | None = None,
    enough: Enough | None = None,
) -> Record:
    """Start a fresh stack, replay the workload over HTTP, and stop the stack.

    With a URL nothing is started, and the server at that URL is measured; a salt prevents hits in caches of other runs.
    `on_start` is called with the start time of the run, on the client's clock. An interrupt ends the run early and
    keeps the results so far. `enough` says when nothing more needs to be sent.

    Raises:
        InterruptError: the user interrupted before the stack was up.
        StackError: the stack did not start.
        WorkloadError: a request can never fit.
        ValueError: the deployment serves several models.
        KeyboardInterrupt: the user interrupted twice.
    """
    client = run.settings.client
    assert client is not None
    if client.size_of_images is None:
        what = "are sent over HTTP only as images of a size (--url with --api chat and --image-size 512x512)"
        refuse_media(workload.columns, workload.name, what)
    check_history(client, workload)
    if client.url is None:
        _check_ends(client, workload)
        run = serving_adapters(on_this_host(run), workload)
        if not (_runs_model(run.deployment) or run.deployment.pools[0].engine in OWN):
            for engine in set(engines_of(run.deployment)):
                check_fits(workload, engine, fail_on_too_long=run.settings.load.fail_on_too_long)

    async def whole(stop: asyncio.Event, is_up: asyncio.Event) -> Record:
        async with _target(client, run.deployment, run.seed) as (target, stack):
            is_up.set()
            runs_model = client.url is None and _runs_model(run.deployment)
            if runs_model or "stop" in ends(workload):
                target = target._replace(context=await reported_context(target))
            if runs_model and run.settings.load.fail_on_too_long:
                _check_fits(workload, target)
            if count := num_warmups(client, run.deployment):
                await warm_up(workload, target, count, client.timeout_s, stop)
            async with _watching_server(target, client) as server:
                start = clock()
                if on_start is not None:
                    on_start(start)
                async with (
                    _watching_kv(target, run.deployment) if client.url is None else contextlib.nullcontext() as watch
                ):
                    sent = await _send(run, client, workload, target, stop, view, enough)
                    wall_s = clock() - start
                said = None if server is None else await server.finish(sent.requests, start)
            dead = stack.group.dead if stack is not None else []
            record = _record(run, client, sent, wall_s=wall_s, is_complete=not stop.is_set(), dead=dead)
            record = replace(record, server=said)
            if watch is None or stack is None:
                return record
            kv = _kv_use(run.deployment, watch)
            tiers, drafts = watch.tiers.uses(run.deployment, wall_s), watch.drafts.uses(run.deployment, workload)
            record = replace(record, kv=kv, tiers=tiers, drafts=drafts)
            return with_fleet(record, stack.hands.fleet_use(start, start + wall_s), run.deployment)

    with contextlib.ExitStack() as stack:
        return uvloop.run(_interruptible(whole, interrupt or stack.enter_context(Interrupt()), view))


async def _send(
    run: Run,
    client: ClientConfig,
    workload: Workload,
    target: MeasuredServer,
    stop: asyncio.Event,
    view: View | None,
    enough: Enough | None,
) -> ClientRecords:
    """Send the workload."""
    salt = secrets.token_hex(8) if client.url is not None else ""
    order = Order(workload, target, run.settings.load, salt, client.timeout_s, enough)
    on_stats = view.update if view is not None else None
    return await send_all(order, num_clients=client.clients, stop=stop, on_stats=on_stats)


def _record(
    run: Run, client: ClientConfig, sent: ClientRecords, *, wall_s: float, is_complete: bool, dead: list[str]
) -> Record:
    """Return the measurements, with notes on what distorts them."""
    notes = [f"{', '.join(dead)} died during the run"] if dead else []
    notes += spoilt(sent, run.settings.load, is_complete=is_complete, max_failed_share=client.max_failed_share)
    return Record(
        run.arm.name,
        sent.requests,
        sent.gaps,
        wall_s,
        _num_workers(run.deployment, client, sent),
        repeat=run.repeat,
        is_complete=is_complete,
        notes=tuple(notes),
        facts=run.settings.load.facts | sent.facts,
        is_live=True,
        pools=_pools(run.deployment) if client.url is None else (),
        adapters=adapters_asked(sent.requests),
    )


def _num_workers(deployment: Deployment, client: ClientConfig, sent: ClientRecords) -> int:
    """Return how many workers there are; of another server, those that its answers name (none named: one)."""
    if client.url is None:
        return sum(map(num_ranks_of, deployment.pools))
    named = sent.requests.worker.compressed()
    return int(named.max()) + 1 if len(named) else 1


def _watching_server(
    target: MeasuredServer, client: ClientConfig
) -> contextlib.AbstractAsyncContextManager[ServerWatch | None]:
    if client.url is None or not client.server_metrics:
        return contextlib.nullcontext()
    return ServerWatch(target, client.metrics_url).watching()


def _watching_kv(target: MeasuredServer, deployment: Deployment) -> contextlib.AbstractAsyncContextManager[KvWatch]:
    num_ranks: dict[str, int] = {}
    for pool in deployment.pools:
        num_ranks[pool.role] = num_ranks.get(pool.role, 0) + num_ranks_of(pool)
    speculates = any(pool.engine == "mocker" and pool.mocker.num_speculative_tokens for pool in deployment.pools)
    return KvWatch(target.url, num_ranks, has_counts=speculates).watching()


def _kv_use(deployment: Deployment, watch: KvWatch) -> tuple[KvOverTime, ...]:
    """Return the KV use over time: by pool, or by role if several pools have the same one."""
    names: dict[str, list[str]] = {}
    for pool in deployment.pools:
        names.setdefault(pool.role, []).append(pool.name)
    return tuple(
        KvOverTime(names[role][0] if len(names[role]) == 1 else role, *shares)
        for role, shares in watch.shares().items()
        if role in names
    )


def _pools(deployment: Deployment) -> tuple[PoolUse, ...]:
    """Return the pools in the order in which their workers are numbered: pools that only prefill come first."""
    pools = sorted(deployment.pools, key=lambda pool: pool.role != "prefill")
    return tuple(PoolUse(pool.name, pool.role, num_ranks_of(pool), pool.num_gpus) for pool in pools if pool.replicas)


def on_this_host(run: Run) -> Run:
    """Return a run whose workers report what the router mode needs, with a context that suits their engines.

    Raises:
        ValueError: the deployment serves several models, or its planner cannot plan it.
    """
    deployment = run.deployment
    check_one_model(deployment)
    check_planner(deployment)
    known: dict[str, Any] = {}
    if deployment.pools[0].engine == "mocker":
        known["context_length"] = longest(engines_of(deployment))
    pools = tuple(
        replace(pool, worker=replace(pool.worker, kv_events=_wants_kv_events(deployment, pool.role), **known))
        for pool in deployment.pools
    )
    settings = replace(run.settings, deployment=replace(deployment, pools=pools))
    return replace(run, arm=replace(run.arm, settings=settings))


def _wants_kv_events(deployment: Deployment, role: Role) -> bool:
    """Return whether a router needs a role's KV events; it needs those of decode workers only for local prompts."""
    if role == "decode":
        return deployment.disaggregation.conditional_disagg != "never" and deployment.router.use_kv_events
    return wants_kv_events(deployment.mode_of(role), deployment.router)


def _runs_model(deployment: Deployment) -> bool:
    return deployment.pools[0].runs_model


async def _interruptible(
    run: Callable[[asyncio.Event, asyncio.Event], Any], interrupt: Interrupt, view: View | None
) -> Record:
    """Carry out a run; a signal ends it early, or cancels it while its stack starts, and a second one ends it at once."""
    stop, is_up, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()
    running = asyncio.ensure_future(run(stop, is_up))

    def obey() -> None:
        if not stop.is_set() and view is not None:
            view.say(STOPPING if is_up.is_set() else STOPPING_EARLY)
        if stop.is_set() or not is_up.is_set():
            running.cancel()
        stop.set()

    with interrupt.heard_by(lambda: loop.call_soon_threadsafe(obey)):
        await asyncio.wait([running])
    if running.cancelled():
        raise KeyboardInterrupt if is_up.is_set() else InterruptError
    result: Record = running.result()
    return result


@contextlib.asynccontextmanager
async def _target(
    client: ClientConfig, deployment: Deployment, seed: int
) -> AsyncIterator[tuple[MeasuredServer, LocalStack | None]]:
    """Yield the server to measure, and the stack if it is our own."""
    pool = deployment.pools[0]
    if client.url is not None:
        yield server_at(client.url, pool.served_name, client), None
        return
    check_engines(deployment)
    tokens = await asyncio.to_thread(tokens_of_model, pool)
    async with LocalStack(deployment, seed=seed) as stack:
        target = MeasuredServer(
            stack.url,
            stack.model,
            client.way.prompts,
            api=client.way.api,
            is_ours=True,
            sends_text=pool.engine == "mistralrs",  # bytes of an incomplete character come with the next piece
            splits_answers=any(
                pool.worker.tool_call_parser or pool.worker.reasoning_parser for pool in deployment.pools
            ),
            tokens=tokens,
            num_prefill_workers=offset_of(deployment),
            extra_body=client.body_fields,
            repeats_answers=client.history == "server",
        )
        yield target, stack


def server_at(url: str, model: str, client: ClientConfig) -> MeasuredServer:
    """Return another server, with what a client sends to it.

    Raises:
        ValueError: the address is not understood, or names another API than the client's settings.
    """
    client = replace(client, url=url)
    return MeasuredServer(
        endpoint_of(url).base,
        model,
        client.way.prompts,
        client.api_key,
        extra_headers=client.headers,
        extra_body=client.body_fields,
        ca_file=client.ca_file,
        insecure=client.insecure,
        proxy=client.proxy,
        repeats_answers=client.history == "server",
        image_size=client.size_of_images,
        is_streamed=client.stream,
        api=client.way.api,
    )


def check_history(client: ClientConfig, workload: Workload) -> None:
    """Refuse a history of answers where no turn waits for one.

    Raises:
        WorkloadError: it is asked for, and no turn waits.
    """
    if client.history == "server" and not any(request.session and request.after for request in workload):
        raise WorkloadError(
            f"{workload.name}: no request waits for an earlier one of its session, so none can repeat the server's answer; leave "
            "out --history, or use a workload whose sessions wait (of bench: --turns 4; workload synth --turns 4 "
            "--wait-for-answers; of files: dynabench workload formats)"
        )


def tokens_of_model(pool: Pool) -> range:
    """Return the tokens that prompts for a pool's engine are made of.

    Raises:
        StackError: the model's files cannot be loaded.
    """
    if not pool.runs_model:
        return TOKENS
    try:
        return tokens_of(vocab_size(pool.model))
    except ModelError as error:
        raise StackError(str(error)) from error


def serving_adapters(run: Run, workload: Workload) -> Run:
    """Let simulated engines that may serve adapters serve those that the workload's requests name, unless some are given.

    Raises:
        WorkloadError: real engines would have to serve them.
    """
    names = workload.columns.adapters
    if not names:
        return run
    pools = []
    for pool in run.deployment.pools:
        if pool.engine != "mocker":
            raise WorkloadError(
                f"{workload.name}: requests ask for adapters, the first for {names[0]!r}, and workers with engine {pool.engine} "
                "serve none; expected --url with a server that does, or engine mocker"
            )
        mocker = pool.mocker
        if mocker.enable_lora and not mocker.lora_modules:
            mocker = replace(mocker, lora_modules=",".join(names))
        pools.append(replace(pool, mocker=mocker))
    deployment = replace(run.deployment, pools=tuple(pools))
    return replace(run, arm=replace(run.arm, settings=replace(run.settings, deployment=deployment)))


def _check_ends(client: ClientConfig, workload: Workload) -> None:
    """Refuse answers that end by EOS where our own frontend cannot be told after how many tokens that is."""
    if client.way.api in ("responses", "messages") and "stop" in ends(workload):
        raise WorkloadError(
            f"{workload.name}: answers end by EOS (--ends stop), and api {client.way.api} has no field that says where; use "
            "--api chat"
        )


def _check_fits(workload: Workload, target: MeasuredServer) -> None:
    """Refuse a workload with a request that is too long for the model."""
    for number, request in enumerate(workload.requests):
        if target.context is not None and request.input_length + request.output_length > target.context:
            raise WorkloadError(
                f"{workload.name}: request {number} has {request.input_length} prompt and {request.output_length} "
                f"output tokens, more than the {target.context} of {target.model}'s context; cut prompts with --cap-isl, or leave out "
                "--fail-on-too-long"
            )
