"""Routers that predict times get the costs of steps from the workers."""

import uvloop

from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from serving.engines.mock.engine import Mocker
from serving.frontend.config import FrontendConfig
from serving.frontend.models import Models
from serving.model.card import ModelType
from serving.router import Prompt, PromptBlocks, RouterConfig, StepCosts
from serving.router.config import DYNAMO_COSTS
from serving.runtime.address import EndpointAddress
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.server import GeneratorService
from serving.worker.config import WorkerConfig
from serving.worker.registration import register_llm
from tests.support.waiting import in_time, until_async

ADDRESS = EndpointAddress("back", "backend", "generate")
COSTS = StepCosts(0.010, 0.001, 0.002, 0.0001, 4096)


async def generate(request):
    yield 1


def predicted_ttft(tmp_path, costs, router):
    """Return what a frontend predicts for a prompt of 5 tokens at a worker that registers these costs."""

    async def main():
        config = RuntimeConfig(etcd_endpoints="", nats_server="", discovery_dir=str(tmp_path / "d"))
        async with in_time(), await DistributedRuntime.connect(config) as runtime:
            models = Models(runtime, FrontendConfig(router_mode="jspt"), router)
            await models.start()
            async with await DistributedRuntime.connect(config) as worker:
                await register_llm(ModelType.Backend, worker.endpoint(ADDRESS), "", "mock", step_costs=costs)
                await worker.serve(ADDRESS, GeneratorService(generate))
                model = await until_async(lambda: models.get("mock"))
                core = model.workers.core
                (cost,) = core.peek(Prompt(5, PromptBlocks.of(())), 0.0).costs
                await models.close()
                return cost

    return uvloop.run(main())


def test_a_frontend_takes_the_costs_that_a_worker_registers(tmp_path):
    assert round(predicted_ttft(tmp_path, COSTS, RouterConfig()), 6) == 0.010 + 5 * 0.001


def test_costs_that_the_user_gives_go_first(tmp_path):
    assert round(predicted_ttft(tmp_path, COSTS, RouterConfig(step_prefill_us=3000)), 6) == 0.010 + 5 * 0.003


def test_without_them_the_costs_are_those_of_dynamo(tmp_path):
    usual = DYNAMO_COSTS.base_s + 5 * DYNAMO_COSTS.prefill_token_s
    assert round(predicted_ttft(tmp_path, None, RouterConfig()), 6) == round(usual, 6)


def test_a_mocker_knows_the_costs_of_its_steps():
    timing = TimingConfig(timing="constant", constant_prefill_ms=20.0, constant_decode_ms=10.0)
    costs = Mocker(WorkerConfig(), EngineConfig(max_num_batched_tokens=512), timing).traits.step_costs
    assert costs == StepCosts(0.030, 0.0, 0.0, 0.0, 512)
