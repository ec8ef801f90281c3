"""A cache of chunks kept in segments does what vLLM's does chunk by chunk."""

from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mocker import BlockChain
from mocker.events import TierRemoved, TierStored
from mocker.tiers.chunk_cache import ChunkCache, Uses
from tests.support.examples import worth


class Chunk:
    def __init__(self):
        self.num_readers = -1  # being written


class PlainLru:
    """vLLM's rule, with every chunk by itself."""

    def __init__(self, capacity):
        self.chunks, self.capacity = OrderedDict(), capacity

    def insert(self, name):
        self.chunks[name] = Chunk()

    def get(self, name):
        return self.chunks.get(name)

    def miss(self, names):
        pass

    def finish(self, seen, inserted, found):
        for name in reversed([name for name in seen if name in self.chunks]):
            self.chunks.move_to_end(name)

    def evict(self, count, protected):
        free = [n for n, chunk in self.chunks.items() if chunk.num_readers == 0 and n not in protected]
        if len(free) < count:
            return None
        for name in free[:count]:
            del self.chunks[name]
        return free[:count]


class PlainArc:
    def __init__(self, capacity):
        self.capacity, self.target = capacity, 0.0
        self.lists, self.ghosts = (OrderedDict(), OrderedDict()), (OrderedDict(), OrderedDict())

    def insert(self, name):
        self.lists[0][name] = Chunk()
        for ghosts in self.ghosts:
            ghosts.pop(name, None)

    def get(self, name):
        return self.lists[0].get(name) or self.lists[1].get(name)

    def miss(self, names):
        first, second = self.ghosts
        for name in reversed(names):
            if name in first:
                self.target = min(self.target + max(1, len(second) / len(first)), self.capacity)
                first.move_to_end(name)
            elif name in second:
                self.target = max(self.target - max(1, len(first) / len(second)), 0)
                second.move_to_end(name)

    def finish(self, seen, inserted, found):
        first, second = self.lists
        for name in reversed(seen):
            if name in found and name in first:
                second[name] = first.pop(name)
            elif (name in found or name in inserted) and name in first:
                first.move_to_end(name)
            elif (name in found or name in inserted) and name in second:
                second.move_to_end(name)

    def evict(self, count, protected):
        size, gone = len(self.lists[0]), []
        rest = [
            [n for n, chunk in names.items() if chunk.num_readers == 0 and n not in protected] for names in self.lists
        ]
        for _ in range(count):
            if size >= int(self.target) and rest[0]:
                place = 0
            elif rest[1]:
                place = 1
            elif rest[0]:
                place = 0
            else:
                return None
            size -= place == 0
            gone.append((place, rest[place].pop(0)))
        for place, name in gone:
            del self.lists[place][name]
            self.ghosts[place][name] = None
        for ghosts in self.ghosts:
            while len(ghosts) > self.capacity:
                ghosts.popitem(last=False)
        return [name for _, name in gone]


class Plain:
    """vLLM's manager of chunks in host memory."""

    def __init__(self, capacity, policy, threshold):
        self.policy = PlainArc(capacity) if policy == "arc" else PlainLru(capacity)
        self.free, self.threshold, self.counts, self.gone = capacity, threshold, {}, []

    def offer(self, names, memory):
        for name in names:
            self.counts[name] = self.counts.get(name, 0) + 1
        missing = [name for name in names if self.policy.get(name) is None]
        ready = [name for name in names if self.policy.get(name) and self.policy.get(name).num_readers >= 0]
        if self.threshold > 1:
            missing = [name for name in missing if self.counts[name] >= self.threshold]
        self.policy.miss([name for name in missing if name not in memory["missed"]])
        memory["missed"].update(missing)
        memory["seen"].update(missing + ready)
        memory["found"].update(name for name in ready if name not in memory["inserted"])
        if len(missing) > self.free:
            gone = self.policy.evict(len(missing) - self.free, set(names))
            if gone is None:
                return None
            self.gone += gone
            self.free += len(gone)
        for name in missing:
            self.policy.insert(name)
        self.free -= len(missing)
        memory["inserted"].update(missing)
        return missing


