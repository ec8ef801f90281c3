"""A frontend with prefill, decode and aggregated mockers behind it: real HTTP, real transfers, all in this process but what is
to be killed."""

import asyncio
import contextlib
import re
import subprocess
import sys
import threading

import httpx

from mocker.timing.config import divide
from serving.engines.mock.engine import EngineConfig, Mocker, TimingConfig
from serving.frontend.config import FrontendConfig
from serving.frontend.http.listening import listen
from serving.frontend.models import Models
from serving.frontend.server import serve_frontend
from serving.life import DisaggregationConfig
from serving.life.lease import LeaseConfig
from serving.router import RouterConfig
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from serving.transfer.config import TransferRunConfig
from serving.worker.config import WorkerConfig
from serving.worker.loop import run_worker
from tests.support.waiting import PATIENCE_S, instances, until

FAST = {"num_gpu_blocks": 2000, "block_size": 16, "speedup_ratio": 20.0}
TRANSFER = {"kv_bytes_per_token": 4096.0}
SAMPLE = re.compile(r"^(\w+)\{(.*)\} (\S+)$")


class Apart:
    """Starts and ends workers of a running frontend."""

    def __init__(self, folder, loop, *, frontend, disaggregation, engine):
        self._network = RuntimeConfig(etcd_endpoints="", nats_server="", discovery_dir=str(folder))
        self._loop = loop
        self._config = FrontendConfig(**{"http_port": 0, "router_mode": "kv", "drain_s": 5.0} | frontend)
        self._disaggregation = disaggregation
        self._engine = engine
        self._running = {}
        self._processes = []
        self._listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def do(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_S)

    async def serve(self):
        stopping = asyncio.Event()

        async def run():
            async with await DistributedRuntime.connect(self._network, stopping=stopping) as runtime:
                models = Models(runtime, self._config, RouterConfig(max_queue_depth=None), self._disaggregation)
                await serve_frontend(runtime, self._config, models, self._listener)

        self._running["frontend"] = asyncio.create_task(run()), stopping

    def worker(self, name, role, *, model="apart", lease=None, **engine):
        """Start a worker in this process."""

        async def start():
            dials, times = divide(FAST | self._engine | engine)
            worker = self._worker(role, model)
            transfer, keeps = TransferRunConfig(**TRANSFER), LeaseConfig(**lease or {})
            mocker = Mocker(worker, EngineConfig(**dials), TimingConfig(**times), transfer=transfer, lease=keeps)
            stopping = asyncio.Event()
            self._running[name] = asyncio.create_task(run_worker(self._network, worker, mocker, stopping)), stopping

        self.do(start())

    def process(self, role, *, model="apart", **engine):
        """Start a worker in a process of its own, which may be killed."""
        worker = self._worker(role, model)
        settings = {"discovery_dir": self._network.discovery_dir, "etcd_endpoints": "", "nats_server": ""}
        settings |= {"role": role, "endpoint": worker.endpoint, "model_name": model, "migration_limit": 3}
        settings |= FAST | self._engine | engine | TRANSFER
        words = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        process = subprocess.Popen([sys.executable, "-m", "serving.mocker", *words])
        self._processes.append(process)
        return process

    def stop(self, name):
        """Let one end as it does when it is asked to."""

        async def end():
            task, stopping = self._running.pop(name)
            stopping.set()
            await task

        self.do(end())

    def close(self):
        for process in self._processes:
            process.kill()
            process.wait()
        for name in [*self._running][::-1]:
            self.stop(name)

    def until_there(self, count):
        """Wait until so many workers can be routed to."""
        until(lambda: len(instances(self.url)) == count)

    def metrics(self):
        """Return every sample, by its name and then its labels."""
        found = {}
        for line in httpx.get(f"{self.url}/metrics").text.splitlines():
            if match := SAMPLE.match(line):
                labels = frozenset(re.findall(r'(\w+)="([^"]*)"', match[2]))
                found.setdefault(match[1], {})[labels] = float(match[3])
        return found

    def total(self, name, **labels):
        """Return the sum of a metric's samples that have these labels."""
        samples = self.metrics().get(name, {})
        return sum(value for found, value in samples.items() if labels.items() <= set(found))

    def _worker(self, role, model):
        endpoint = f"dyn://{model}.{'prefill' if role == 'prefill' else 'backend'}.generate"
        return WorkerConfig(endpoint=endpoint, role=role, model_name=model, migration_limit=3, drain_s=5.0)


@contextlib.contextmanager
def apart(folder, *, frontend=None, engine=None, **disaggregation):
    """Run a frontend; give what starts its workers."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    settings = DisaggregationConfig(**disaggregation)
    stack = Apart(folder, loop, frontend=frontend or {}, disaggregation=settings, engine=engine or {})
    try:
        stack.do(stack.serve())
        try:
            yield stack
        finally:
            stack.close()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
