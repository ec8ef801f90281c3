"""KV blocks with contents: what is offered, shared, and found to be wrong."""

import random

import pytest

from mocker.models.catalog import find_model
from mocker.timing.config import TimingConfig
from mocker.timing.kv_size import kv_size
from serving.engines.mock.kv.shelf import MAX_SLOTS, Shelf, layout_of
from serving.kv_tiers.blocks import HEADER, KvLayout, find_fault
from serving.transfer.config import TransferRunConfig

LAYOUT = KvLayout(80_000, 400, 2)


def shelf(num_slots=4, layout=LAYOUT):
    memory = memoryview(bytearray(num_slots * layout.slot_bytes))
    return memory, Shelf(memory, layout)


def read(memory, slot, layout=LAYOUT, num_behind=0):
    """Return what a reader gets of a slot."""
    start = slot.number * layout.slot_bytes
    return memory[start : start + layout.num_bytes(num_behind)]


def fault(memory, slot, *, key=None, generation=None, num_behind=0):
    found = read(memory, slot, num_behind=num_behind)
    return find_fault(found, slot.key if key is None else key, generation or slot.generation, LAYOUT)


def test_blocks_are_what_their_keys_say():
    memory, ours = shelf()
    placement = ours.place([5, 6])
    ours.fill(placement)
    first, second = placement.slots
    assert fault(memory, first) == fault(memory, second) == ""
    assert bytes(read(memory, first)) != bytes(read(memory, second))
    other_memory, other = shelf()
    again = other.place([6])
    other.fill(again)
    content = slice(HEADER.size, None)
    assert bytes(read(other_memory, again.slots[0])[content]) == bytes(read(memory, second)[content])


def test_all_parts_of_a_block_differ():
    memory, ours = shelf(layout=KvLayout(200_000))
    placement = ours.place([5])
    ours.fill(placement)
    words = memory[HEADER.size : HEADER.size + 200_000].cast("Q").tolist()
    assert len(set(words)) == len(words)


def test_what_is_wrong_with_a_block_is_found():
    memory, ours = shelf()
    placement = ours.place([5, 6])
    slot, other = placement.slots
    assert fault(memory, slot) == "it is not there, or no longer"
    ours.fill(placement)
    assert fault(memory, slot, key=6, generation=slot.generation) == "it is another block"
    assert fault(memory, other, generation=slot.generation) == "another block has taken its place"
    for place in (HEADER.size, LAYOUT.slot_bytes - 1):
        memory[place] ^= 1
        assert fault(memory, slot) == "its checksum does not match its content"
        memory[place] ^= 1
    assert fault(memory, slot) == ""
    ours.release(placement)
    assert fault(memory, slot) == "it is not there, or no longer"


def test_a_window_is_read_and_checked_only_at_the_end_of_a_prompt():
    memory, ours = shelf()
    placement = ours.place([5])
    ours.fill(placement)
    memory[LAYOUT.slot_bytes - 1] ^= 1
    assert [LAYOUT.num_bytes(behind) - HEADER.size for behind in (0, 1, 2)] == [80_400, 80_400, 80_000]
    assert fault(memory, placement.slots[0], num_behind=2) == ""
    assert fault(memory, placement.slots[0], num_behind=1) != ""


def test_offers_of_a_block_share_its_slot_until_the_last_is_gone():
    memory, ours = shelf(3)
    one = ours.place([1, 2])
    ours.fill(one)
    two = ours.place([1, 3])
    assert [slot.key for slot in two.fresh] == [3]
    assert one.slots[0] is two.slots[0]
    assert ours.place([4]) is None
    ours.fill(two)
    ours.release(one)
    assert (ours.num_free, fault(memory, two.slots[0])) == (1, "")
    ours.release(two)
    assert ours.num_free == 3


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_placed_and_released_each_block_that_is_there_is_right(seed):
    rng = random.Random(seed)
    memory, ours = shelf(12)
    placed, released = [], []
    for _ in range(300):
        if rng.random() < 0.5 and placed:
            released.append(placed.pop(rng.randrange(len(placed))))
            ours.release(released[-1])
        elif (placement := ours.place([rng.randrange(20) for _ in range(rng.randint(1, 5))])) is not None:
            ours.fill(placement)
            placed.append(placement)
        live = {id(slot): slot for placement in placed for slot in placement.slots}
        assert ours.num_free == 12 - len(live)
        slot = rng.choice([slot for placement in (placed + released) for slot in placement.slots] or [None])
        assert slot is None or (fault(memory, slot) == "") is (id(slot) in live)


def test_blocks_without_content_are_counted_too():
    memory, ours = shelf(MAX_SLOTS + 1, KvLayout(0))
    assert ours.num_free == MAX_SLOTS
    placement = ours.place([5])
    assert find_fault(memory[: HEADER.size], 5, 1, KvLayout(0)) == "it is not there, or no longer"
    ours.fill(placement)
    assert find_fault(memory[: HEADER.size], 5, 1, KvLayout(0)) == ""


def test_a_block_has_its_share_of_the_models_bytes():
    timing = TimingConfig(model="openai/gpt-oss-120b", gpu="h100")
    layout = layout_of(TransferRunConfig(kv_bytes_scale=0.5), timing, block_size=16)
    size = kv_size(find_model("openai/gpt-oss-120b"), block_size=16)
    assert layout == KvLayout(int(size.block / 2), int(size.window_block / 2), 9)
    assert layout_of(TransferRunConfig(kv_bytes_scale=0), timing, block_size=16).block_bytes == 0
    with pytest.raises(ValueError, match=r"transfer_memory_mb must have room for a KV block of 33\d{6} bytes, not 1"):
        layout_of(TransferRunConfig(kv_bytes_scale=1, transfer_memory_mb=1), TimingConfig(), block_size=256)
