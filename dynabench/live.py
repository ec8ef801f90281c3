"""One arm of an experiment over real HTTP, on the wall clock."""

import asyncio
import signal
import time
from collections.abc import Callable

import numpy as np
import uvloop

from dynabench.launch import LocalStack
from dynabench.load import as_columns, replay
from dynabench.virtual import check_fits
from mocker import EngineConfig
from reports.records import ArmResult
from serving.router import RouterConfig
from workloads import Workload

LATE_S = 0.1
"""A client whose 99th percentile of (sent - intended) is above this spoiled the run."""


def run_live(
    workload: Workload,
    *,
    mode: str,
    engine: EngineConfig,
    router: RouterConfig,
    num_workers: int,
    seed: int,
    host: str = "127.0.0.1",
    port: int = 0,
    model: str = "mock",
    timeout_s: float = 600.0,
    on_progress: Callable[[int], None] | None = None,
) -> ArmResult:
    """Start a fresh stack, replay the workload over HTTP, and stop the stack; Ctrl-C ends it early and keeps what came.

    Raises:
        LaunchError: the stack did not start.
        WorkloadError: a request can never fit.
    """
    check_fits(workload, engine)

    async def run() -> ArmResult:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
        stack = LocalStack(
            mode=mode,
            engine=engine,
            router=router,
            num_workers=num_workers,
            seed=seed,
            model=model,
            host=host,
            port=port,
        )
        async with stack:
            started = time.perf_counter()
            timeline = await replay(
                workload,
                url=stack.url,
                model=model,
                salt="",
                timeout_s=timeout_s,
                stop=stop,
                on_progress=on_progress,
            )
            wall_s = time.perf_counter() - started
            dead = stack.dead()
        columns = as_columns(timeline, workload)
        notes = []
        if dead:
            notes.append(f"{', '.join(dead)} died during the run")
        lag = columns["sent_s"] - columns["intended_s"]
        if len(lag) and (late := float(np.percentile(lag, 99))) > LATE_S:
            notes.append(
                f"the client was late: 1 % of the requests were sent {late * 1000:.0f} ms or more after their time "
                f"(limit {LATE_S * 1000:.0f} ms); lower the rate"
            )
        gaps = np.array(timeline.gaps).reshape(-1, 5)
        result = ArmResult(mode, columns, gaps, wall_s, num_workers * engine.dp_size, is_complete=not stop.is_set())
        result.notes = tuple(notes)
        return result

    return uvloop.run(run())
