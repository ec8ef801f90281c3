"""Real stacks of processes, for the tests."""

import asyncio
import contextlib
import threading

from dynabench.deployment.description import Deployment, Pool
from dynabench.live.stack import LocalStack
from mocker import EngineConfig
from mocker.timing.config import TimingConfig, divide
from serving.engines.mock.config import AnswerConfig
from serving.frontend.config import FrontendConfig
from serving.router import RouterConfig
from serving.worker.config import WorkerConfig
from tests.support.waiting import PATIENCE_S


@contextlib.contextmanager
def running(num_workers=2, frontend=None, router=None, worker=None, engine=None, answers=None, runtime=None, **options):
    """Run a stack in the background; give it."""
    dials, times = divide({"num_gpu_blocks": 2000, "block_size": 16, "speedup_ratio": 20.0} | (engine or {}))
    served = {"http_port": 0, "router_mode": "kv", "drain_s": 5.0} | (frontend or {})
    pool = Pool(
        replicas=num_workers,
        mocker=EngineConfig(**dials),
        timing=TimingConfig(**times),
        answers=AnswerConfig(**(answers or {})),
        worker=WorkerConfig(**({"migration_limit": 3, "drain_s": 5.0} | (worker or {}))),
    )
    deployment = Deployment(
        pools=(pool,),
        router_mode=served.pop("router_mode"),
        router=RouterConfig(**(router or {})),
        frontend=FrontendConfig(**served),
        runtime=runtime,
    )
    stack = LocalStack(deployment, **options)
    stack._start_timeout_s = PATIENCE_S
    with in_background(stack):
        yield stack


@contextlib.contextmanager
def in_background(stack):
    """Run a stack in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def do(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(300)

    try:
        do(stack.__aenter__())
        try:
            yield
        finally:
            do(stack.stop())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
