"""Which connectors vLLM is told to use for KV beyond the GPU; without vLLM."""

import pytest

from serving.worker.config import ModelRunConfig, WorkerConfig
from serving.worker.make import make_engine

LMCACHE = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
MODULE = {"kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector"}
NIXL = {"prefill": "kv_producer", "decode": "kv_consumer"}
ROLES = pytest.mark.parametrize("role", NIXL)


def arguments(*flags, role="aggregated", kv_events=True):
    worker = WorkerConfig(model_path="m", role=role, kv_events=kv_events)
    return make_engine("vllm", worker, ModelRunConfig(), flags).calls[0].arguments


def transfer(*flags, **worker):
    """Return the transfer configuration of a call; nothing else says anything of tiers."""
    given = arguments(*flags, **worker)
    assert not given.keys() & {"kv_offloading_size", "kv_offloading_backend"}
    return given.get("kv_transfer_config")


def config(value):
    return f"--kv-transfer-config={value}"


def connectors(found):
    assert (found["kv_connector"], found["kv_role"]) == ("MultiConnector", "kv_both")
    return found["kv_connector_extra_config"]["connectors"]


def offloading(**extra):
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def test_host_memory_by_its_size_is_a_connector_whose_events_say_what_they_are_about():
    assert transfer("--kv-offloading-size=2") == offloading(cpu_bytes_to_use=2 << 30, self_describing_kv_events=True)
    assert transfer("--kv-offloading-size=2", kv_events=False) == offloading(cpu_bytes_to_use=2 << 30)
    assert transfer() is None


def test_vllms_other_ways_to_keep_kv_are_chosen_as_vllm_chooses_them(monkeypatch):
    assert transfer("--kv-offloading-size=2", "--kv-offloading-backend=lmcache") == LMCACHE | MODULE
    monkeypatch.setenv("VLLM_USE_SIMPLE_KV_OFFLOAD", "1")
    assert transfer("--kv-offloading-size=2")["kv_connector"] == "SimpleCPUOffloadConnector"


def test_further_entries_of_the_connector_stay():
    entries = config({"kv_connector_extra_config": {"eviction_policy": "arc", "self_describing_kv_events": False}})
    found = transfer("--kv-offloading-size=2", entries)
    assert found == offloading(eviction_policy="arc", self_describing_kv_events=False, cpu_bytes_to_use=2 << 30)
    given = offloading(cpu_bytes_to_use=5, eviction_policy="arc")
    assert transfer(config(given)) == offloading(
        cpu_bytes_to_use=5, eviction_policy="arc", self_describing_kv_events=True
    )
    larger = transfer(config(given), "--kv-offloading-size=2")  # as in vLLM, the size wins
    assert larger["kv_connector_extra_config"]["cpu_bytes_to_use"] == 2 << 30


def test_tiers_behind_host_memory_report_what_they_hold():
    tiers = [{"type": "fs", "root_dir": "/kv"}, {"type": "example"}]
    found = transfer(config(offloading(cpu_bytes_to_use=5, secondary_tiers=tiers)))
    assert found["kv_connector_extra_config"]["secondary_tiers"] == [
        {"enable_kv_events": True, "type": "fs", "root_dir": "/kv"},
        {"type": "example"},
    ]


@ROLES
@pytest.mark.parametrize("flag", ["--kv-offloading-size=2", config(offloading(cpu_bytes_to_use=2 << 30))])
def test_host_memory_stands_beside_what_hands_kv_over(role, flag):
    found = transfer(flag, role=role)
    assert found["kv_load_failure_policy"] == "recompute"
    assert connectors(found) == [
        {"kv_connector": "NixlConnector", "kv_role": NIXL[role]},
        offloading(cpu_bytes_to_use=2 << 30, self_describing_kv_events=True),
    ]


@ROLES
def test_lmcache_stands_beside_what_hands_kv_over(role):
    given = LMCACHE | {"kv_load_failure_policy": "fail"}
    found = transfer(config(given), role=role)
    assert found["kv_load_failure_policy"] == "fail"
    assert connectors(found) == [{"kv_connector": "NixlConnector", "kv_role": NIXL[role]}, LMCACHE | MODULE]


@ROLES
def test_what_the_user_joined_stays_as_it_is(role):
    joined = [{"kv_connector": "NixlConnector", "kv_role": "kv_both"}, {"kv_connector": "MooncakeStoreConnector"}]
    given = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": joined},
    }
    assert connectors(transfer(config(given), role=role)) == joined
    more = connectors(transfer(config(given), "--kv-offloading-size=2", role=role))
    assert more == [*joined, offloading(cpu_bytes_to_use=2 << 30, self_describing_kv_events=True)]


def test_a_connector_that_hands_kv_over_is_no_tier():
    """LMCache with a role of its own is one of those."""
    given = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_producer"}
    assert transfer(config(given), role="prefill") == given | {"kv_load_failure_policy": "recompute"}
    beside = connectors(transfer(config(given), "--kv-offloading-size=2", role="prefill"))
    assert [each["kv_connector"] for each in beside] == ["LMCacheConnectorV1", "OffloadingConnector"]


@pytest.mark.parametrize("size", ["0", "-1", "much", "true"])
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises(ValueError, match=r"kv_offloading_size is .*; expected a number of GiB greater than 0"):
        arguments(f"--kv-offloading-size={size}")
