"""vLLM's flags and environment variables decide where KV events go and how they name blocks."""

import pytest

from serving.stand_in.config import KvEventsConfig
from serving.stand_in.vllm.settings.settings import stand_in_config

ON = {"enable_kv_cache_events": True}
OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}


def events_of(config, environment=None, **more):
    given = {"model": "m", "kv_events_config": config} | more
    return stand_in_config(given, environment=environment or {}).kv_events


def test_events_are_published_as_by_default_in_vllm():
    assert events_of(ON) == KvEventsConfig(endpoint="tcp://*:5557", hash_algorithm="sha256", use_int_block_hashes=True)


def test_the_address_of_this_host_comes_from_the_environment():
    assert events_of(ON, {"VLLM_HOST_IP": "192.0.2.7"}).host_ip == "192.0.2.7"


@pytest.mark.parametrize("config", [None, {}, {"enable_kv_cache_events": False}, ON | {"publisher": "null"}])
def test_nothing_is_published_unless_events_are_on_and_have_a_publisher(config):
    assert events_of(config) is None


def test_flags_and_environment_decide_how_blocks_are_named():
    environment = {"PYTHONHASHSEED": "7", "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"}
    found = events_of(ON | {"topic": "t"}, environment, prefix_caching_hash_algo="xxhash_cbor")
    assert found == KvEventsConfig(topic="t", hash_algorithm="xxhash_cbor", hash_seed="7", use_int_block_hashes=False)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"kv_offloading_size": 1.0}, False),
        ({"kv_transfer_config": OFFLOADING | {"kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30}}}, False),
        (
            {
                "kv_transfer_config": OFFLOADING
                | {"kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30, "self_describing_kv_events": True}}
            },
            True,
        ),
    ],
)
def test_events_of_host_memory_describe_themselves_if_asked(more, expected):
    assert events_of(ON, **more).describes_chunks is expected
