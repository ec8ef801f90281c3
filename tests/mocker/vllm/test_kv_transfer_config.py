"""Host memory in the words of vLLM's command line and of Dynamo's mocker."""

import json
from dataclasses import replace

import pytest

from mocker import EngineConfig
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig


def offloading(**extra):
    extra = {"cpu_bytes_to_use": 8 << 30} | extra
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def multi(*connectors, **more):
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": list(connectors)}} | more


NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}


def test_a_transfer_configuration_becomes_the_settings_that_it_stands_for():
    extra = {"eviction_policy": "arc", "store_threshold": 2, "offload_prompt_only": False, "blocks_per_chunk": 4}
    expected = EngineConfig(kv_offloading_size=8, **extra)
    assert EngineConfig(kv_transfer_config=offloading(**extra)) == expected
    assert EngineConfig(kv_transfer_config=json.dumps(offloading(**extra))) == expected
    assert EngineConfig(kv_transfer_config=multi(NIXL, offloading(**extra))) == expected
    assert EngineConfig(kv_transfer_config=offloading(self_describing_kv_events=True)) == EngineConfig(
        kv_offloading_size=8
    )


def test_chunks_may_be_given_in_tokens():
    assert EngineConfig(block_size=16, kv_transfer_config=offloading(block_size=64)).blocks_per_chunk == 4


def test_settings_given_beside_it_win_and_later_ones_are_not_undone():
    config = EngineConfig(kv_transfer_config=offloading(), kv_offloading_size=2)
    assert config.kv_offloading_size == 2
    assert replace(EngineConfig(kv_transfer_config=offloading()), kv_offloading_size=0.0) == EngineConfig()


def test_what_becomes_of_kv_that_cannot_be_read_is_taken_over():
    config = EngineConfig(kv_transfer_config=multi(NIXL, offloading(), kv_load_failure_policy="recompute"))
    assert config.kv_load_failure_policy == "recompute"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("much", "kv_transfer_config is 'much'; expected JSON such as"),
        ("[1]", "kv_transfer_config is '.1.'; expected JSON such as"),
        ({}, "kv_connector is None; expected OffloadingConnector"),
        (
            {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
            "kv_connector is 'LMCacheConnectorV1'; expected Off",
        ),
        (NIXL, "kv_connector is 'NixlConnector'; expected OffloadingConnector"),
        (offloading() | {"kv_role": "kv_producer"}, "kv_role is 'kv_producer'; expected 'kv_both'"),
        (offloading() | {"kv_port": 1}, "kv_transfer_config.kv_port is unknown to the simulation; expected some of"),
        (offloading() | {"kv_connector_extra_config": 5}, "kv_connector_extra_config is 5; expected a mapping"),
        (
            offloading(spec_name="X"),
            "kv_connector_extra_config.spec_name is unknown to the simulation; expected some of",
        ),
        (offloading(secondary_tiers=[]), "secondary_tiers have no size in vLLM.*; expected kv_disk_size"),
        (offloading(cpu_bytes_to_use=0), "cpu_bytes_to_use is 0; expected a number of bytes greater than 0"),
        (offloading(cpu_bytes_to_use="8G"), "cpu_bytes_to_use is '8G'; expected a number of bytes"),
        (offloading(block_size=100), "block_size is 100; expected a multiple of the 64 tokens"),
        (offloading(block_size=64, blocks_per_chunk=1), "block_size and blocks_per_chunk; expected one of them"),
        (offloading(eviction_policy="fifo"), "eviction_policy must be one of lru, arc, not 'fifo'"),
        (multi(NIXL), "has 0 connectors that keep KV; expected one OffloadingConnector"),
        (multi(offloading(), offloading()), "has 2 connectors that keep KV"),
        (multi() | {"kv_connector_extra_config": {"connectors": 5}}, "connectors is 5; expected a list"),
    ],
)
def test_what_is_not_simulated_is_refused_by_its_name(config, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(kv_transfer_config=config)


def test_host_memory_may_be_counted_in_blocks():
    timing = TimingConfig(timing="constant")
    host = resolve(EngineConfig(num_host_blocks=1001, blocks_per_chunk=4), timing).host
    assert host.num_chunks == 250
    with pytest.raises(ValueError, match="num_host_blocks is 3; expected at least blocks_per_chunk, 4"):
        EngineConfig(num_host_blocks=3, blocks_per_chunk=4)
    with pytest.raises(
        ValueError, match="num_host_blocks is 5, and kv_offloading_size is 2; expected only one of them"
    ):
        EngineConfig(num_host_blocks=5, kv_offloading_size=2)
