"""Blocks have vLLM's names. What is expected here was computed by vLLM 0.32; tests/real_engines compares with it again."""

import hashlib
import random

import pytest

from serving.stand_in.config import KvEventsConfig
from serving.stand_in.vllm.kv_events.hashes import BlockHasher, cbor, extra_keys, untagged
from serving.worker.protocol import CacheScope

SALTED, ADAPTED = CacheScope(salt="s"), CacheScope(lora_name="ad", lora_path="/p/ad", lora_id=3)


def chain(hasher):
    """Name three blocks: with a salt, with an adapter, and plain."""
    first = hasher.name(None, [1, 2, 300, 70000], extra_keys(SALTED, is_first=True))
    second = hasher.name(first, [5, 6, 7, 8], extra_keys(ADAPTED, is_first=False))
    return first, second, hasher.name(second, [0, 23, 24, 255], None)


@pytest.mark.parametrize(
    ("algorithm", "ends", "last"),
    [
        ("sha256", "f9a3cf004b14aa7c cab315b059b3574f 7f515a610a9db2f8", 3966328455824814770),
        ("sha256_cbor", "f8b55adff2e61c3e ca7ee51ebc063871 e5737970537faffc", 10820415804359723097),
        ("xxhash", "183f7f2104b9c051 4bf3740ccaa378ac fc5d7eeb58fbd377", 1108384979673278176),
        ("xxhash_cbor", "26b99533a20aaeca 38437bd298d2ce78 10dada39abadd336", 5886559177176759331),
    ],
)
def test_blocks_have_the_names_that_vllm_gives_them(algorithm, ends, last):
    hasher = BlockHasher(KvEventsConfig(hash_algorithm=algorithm, hash_seed="0"))
    first, second, third = chain(hasher)
    assert " ".join(name.hex()[-16:] for name in (hasher.root, first, second)) == ends
    assert hasher.external(third) == last


def test_a_name_is_a_number_of_64_bits_or_all_bytes():
    name = bytes(range(32))
    assert BlockHasher(KvEventsConfig()).external(name) == 0x18191A1B1C1D1E1F
    assert BlockHasher(KvEventsConfig(use_int_block_hashes=False)).external(name) == name


def test_servers_agree_on_names_without_a_seed_unless_collisions_could_be_computed():
    fixed = "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198"
    assert BlockHasher(KvEventsConfig()).root.hex() == fixed
    for algorithm in ("xxhash", "xxhash_cbor"):
        config = KvEventsConfig(hash_algorithm=algorithm)
        assert BlockHasher(config).root != BlockHasher(config).root


def test_what_is_hashed_is_canonical_cbor():
    value = (b"x" * 300, (1 << 33, 65535, 65536, 4294967295), None)
    expected = "2e4f3bd2ace657c8a44443ed485fa6853c7840b7fac12a55e707e4e58abf508d"
    assert hashlib.sha256(cbor(value)).hexdigest() == expected
    assert cbor((0, 23, 24, 256, "é", ())) == bytes.fromhex("860017181819010062c3a980")


def test_the_salt_is_in_the_first_block_and_the_adapter_in_all():
    both = CacheScope(salt="s", lora_name="ad", lora_path="/p")
    assert untagged(extra_keys(both, is_first=True)) == ("ad", "s")
    assert extra_keys(both, is_first=False) == (("lora", "ad", "/p"),)
    assert extra_keys(SALTED, is_first=False) is None
    assert untagged(extra_keys(None, is_first=True)) is None


def test_a_block_is_named_by_all_before_it():
    hasher, rng = BlockHasher(KvEventsConfig()), random.Random(3)
    tokens = rng.choices(range(1000), k=8)
    parents = [hasher.name(None, [number], None) for number in range(4)]
    assert len({hasher.name(parent, tokens, None) for parent in (*parents, None)}) == 5
