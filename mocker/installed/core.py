"""The core of an engine whose decisions are those of an installed one's scheduler.

    schedule --> its scheduler closes a batch --> who has tokens, who begins, who is preempted --> `Batch`
    update   --> its scheduler learns what the oldest batch brought --> who has new tokens, who has ended

Nothing is decided here. What is known of each sequence is counted, for step times and for routers. A batch that is the same
as the one before it is the same object, as with our own core, so that its steps follow each other in time without rounding.
No step spans several iterations.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Hashable

from mocker.batch import NOBODY, Batch
from mocker.chain import BlockChain
from mocker.contract import Backlog, EngineSettings, NeverAdmittedError, Outbox, Pause, Remaining, View
from mocker.core import Core
from mocker.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from mocker.installed.scheduler import Asked, InstalledScheduler, Scheduled
from mocker.prefix_cache_stats import PrefixCacheStats
from mocker.sequence import OVER, RUNNING, WAITING, Sequence
from mocker.speculation.drafter import Drafter
from mocker.step_log import StepLog


class Names:
    """Numbers for the names of blocks, and the chains in which they are."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._chains: list[tuple[BlockChain, int]] = []

    def of(self, chain: BlockChain) -> list[int]:
        """Return the number of each name in a chain."""
        found = []
        for place, name in enumerate(chain.ids[:-1]):
            number = self._numbers.setdefault(name, len(self._chains))
            if number == len(self._chains):
                self._chains.append((chain, place))
            found.append(number)
        return found

    def block(self, number: int, offset: int) -> tuple[BlockChain, int]:
        """Return where the block with this name is: a chain, and its place there."""
        chain, place = self._chains[number]
        return chain, chain.first_block(place) + offset