def chains():
    """Return chains of 12 blocks that share beginnings, of named blocks and of blocks of their own."""
    return [
        BlockChain(list(range(12))),
        BlockChain([*range(6), *range(20, 26)]),
        BlockChain([*range(6), *range(20, 23), *range(30, 33)]),
        BlockChain(list(range(5))),
        BlockChain(["a", "b", "c"], blocks_per_id=4),
        BlockChain(["a", "b"], 6, blocks_per_id=4),
        BlockChain(["x"], blocks_per_id=12),
        BlockChain(["a", "b", "d"], 10, blocks_per_id=4),
    ]


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["offer", "offer", "store", "store", "pin", "unpin", "finish"]),
        st.integers(0, 7),
        st.integers(1, 12),
    ),
    min_size=40,
    max_size=80,
)


@pytest.mark.parametrize("policy", ["lru", "arc"])
@settings(max_examples=worth(300))
@given(
    operations=OPERATIONS,
    capacity=st.integers(1, 14),
    size=st.sampled_from([1, 1, 2, 3]),
    threshold=st.sampled_from([0, 0, 2, 3]),
)
def test_segments_do_what_chunks_do(policy, operations, capacity, size, threshold):
    plain = Plain(capacity, policy, threshold)
    host = ChunkCache(capacity, blocks_per_chunk=size, eviction_policy=policy, store_threshold=threshold)
    kinds = chains()
    requests = [(chain, Uses(), {"seen": set(), "inserted": set(), "found": set(), "missed": set()}) for chain in kinds]
    writing, reading, stored = [], [], []
    for what, number, stop in operations:
        chain, uses, memory = requests[number]
        stop = min(stop, 12) // size
        names = [host.name(chain, chunk) for chunk in range(stop)]
        if what == "offer":
            given = host.offer(chain, 0, stop, uses)
            expected = plain.offer(names, memory)
            assert (given is None) == (expected is None)
            if given:
                assert [name for first, last in given for name in names[first:last]] == expected
                writing.append((chain, given, expected))
        elif what == "store" and writing:
            chain, ranges, names = writing.pop(stop % len(writing))
            host.complete_store(chain, ranges)
            stored += names
            for name in names:
                plain.policy.get(name).num_readers = 0
        elif what == "pin":
            found, is_ready = host.find(chain, 0, stop)
            here = [plain.policy.get(name) for name in names]
            assert found == next((place for place, chunk in enumerate(here) if chunk is None), stop)
            assert is_ready == all(chunk.num_readers >= 0 for chunk in here[:found])
            assert host.is_being_read(chain, 0, stop) == any(chunk and chunk.num_readers > 0 for chunk in here)
            if found and is_ready:
                host.pin(chain, 0, found, uses)
                for chunk in here[:found]:
                    chunk.num_readers += 1
                memory["seen"].update(names[:found])
                memory["found"].update(name for name in names[:found] if name not in memory["inserted"])
                reading.append((chain, found, here[:found]))
        elif what == "unpin" and reading:
            chain, found, here = reading.pop(stop % len(reading))
            host.unpin(chain, 0, found)
            for chunk in here:
                chunk.num_readers -= 1
        elif what == "finish":
            host.finish(chain, uses)
            order = [host.name(chain, chunk) for chunk in range(12 // size)]
            plain.policy.finish([n for n in order if n in memory["seen"]], memory["inserted"], memory["found"])
            requests[number] = (chain, Uses(), {kind: set() for kind in memory})
        assert host.num_chunks - host.num_used == plain.free
    removed = [name for event in host.events if isinstance(event, TierRemoved) for name in event.names()]
    assert removed == plain.gone
    assert [name for event in host.events if isinstance(event, TierStored) for name in event.names()] == stored
    for chain, _, _ in requests:
        for chunk in range(12 // size):
            assert (host.find(chain, chunk, chunk + 1)[0] > chunk) == (
                plain.policy.get(host.name(chain, chunk)) is not None
            )


def test_what_was_evicted_leaves_nothing_behind():
    host = ChunkCache(4, blocks_per_chunk=1, eviction_policy="lru", store_threshold=0)
    for number in range(200):
        chain, uses = BlockChain([(number, place) for place in range(4)]), Uses()
        host.complete_store(chain, host.offer(chain, 0, 4, uses))
        host.finish(chain, uses)
    assert (host.num_used, host.num_evictable, len(host._index._rows)) == (4, 4, 4)
    assert len(host._lru._heap._entries) < 200
