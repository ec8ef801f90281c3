"""How a scheduler keeps KV in host memory: it asks for the KV there, loads it, and offers new KV.

    a prompt is admitted           `ask`: this many tokens are there; or ask again, as they are being written or read
      ... and some are there       `load`: a copy to the GPU; the sequence waits for it in `holding`
      ... and there is budget      `reserve`, then `load` within the step: it computes once the copy has ended
    the end of each `schedule`     `end_schedule`: chunks that its batch completes, and those of sequences that have ended
                                   since, are offered; copies to the host start with the next step
    a GPU block is taken again     while its copy is in progress, though its sequence has ended: the copy is flushed,
                                   that is, it must end before the step runs
    the driver reports             `end_copy`

Copies are not part of iterations: `take_work` reports them to the driver.

Behind host memory there may be tiers (`mocker/tiers/work.py`), for which the driver acts:

    host memory lacks chunks of a prompt that is admitted    LookUp --> `end_look_up`; if there is room: Read --> `end_read`
    a store has ended; or a load; or chunks are evicted      Write --> `end_write`, by the tier's policy

A prompt must ask again until its reads have ended, and then finds them in host memory. It looks up once, and again only
if host memory has lost the start of it meanwhile.

Semantics: OffloadingConnectorScheduler and TieringOffloadingManager of vLLM 0.32 and 0.33; prefetching as in SGLang's HiCache.
"""

from collections.abc import Iterable

from mocker.chain import BlockChain
from mocker.contract import Outbox
from mocker.position import NEVER
from mocker.sequence import Sequence
from mocker.tiers.chunk_cache import ChunkCache, Uses
from mocker.tiers.config import HostMemory, TierName
from mocker.tiers.copies import NO_WORK, SequenceCopy, Work
from mocker.tiers.ranges import Range, overlap, split
from mocker.tiers.work import Found, Hurry, LookUp, Read, Write
from mocker.vllm.block_pool import BlockPool
from mocker.vllm.block_runs import BlockWatch
from mocker.vllm.offload.offload import Offload
from mocker.vllm.versions import Rules


class State:
    """The state of a sequence here."""

    __slots__ = (
        "copies",
        "fetches",
        "is_over",
        "looked_up_from",
        "num_offered",
        "sources",
        "uses",
        "watch",
    )

    def __init__(self, sequence: Sequence) -> None:
        self.uses = Uses()
        self.fetches: dict[LookUp | Read, None] = {}
        """The requests to tiers behind host memory for which it waits."""
        self.looked_up_from = NEVER
        """The first chunk of the last look-up; look up again if host memory has since lost chunks before it."""
        self.sources: list[tuple[TierName, Range]] = []
        """The tiers of the chunks that were not in host memory."""
        self.num_offered = 0
        """Chunks that were offered, or loaded, since it last asked what is there or, in 0.32, ever."""
        self.copies: dict[SequenceCopy, None] = {}
        self.watch = BlockWatch(sequence)
        """The watch over its blocks, once it has ended."""
        self.is_over = False


