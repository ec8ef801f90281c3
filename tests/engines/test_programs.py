"""What runs a worker: its command line, its settings in the order in which the command takes them, its GPUs."""

from mocker import EngineConfig
from serving.runtime.config import RuntimeConfig
from serving.worker.config import ModelRunConfig, WorkerConfig
from serving.worker.programs import LightEngine, WorkerGroup, worker_programs
from serving.worker.registry import EngineChoice

RUNTIME = RuntimeConfig(etcd_endpoints="", nats_server="")
WORKER = WorkerConfig(model_path="m")


def test_workers_without_a_gpu_get_their_own_settings_between_the_workers_and_the_runtimes():
    engine = EngineConfig(block_size=32)
    mocker = LightEngine("serving.mocker", settings=(engine,))
    echo = LightEngine("serving.echo", ("core",))
    first, second, parrot = worker_programs(
        [WorkerGroup("fast", 2, mocker, WORKER), WorkerGroup("parrot", 1, echo, WORKER)], RUNTIME
    )
    assert [first.name, second.name, parrot.name] == ["fast-0", "fast-1", "parrot-0"]
    assert (first.arguments, first.settings) == (["-m", "serving.mocker"], (WORKER, engine, RUNTIME))
    assert (parrot.arguments, parrot.settings) == (["-m", "serving.echo", "core"], (WORKER, RUNTIME))


def test_workers_that_run_models_divide_the_host_among_all_of_them(capfd):
    def choice(name):
        return EngineChoice(name, ModelRunConfig(), ["--seed", "1"])

    wanted = [WorkerGroup("vllm", 1, choice("vllm"), WORKER), WorkerGroup("sglang", 1, choice("sglang"), WORKER)]
    for _ in range(2):  # an experiment starts its stack again and again, and says this once
        left, right = worker_programs(wanted, RUNTIME)
    assert [left.arguments, right.arguments] == [["-m", "serving.vllm"], ["-m", "serving.sglang"]]
    worker, run, runtime, arguments = left.settings
    assert (worker, runtime, arguments) == (WORKER, RUNTIME, ["--seed", "1"])
    assert run.memory_fraction == right.settings[1].memory_fraction
    said = capfd.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == len(set(said.err.splitlines()))