class InstalledCore(Core):
    """Asks the scheduler, and describes what it answers."""

    def __init__(
        self,
        config: EngineSettings,
        num_blocks: int,
        scheduler: InstalledScheduler,
        *,
        drafter: Drafter | None = None,
        steps: StepLog | None = None,
    ) -> None:
        """Start idle.

        Args:
            config: the engine's settings.
            num_blocks: KV blocks that can hold tokens.
            scheduler: the installed one, with these settings.
            drafter: answers for drafts; needed with speculation.
            steps: logs what is decided.
        """
        self.outbox = Outbox()
        self.pause: Pause | None = None
        self.running: list[Sequence] = []
        self.dropped: list[Sequence] = []
        self.prefix_cache_stats = PrefixCacheStats()
        self._config = config
        self._scheduler = scheduler
        self._drafter = drafter
        self._steps = steps
        self._num_blocks = self._num_free = num_blocks
        self._names = Names()
        self._adapters: dict[str, int] = {}
        self._sequences: dict[int, Sequence] = {}
        self._numbers: dict[Sequence, int] = {}
        self._num_added = 0
        self._waiting: dict[Sequence, None] = {}
        self._prefilling: dict[Sequence, None] = {}  # of the running ones
        self._starved = NOBODY  # in the last iteration
        self._steady: Batch | None = None  # the last batch, if only decodes have a token in it
        self._flights: deque[Batch] = deque()
        self._events: list[KvEvent] = []
        self._iteration = self._num_ended = 0

    # Iterations

    def schedule(self) -> Batch | None:
        """See `Core`."""
        if self.pause == "all":
            return None
        assert self.pause is None, "an installed scheduler always takes new sequences"
        closed = self._scheduler.schedule()
        self._num_free = closed.num_free
        for number in closed.ended:
            self._end(self._sequences[number])
        if not closed.is_closed:
            return None
        batch = self._described(closed)
        if self._steps is not None:
            tokens = [(self._sequences[number], count) for number, count, _ in closed.tokens]
            self._steps.add(batch, tokens, closed.num_free)
        self._flights.append(batch)
        self._iteration += 1
        return batch

    def _described(self, closed: Scheduled) -> Batch:
        batch = Batch(self._iteration)
        batch.preempted = [self._preempt(self._sequences[number]) for number in closed.preempted]
        for number, num_found in closed.started:
            self._start(batch, self._sequences[number], num_found)
        batch.decodes = []
        for number, count, is_partial in closed.tokens:
            self._give(batch, self._sequences[number], count, is_partial=is_partial)
        if len(closed.tokens) < len(self.running):
            batch.starved = self._left_out(batch, {number for number, _, _ in closed.tokens})
        batch.delayed = [one for one in batch.decodes if one in self._starved] if self._starved else NOBODY
        self._starved = batch.starved
        if self._drafter is not None:
            batch.drafts = {self._sequences[number]: count for number, count in closed.drafts}
            batch.num_encoder_tokens = 0
        elif not (batch.chunks or batch.preempted or batch.starved or batch.delayed):
            if self._steady is not None and self._steady.decodes == batch.decodes:
                return self._steady
            batch.is_undisturbed = True
        self._steady = batch if batch.is_undisturbed else None
        batch.num_kv_tokens = sum([sequence.num_computed for sequence in batch.decodes])
        return batch

    def _preempt(self, sequence: Sequence) -> Sequence:
        self.running.remove(sequence)
        self._prefilling.pop(sequence, None)
        self._waiting[sequence] = None
        if not sequence.is_over:  # SGLang has yet to end what was aborted
            sequence.state = WAITING
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        return sequence

    def _start(self, batch: Batch, sequence: Sequence, num_found: int) -> None:
        del self._waiting[sequence]
        self.running.append(sequence)
        self._prefilling[sequence] = None
        if not sequence.is_over:
            sequence.state = RUNNING
        sequence.num_computed = num_found
        self.prefix_cache_stats.count(sequence, num_found)
        if sequence.num_preemptions:
            batch.resumed = [*batch.resumed, sequence]
        else:
            batch.admitted = [*batch.admitted, sequence]

    def _give(self, batch: Batch, sequence: Sequence, count: int, *, is_partial: bool) -> None:
        """Record the tokens of a sequence in a batch."""
        sequence.num_computed += count
        if sequence not in self._prefilling:
            batch.decodes.append(sequence)
            return
        batch.chunks.append((sequence, count))
        if not is_partial:
            del self._prefilling[sequence]
            batch.sampled = [*batch.sampled, sequence]

    def _left_out(self, batch: Batch, given: set[int]) -> list[Sequence]:
        """Return the decodes without a token, except those whose last one is in flight."""
        return [
            one
            for one in self.running
            if self._numbers[one] not in given and one not in self._prefilling and one.num_computed < one.num_limit - 1
        ]

    def update(self, batch: Batch, num_iterations: int = 1) -> tuple[list[Sequence], list[Sequence]]:
        """See `Core`."""
        assert num_iterations == 1, "each iteration has to be scheduled"
        assert self._flights.popleft() is batch, "batches end in order"
        self._num_ended += 1
        ended = self._scheduler.update([] if self._drafter is None else self._accepted(self._drafter, batch))
        self._num_free = ended.num_free
        speaking: dict[Sequence, int] = {}
        for number, count in ended.tokens:
            sequence = self._sequences[number]
            sequence.num_known += count
            speaking[sequence] = count
        sampled = [one for one in batch.sampled if one in speaking and not one.is_over] if batch.sampled else NOBODY
        if self._drafter is not None:
            batch.emitted = [(one, count) for one, count in speaking.items() if one not in sampled]
        for kind, blocks in ended.events:
            self._events += self._events_of(kind, blocks)
        ending = [self._sequences[number] for number in ended.finished]
        finished = [one for one in ending if not one.is_over]  # the driver knows of those that were aborted
        for one in ending:
            self._end(one)
        return sampled, finished

    def _accepted(self, drafter: Drafter, batch: Batch) -> list[tuple[int, int]]:
        """Ask how many drafts of a batch are accepted; those of a sequence that began in it only pad it."""
        chunks, found = {sequence for sequence, _ in batch.chunks}, []
        for sequence, num_drafts in batch.drafts.items():
            if sequence.state == OVER:
                continue
            num_accepted = 0 if sequence in chunks else drafter.accepted(sequence, num_drafts)
            if sequence.state == RUNNING:
                sequence.num_computed -= num_drafts - num_accepted
            found.append((self._numbers[sequence], num_accepted))
        return found

    def _end(self, sequence: Sequence) -> None:
        if sequence in self._waiting:
            del self._waiting[sequence]
        else:
            self.running.remove(sequence)
            self._prefilling.pop(sequence, None)
        sequence.state = OVER
        del self._sequences[self._numbers.pop(sequence)]

    def num_leap_iterations(self, batch: Batch, limit: int) -> int:
        """See `Core`."""
        return 1

    def may_evict(self, num_iterations: int) -> bool:
        """See `Core`."""
        return False

    def leap(self, num_iterations: int, *, is_ordered: bool) -> None:
        """See `Core`."""
        raise NotImplementedError("each iteration has to be scheduled")

    def end_iterations(self, num_iterations: int) -> None:
        """See `Core`."""
        raise NotImplementedError("each iteration has to be scheduled")

    def publish(self) -> None:
        """See `Core`."""
        if self._events:
            self.outbox.events += self._events
            self._events = []

    def _events_of(self, kind: str, blocks: list[tuple[int, int]]) -> list[KvEvent]:
        """Return what happened to blocks; those that follow each other in a chain are one event."""
        if kind == "cleared":
            return [AllBlocksCleared()]
        places = [self._names.block(*block) for block in blocks]
        if kind == "removed":
            return [BlockRemoved(chain, place, place + 1) for chain, place in places]
        runs: list[BlockStored] = []
        for chain, place in places:
            if runs and runs[-1].stop == place:
                runs[-1] = BlockStored(chain, runs[-1].start, place + 1)  # names are chained: it has those before, too
            else:
                runs.append(BlockStored(chain, place, place + 1))
        return [*runs]

    # Sequences

    def add(self, sequence: Sequence) -> None:
        """See `Core`."""
        self._check(sequence)
        number = self._num_added = self._num_added + 1
        self._sequences[number], self._numbers[sequence] = sequence, number
        self._waiting[sequence] = None
        chain, adapter = sequence.chain, 0
        if sequence.adapter:
            adapter = self._adapters.setdefault(sequence.adapter, len(self._adapters) + 1)
        most = self._scheduler.add(
            Asked(
                number=number,
                num_prompt=sequence.num_prompt,
                max_tokens=sequence.max_tokens,
                stop_after=sequence.stop_after,
                priority=sequence.priority,
                arrival=sequence.arrival,
                adapter=adapter,
                names=self._names.of(chain),
                num_named=chain.num_named,
                per_name=chain.blocks_per_id,
                ignores_eos=sequence.ignores_eos,
            )
        )
        sequence.num_limit = sequence.num_prompt + max(most, 1)
        sequence.num_total = min(sequence.num_total, sequence.num_limit)

    @abstractmethod
    def _check(self, sequence: Sequence) -> None:
        """Refuse a sequence that can never fit, and cut the answer of one that is too long.

        Raises:
            ValueError: it can never fit.
        """

    def abort(self, sequence: Sequence) -> None:
        """See `Core`."""
        if sequence.state != OVER:
            self._num_free = self._scheduler.abort(self._numbers[sequence])
            self._end(sequence)

    def end_load(self, sequence: Sequence, num_valid_blocks: int | None = None) -> bool:
        """See `Core`."""
        raise NotImplementedError("it loads no KV")

    def release_kept(self, sequence: Sequence) -> None:
        """See `Core`."""
        raise NotImplementedError("it keeps no KV for others")

    def reset_prefix_cache(self, *, preempts_running: bool = False) -> bool:
        """See `Core`."""
        if preempts_running:
            raise RuntimeError("an installed scheduler is reset only while nothing runs")
        return self._scheduler.reset()

    # What it is doing

    @property
    def num_ended(self) -> int:
        """See `Core`."""
        return self._num_ended

    @property
    def num_waiting(self) -> int:
        """See `Core`."""
        return len(self._waiting)

    @property
    def num_queued(self) -> int:
        """See `Core`."""
        return len(self._waiting)

    @property
    def num_blocks(self) -> int:
        """See `Core`."""
        return self._num_blocks

    @property
    def num_free_blocks(self) -> int:
        """See `Core`."""
        return self._num_free

    @property
    def is_stuck(self) -> bool:
        """See `Core`."""
        return False

    def stall(self) -> NeverAdmittedError | None:
        """See `Core`."""
        if self.running or not self._waiting or self.pause:
            return None
        first = next(iter(self._waiting))
        return NeverAdmittedError(first, f"{self._num_free} of {self._num_blocks} blocks are free, and nothing runs")

    def num_tokens(self, sequence: Sequence, num_starved: int = 0) -> int:
        """See `Core`."""
        return sequence.num_known

    def is_delivered(self, sequence: Sequence) -> bool:
        """See `Core`."""
        return sequence.state != OVER

    def sequences(self) -> list[Sequence]:
        """See `Core`."""
        return [one for one in (*self.running, *self._waiting) if not one.is_over]

    def view(self) -> View:
        """See `Core`."""
        return View(len(self.running), len(self._waiting), 0, 0, 0, 0, 0, self._num_blocks, self._num_free)

    def backlog(self) -> Backlog:
        """See `Core`."""
        to_compute = decode_kv = queued_decode_kv = 0
        for sequence in self.sequences():
            if sequence.state == RUNNING and sequence not in self._prefilling:
                decode_kv += sequence.num_known
            elif sequence.state == WAITING and sequence.num_preemptions:
                queued_decode_kv += sequence.num_known
            else:
                to_compute += max(sequence.num_known - sequence.num_computed, 0)
        return Backlog(to_compute, decode_kv, queued_decode_kv)

    def remaining(self) -> list[Remaining]:
        """See `Core`."""
        found = []
        for sequence in self.sequences():
            is_prefilled = sequence.state == RUNNING and sequence not in self._prefilling
            to_compute = 0 if is_prefilled else max(sequence.num_known - sequence.num_computed, 0)
            to_come = max(sequence.num_total - sequence.num_known, 0)
            found.append(Remaining(to_compute, to_come, sequence.num_known))
        return found