class HostOffload(Offload):
    """The scheduler's side of offloading to host memory."""

    def __init__(self, memory: HostMemory, pool: BlockPool, block_size: int, outbox: Outbox, rules: Rules) -> None:
        """Start with an empty host cache, next to a GPU's pool of blocks of this many tokens.

        Without prefix caching on the GPU, what one sequence loads another may load meanwhile: it would not find it there.
        """
        host = ChunkCache(
            memory.num_chunks,
            blocks_per_chunk=memory.blocks_per_chunk,
            eviction_policy=memory.eviction_policy,
            store_threshold=memory.store_threshold,
            ranks_by_request=rules.ranks_by_request,
        )
        super().__init__(host)
        self._offers_again = rules.offers_again
        self._tokens_a_step = self._tokens_left = memory.load_tokens_within_step  # loaded before it computes
        self.loads_within_step = rules.loads_within_step and self._tokens_a_step > 0
        self._pool = pool
        self.is_prompt_only = memory.offload_prompt_only
        self._size = memory.blocks_per_chunk * block_size
        self._blocks_per_chunk = memory.blocks_per_chunk
        self._states: dict[Sequence, State] = {}
        self._copies: dict[int, SequenceCopy] = {}
        self._num_copies = 0
        self._tiers = memory.tiers
        self.prefetches = bool(memory.tiers) and memory.prefetch_policy != "when_scheduled"
        self.writes_stores = any(tier.write_policy == "write_through" for tier in memory.tiers)
        self._is_hasty = memory.prefetch_policy == "best_effort"
        self._fetches: dict[LookUp | Read, None] = {}
        self._outbox = outbox
        if any(tier.write_policy == "write_back" for tier in memory.tiers):
            self.host.evicted = []
        self._num_over = 0  # sequences that are over while KV of theirs is copied
        self._work = Work()

    # What the scheduler calls

    def ask(self, sequence: Sequence, num_computed: int) -> int | None:
        """See `Offload`."""
        state, size, chain = self._states.get(sequence), self._size, sequence.chain
        if state is not None and self._offers_again:
            state.num_offered = 0
        if state is not None and (state.copies or state.fetches):
            self._hurry(state)
            return None
        start, limit = num_computed // size, sequence.num_known // size
        if limit * size - num_computed < size:
            return 0
        stop, is_ready = self.host.find(chain, start, limit)
        if self._tiers and stop < limit and (state is None or stop < state.looked_up_from):
            self._look_up(sequence, stop, limit)
            self._hurry(self._states[sequence])
            return None
        if not is_ready:
            return None
        num_found = stop * size - num_computed
        if num_found < size:
            return 0
        awaits_others = self._pool.enable_prefix_caching and self.host.is_being_read(chain, start, stop)
        return None if awaits_others else num_found

    def is_fetching(self, sequence: Sequence) -> bool:
        """See `Offload`."""
        state = self._states.get(sequence)
        if state is None or not state.fetches:
            return False
        return not self._is_hasty or all(fetch.is_hurried for fetch in state.fetches)

    def begin_step(self) -> None:
        """See `Offload`."""
        self._tokens_left = self._tokens_a_step

    def reserve(self, num_tokens: int, num_needed: int) -> bool:
        """See `Offload`: a token must be left to compute, and the budget of the step must suffice."""
        if num_tokens >= num_needed or num_tokens > self._tokens_left:
            return False
        self._tokens_left -= num_tokens
        return True

    def load(self, sequence: Sequence, num_computed: int, num_tokens: int, *, is_within_step: bool = False) -> None:
        """See `Offload`."""
        start, stop = num_computed // self._size, (num_computed + num_tokens) // self._size
        state = self._state(sequence)
        self.host.pin(sequence.chain, start, stop, state.uses, delays_others=not is_within_step)
        state.num_offered = stop
        copy = self._copy(sequence, state, [(start, stop)], is_store=False)
        copy.num_local, copy.num_tokens, copy.is_within_step = num_computed, num_tokens, is_within_step
        self._work.loads.append(copy)
        if not sequence.num_preemptions:
            self._note_sources(sequence, state, start, stop, num_computed)

    def preempt(self, sequence: Sequence) -> None:
        """See `Offload`."""
        state = self._states.get(sequence)
        if state is not None:
            for copy in state.copies:
                self._work.flushed[copy] = None
            state.looked_up_from = NEVER
        self.refused.pop(sequence, None)

    def end(self, sequence: Sequence, num_computed: int) -> None:
        """See `Offload`."""
        if num_computed or sequence in self._states:
            self._pool.watch(sequence, self._state(sequence).watch)
            self.ended.append((sequence, num_computed))

    @property
    def is_quiet(self) -> bool:
        """See `Offload`."""
        return not (self.refused or self.ended or self._pool.touched or self._num_over or self._work)

    @property
    def is_copying(self) -> bool:
        """See `Offload`."""
        return bool(self._copies or self._fetches)

    def end_schedule(self, offers: Iterable[tuple[Sequence, int]]) -> bool:
        """See `Offload`."""
        watches, self._pool.touched = self._pool.touched, []
        for watch in watches:
            for copy in self._states[watch.sequence].copies if watch.is_on else ():
                self._flush_if_taken(copy, watch)
        for sequence, num_tokens in offers:
            self._offer(sequence, num_tokens)
        ended, self.ended = self.ended, []
        for sequence, num_tokens in ended:
            offered = self._offer(sequence, num_tokens)
            if offered is not None:
                self._flush_if_taken(offered, self._states[sequence].watch)
        for sequence, _ in ended:
            state = self._states[sequence]
            state.is_over = True
            self._num_over += 1
            self.host.finish(sequence.chain, state.uses)
            self.refused.pop(sequence, None)
            self._forget_if_done(sequence, state)
        for watch in watches:
            watch.taken = []
        if self.host.evicted:
            self._write_back(self.host.evicted)
        return bool(self._work)

    def take_work(self) -> Work:
        """See `Offload`."""
        if not self._work:
            return NO_WORK
        work, self._work = self._work, Work()
        return work

    def end_copy(self, number: int) -> None:
        """See `Offload`."""
        copy = self._copies.pop(number)
        sequence, state = copy.sequence, self._states[copy.sequence]
        if copy.is_store:
            self.host.complete_store(sequence.chain, copy.ranges)
        else:
            for start, stop in copy.ranges:
                self.host.unpin(sequence.chain, start, stop, is_load=not copy.is_within_step)
        if self._tiers:
            self._write(sequence, copy.ranges, "write_through" if copy.is_store else "write_through_selective")
        del state.copies[copy]
        self._forget_if_done(sequence, state)

    # Tiers behind host memory

    def may_look_up(self, sequence: Sequence) -> bool:
        """See `Offload`."""
        state = self._states.get(sequence)
        return bool(self._tiers) and (state is None or state.looked_up_from > 0)

    def prefetch(self, sequence: Sequence, num_computed: int) -> None:
        """See `Offload`."""
        limit = sequence.num_known // self._size
        stop, _ = self.host.find(sequence.chain, num_computed // self._size, limit)
        if stop < limit:
            self._look_up(sequence, stop, limit)

    def end_look_up(self, look_up: LookUp, found: list[Found]) -> None:
        """See `Offload`."""
        del self._fetches[look_up]
        sequence, state = look_up.sequence, self._states.get(look_up.sequence)
        if state is None or look_up not in state.fetches:
            return
        del state.fetches[look_up]
        start, stop = look_up.start, found[-1].stop if found else look_up.start
        if stop == start or state.is_over:
            return
        head = 0
        stop = min(stop, start + self.host.room(sequence.chain, head, stop))
        ranges = self.host.offer(sequence.chain, start, stop, state.uses, head=head) if stop > start else None
        for tier, tier_stop in found:
            if here := overlap(ranges or (), start, tier_stop):
                read = Read(tier, sequence, here)
                state.sources += [(tier, chunks) for chunks in here]
                self._fetches[read] = state.fetches[read] = None
                self._outbox.tier_work.append(read)
            start = tier_stop
        if self.host.evicted:
            self._write_back(self.host.evicted)

    def end_read(self, read: Read, num_chunks: int) -> None:
        """See `Offload`."""
        del self._fetches[read]
        chain = read.sequence.chain
        come, lost = split(read.ranges, num_chunks)
        self.host.complete_store(chain, come)
        self.host.abandon(chain, lost)
        state = self._states.get(read.sequence)
        if state is not None:
            state.fetches.pop(read, None)

    def end_write(self, write: Write) -> None:
        """See `Offload`."""
        if write.is_pinned:
            for start, stop in write.ranges:
                self.host.unpin(write.chain, start, stop, is_load=False)

    def _look_up(self, sequence: Sequence, start: int, stop: int) -> None:
        look_up, state = LookUp(sequence, start, stop), self._state(sequence)
        state.looked_up_from = start
        self._fetches[look_up] = state.fetches[look_up] = None
        self._outbox.tier_work.append(look_up)

    def _hurry(self, state: State) -> None:
        """Report to the driver that a sequence's turn has come, if that ends its wait."""
        if not self._is_hasty:
            return
        for fetch in state.fetches:
            if not fetch.is_hurried:
                fetch.is_hurried = True
                self._outbox.tier_work.append(Hurry(fetch))

    def _write(self, sequence: Sequence, ranges: list[Range], policy: str) -> None:
        """Write chunks that are in host memory to the tiers with a policy."""
        for tier in self._tiers:
            if tier.write_policy == policy:
                for start, stop in ranges:
                    self.host.pin(sequence.chain, start, stop)
                self._outbox.tier_work.append(Write(tier.name, sequence.chain, ranges, is_pinned=True))

    def _write_back(self, evicted: list[tuple[BlockChain, int, int]]) -> None:
        """Write chunks that left host memory to the tiers that keep those."""
        for chain, start, stop in evicted:
            for tier in self._tiers:
                if tier.write_policy == "write_back":
                    self._outbox.tier_work.append(Write(tier.name, chain, [(start, stop)], is_pinned=False))
        evicted.clear()

    # The steps of these

    def _note_sources(self, sequence: Sequence, state: State, start: int, stop: int, num_local: int) -> None:
        """Record from which tiers a sequence got the tokens of some of its chunks, after those on the GPU."""
        tokens: dict[TierName, int] = {"disk": 0, "store": 0}
        left = [(start, stop)]
        for tier, (first, last) in reversed(state.sources):  # chunks lost and fetched again came from the later one
            for low, high in overlap(left, first, last):
                tokens[tier] += high * self._size - max(low * self._size, num_local)
            left = overlap(left, start, first) + overlap(left, last, stop)
        sequence.disk_tokens, sequence.store_tokens = tokens["disk"], tokens["store"]
        sequence.host_tokens = max(stop * self._size - num_local, 0) - tokens["disk"] - tokens["store"]

    def _state(self, sequence: Sequence) -> State:
        state = self._states.get(sequence)
        if state is None:
            state = self._states[sequence] = State(sequence)
        return state

    def _forget_if_done(self, sequence: Sequence, state: State) -> None:
        if state.is_over and not state.copies:
            state.watch.is_on = False
            self._num_over -= 1
            del self._states[sequence]

    def _copy(self, sequence: Sequence, state: State, ranges: list[Range], *, is_store: bool) -> SequenceCopy:
        copy = SequenceCopy(self._num_copies, sequence, ranges, is_store=is_store)
        self._num_copies += 1
        self._copies[copy.number] = copy
        state.copies[copy] = None
        return copy

    def _offer(self, sequence: Sequence, num_tokens: int) -> SequenceCopy | None:
        """Offer the chunks of this many tokens that were not offered before; return the resulting copy, if any."""
        if self.is_prompt_only:
            num_tokens = min(num_tokens, sequence.num_prompt)
        state, stop = self._state(sequence), num_tokens // self._size
        if stop <= state.num_offered:
            return None
        ranges = self.host.offer(sequence.chain, state.num_offered, stop, state.uses)
        if ranges is None:
            self.num_refused += sequence not in self.refused
            self.refused[sequence] = None
            return None
        self.refused.pop(sequence, None)
        state.num_offered = stop
        if not ranges:
            return None
        copy = self._copy(sequence, state, ranges, is_store=True)
        self._work.stores.append(copy)
        return copy

    def _flush_if_taken(self, copy: SequenceCopy, watch: BlockWatch) -> None:
        """Flush a copy to the host if a block that it reads was reused in this step."""
        size = self._blocks_per_chunk
        if copy.is_store and any(
            start * size < taken_stop and taken_start < stop * size
            for start, stop in copy.ranges
            for taken_start, taken_stop in watch.taken
        ):
            self._work.flushed[copy] = None
