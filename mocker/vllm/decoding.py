"""The sequences that decode: what they read, when the next one finishes, and how their blocks grow.

At iteration i a decoding sequence computes the token at position `i - origin`. So no step touches each of them: sums
over all follow from sums of origins, and only a sequence whose position starts or fills a block needs any work.

    position    0 ........ size-1 | size ........ 2*size-1 | ...
                takes a    fills  | takes a       fills    |
                block      it     | block         it       |
"""

from bisect import bisect_right

from mocker.sequence import NEVER, Sequence
from mocker.vllm.block_pool import BlockPool


class Decoding:
    """Sums over the decoding sequences, and the blocks they allocate and fill."""

    def __init__(self, pool: BlockPool, *, block_size: int, lag: int) -> None:
        """Start with none; a token is known, and its block can be cached, `lag` iterations after it is computed."""
        self.num_sequences = 0
        self.next_finish = NEVER
        """The iteration at whose end the next of them finishes."""
        self._origin_sum = 0
        self._pool = pool
        self._size = block_size
        self._lag = lag

    def start(self, sequence: Sequence, iteration: int) -> None:
        """Add a sequence whose prefill an iteration completes."""
        sequence.decoding = True
        sequence.origin = iteration - sequence.num_known
        sequence.last_iteration = sequence.origin + sequence.num_total - 2
        self._origin_sum += sequence.origin
        self.num_sequences += 1
        self.next_finish = min(self.next_finish, sequence.last_iteration)

    def stop(self, sequence: Sequence, num_computed: int) -> None:
        """Remove a sequence; the caller must call `find_next_finish`."""
        sequence.decoding = False
        sequence.num_computed = num_computed
        sequence.num_blocks = -(-num_computed // self._size)
        self._origin_sum -= sequence.origin
        self.num_sequences -= 1

    def delay(self, sequence: Sequence, iteration: int) -> None:
        """Give a sequence no token in an iteration; a last one in flight is not late. Then call `find_next_finish`."""
        sequence.origin += 1
        self._origin_sum += 1
        if sequence.last_iteration >= iteration:
            sequence.last_iteration += 1

    def find_next_finish(self, running: list[Sequence]) -> None:
        """Find the next running sequence to finish."""
        self.next_finish = min([s.last_iteration for s in running if s.decoding], default=NEVER)

    def num_kv_tokens(self, iteration: int) -> int:
        """Return the tokens of context that all of them read in an iteration."""
        return self.num_sequences * iteration - self._origin_sum

    # Blocks

    def num_new_blocks(self, decodes: list[Sequence], iteration: int) -> int:
        """Return the number of blocks that these decodes allocate in an iteration."""
        size = self._size
        return sum([(iteration - s.origin) % size == 0 for s in decodes])

    def num_iterations(self, decodes: list[Sequence], first: int, limit: int) -> int:
        """Return for how many iterations from `first` on the free blocks suffice, at most `limit`."""
        size, free = self._size, self._pool.num_free
        if len(decodes) * (limit // size + 1) <= free:
            return limit
        origins = [s.origin for s in decodes]
        return bisect_right(
            range(1, limit + 1), free, key=lambda count: _blocks_taken(origins, first, first + count, size)
        )

    def grow(self, decodes: list[Sequence], iteration: int) -> None:
        """Give each decode a block if it needs one, and cache the block that its known tokens have filled."""
        pool, size, num_new_known = self._pool, self._size, 1 - self._lag
        if size == 1:
            touching = decodes
        elif num_new_known:
            touching = [s for s in decodes if (p := (iteration - s.origin) % size) == 0 or p == size - 1]
        else:
            touching = [s for s in decodes if (iteration - s.origin) % size == 0]
        for sequence in touching:
            computed = iteration - sequence.origin
            if computed % size == 0:
                pool.allocate(1)
            if (computed + num_new_known) % size == 0:
                pool.store(sequence, (computed + num_new_known) // size)

    def grow_at_once(self, decodes: list[Sequence], first: int, stop: int) -> None:
        """Do the same for iterations `first` to `stop`, exclusive, one sequence after the other."""
        pool, size, known_until = self._pool, self._size, stop - self._lag
        taken = _blocks_taken([s.origin for s in decodes], first, stop, size)
        if taken:
            pool.allocate(taken)
        if pool.enable_prefix_caching:
            for sequence in decodes:
                if (known_until - sequence.origin) // size > sequence.num_cached_blocks:
                    pool.store(sequence, (known_until - sequence.origin) // size)


def _blocks_taken(origins: list[int], first: int, stop: int, block_size: int) -> int:
    """Count the blocks that decodes with these origins allocate in iterations `first` to `stop`, exclusive."""
    begin, end = first - 1, stop - 1  # ceil((i - origin) / size) = (i - 1 - origin) // size + 1
    return sum([(end - origin) // block_size - (begin - origin) // block_size for origin in origins])
