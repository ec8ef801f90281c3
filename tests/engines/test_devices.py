"""Engines on one host divide its GPUs and their memory, and say so; what the user sets stays."""

import pytest

from serving.worker.config import ModelRunConfig, WorkerConfig
from serving.worker.devices import GpuHost, allot, assign, describe_devices, this_host, visible_gpus
from serving.worker.registry import EngineChoice

WORKER = WorkerConfig(model_path="m")


def wanted(count, name="vllm", flags=(), **run):
    return [(EngineChoice(name, ModelRunConfig(**run), flags), WORKER)] * count


def gpus_and_memory(allotments):
    return [(each.environment.get("CUDA_VISIBLE_DEVICES"), each.choice.run.memory_fraction) for each in allotments]


@pytest.mark.parametrize(
    ("counts", "gpus", "expected"),
    [
        ([1, 1], "01", ["0", "1"]),
        ([1, 1, 1], "01", ["0", "1", "0"]),
        ([2, 2], "0123", ["01", "23"]),
        ([2, 2, 2, 2], "0123", ["01", "23", "01", "23"]),
        ([2, 1, 1], "0123", ["01", "2", "3"]),
        ([2, 2], "012", ["01", "02"]),
        ([1], "57", ["5"]),
        ([4], "3210", ["3210"]),
        ([1, 2], "", ["", ""]),
        ([], "01", []),
    ],
)
def test_each_engine_gets_the_gpus_that_fewest_others_use(counts, gpus, expected):
    assert assign(counts, gpus) == [tuple(each) for each in expected]


def test_an_engine_for_which_there_are_too_few_gpus_is_refused():
    with pytest.raises(ValueError, match=r"an engine needs 4 GPUs, but only 2 are visible here \(0, 1\)"):
        allot(wanted(1, tensor_parallel_size=4), GpuHost(("0", "1"), 1.0))


def test_engines_with_gpus_of_their_own_take_what_they_take_by_themselves():
    allotments = allot(wanted(2, tensor_parallel_size=2), GpuHost(("0", "1", "2", "3"), 0.5))
    assert gpus_and_memory(allotments) == [("0,1", None), ("2,3", None)]
    assert describe_devices(allotments) == []


def test_engines_that_share_a_gpu_divide_its_memory():
    allotments = allot(wanted(3), GpuHost(("0", "1"), 0.5))
    assert gpus_and_memory(allotments) == [("0", 0.45), ("1", None), ("0", 0.45)]
    assert describe_devices(allotments) == [
        "2 vllm workers share GPU 0: each takes 45% of the memory, unless you set gpu_memory_utilization"
    ]


def test_engines_without_a_gpu_divide_half_of_what_is_free_of_the_hosts_memory():
    allotments = allot(wanted(2), GpuHost((), 0.8))
    assert gpus_and_memory(allotments) == [(None, 0.2), (None, 0.2)]
    assert describe_devices(allotments) == [
        "2 vllm workers share this host: each takes 20% of the memory, unless you set gpu_memory_utilization"
    ]
    assert gpus_and_memory(allot(wanted(1), GpuHost((), 0.8))) == [(None, 0.4)]


@pytest.mark.parametrize(
    ("name", "flags", "run"),
    [
        ("vllm", ["--gpu-memory-utilization=0.3"], {}),
        ("vllm", ["--kv-cache-memory-bytes=1000000"], {}),
        ("vllm", [], {"memory_fraction": 0.3}),
        ("sglang", ["--mem-fraction-static", "0.3"], {}),
        ("trtllm", ['--kv-cache-config={"free_gpu_memory_fraction": 0.3}'], {}),
    ],
)
def test_what_the_user_sets_stays(name, flags, run):
    allotments = allot(wanted(2, name, flags, **run), GpuHost(("0",), 1.0))
    assert [each.choice.run for each in allotments] == [ModelRunConfig(**run)] * 2
    assert describe_devices(allotments) == []


def test_a_cache_size_of_vllms_environment_stays(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    assert gpus_and_memory(allot(wanted(2), GpuHost((), 1.0))) == [(None, None)] * 2


def test_data_parallel_and_pipeline_parallel_engines_get_as_many_gpus_as_they_use():
    host = GpuHost(tuple("01234567"), 1.0)
    flags = ["--data-parallel-size", "2"]
    assert gpus_and_memory(allot(wanted(2, "vllm", flags, tensor_parallel_size=2), host)) == [
        ("0,1,2,3", None),
        ("4,5,6,7", None),
    ]
    dp_attention = ["--dp-size=2", "--enable-dp-attention"]
    assert [each.gpus for each in allot(wanted(1, "sglang", dp_attention, tensor_parallel_size=2), host)] == [
        ("0", "1")
    ]
    two_hosts = {"tensor_parallel_size": 16, "num_nodes": 2, "leader_addr": "h:1"}
    assert len(allot(wanted(1, "sglang", **two_hosts), host)[0].gpus) == 8


def test_engines_that_use_all_gpus_they_see_get_equal_parts():
    choice = EngineChoice("mistralrs", ModelRunConfig())
    assert gpus_and_memory(allot([(choice, WORKER)] * 2, GpuHost(tuple("0123"), 1.0))) == [("0,1", None), ("2,3", None)]
    assert gpus_and_memory(allot([(choice, WORKER)] * 3, GpuHost(tuple("01"), 1.0))) == [
        ("0", None),
        ("1", None),
        ("0", None),
    ]


def test_gpus_that_were_chosen_by_hand_stay():
    assert gpus_and_memory(allot(wanted(2, "sglang", base_gpu_id=1), GpuHost(("0", "1"), 1.0))) == [(None, None)] * 2


def test_the_gpus_of_a_host_are_those_that_programs_may_see(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ("0", "1")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-8f"}, tmp_path) == ("3", "GPU-8f")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == ()
    assert 0 < this_host().free_memory <= 1
