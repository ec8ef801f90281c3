"""One rank: its active requests and its blocks, and what happens to them in a step.

schedule        who computes how much                          (capacity.py, micro_batch.py)
pause           the blocks of paused requests are free
allocate        blocks for the step; cached ones are claimed; too many tokens are trimmed
advance         the step is launched: positions in prompts
sample          its tokens are known
end             cancelled and ended requests leave; what was computed is stored
"""

from mocker.trtllm.block_pool import BlockPool
from mocker.trtllm.capacity import Capacity, Passed
from mocker.trtllm.micro_batch import MicroBatch, MicroBatchScheduler
from mocker.trtllm.request import COMPLETING, CONTEXT, ENDED, GENERATING, TRANSFERRING, Request
from mocker.trtllm.settings import Settings
from mocker.trtllm.trimming import trim


class RankStep:
    """What one rank does in a step."""

    __slots__ = (
        "batch",
        "chunks",
        "dummy",
        "hits",
        "is_held",
        "is_padded",
        "num_tokens",
        "passed",
        "planned",
        "trimmed",
    )

    def __init__(self, passed: Passed, batch: MicroBatch) -> None:
        self.passed = passed
        self.batch = batch
        """What it computes; without contexts, if they wait."""
        self.planned = [(request, request.chunk, request.credit) for request in batch.contexts]
        """The prompts in its batch before any waited or was cut: request, chunk, tokens expected in the cache."""
        self.is_held = False
        """Whether contexts wait."""
        self.is_padded = False
        """Whether a dummy was added because nothing else can run."""
        self.dummy: Request | None = None
        self.hits: dict[Request, int] = {}
        """Tokens that were found in the cache."""
        self.trimmed: dict[Request, int] = {}
        """Chunks that were cut, as they were."""
        self.chunks: list[tuple[Request, int, int]] = []
        """Of prompts: request, first position, tokens."""
        self.num_tokens = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing is computed."""
        return not (self.batch.contexts or self.batch.generating)


class Rank:
    """The requests of one rank, and their KV."""

    def __init__(
        self, settings: Settings, pool: BlockPool, capacity: Capacity, micro_batch: MicroBatchScheduler
    ) -> None:
        self.active: list[Request] = []
        """In the order in which they came."""
        self.may_end = False
        """Whether a request has ended or was cancelled since `end`."""
        self.pool = pool
        self._settings = settings
        self._size = settings.tokens_per_block
        self._num_decoded = 1 + settings.max_draft_len
        self._capacity = capacity
        self._micro_batch = micro_batch

    def schedule(self, *, takes_new: bool = True) -> RankStep:
        """Decide who computes how much; without `takes_new`, only those that have started."""
        active = self.active if takes_new else [request for request in self.active if request.is_started]
        passed = self._capacity.schedule(active)
        return RankStep(passed, self._micro_batch.schedule(passed.requests))

    # Blocks

    def free_paused(self, step: RankStep) -> None:
        """Free the blocks of requests that are paused; their outputs in flight still count."""
        for request in step.passed.paused:
            self._release(request)

    def _release(self, request: Request) -> None:
        """Store what a request has computed, and free its blocks."""
        self._store(request)
        self.pool.release(request.blocks)
        request.blocks = []

    def _store(self, request: Request) -> None:
        """Make full blocks findable: of all known tokens but the last, whose KV is not computed yet."""
        num_computed = request.position if request.state == CONTEXT else request.num_tokens - 1
        self.pool.store(request.chain, request.blocks, min(num_computed // self._size, len(request.blocks)))

    def start_transfers(self, step: RankStep) -> None:
        """Give blocks to the requests whose prompts' KV comes from elsewhere."""
        for request in step.passed.inits:
            request.blocks = self.pool.take(-(-request.num_prompt // self._size))
            request.slots = request.position = request.num_prompt
            request.state = TRANSFERRING

    def allocate(self, step: RankStep) -> None:
        """Give the requests of a step their blocks, and trim it if it has too many tokens."""
        batch, settings = step.batch, self._settings
        for request in batch.contexts:
            if self.pool.enable_block_reuse and request.is_first_chunk:
                self._claim(request, step)
        for request in batch.contexts:
            if request.slots == 0:
                request.slots = request.num_prompt
                self._grow(request)
        self.grow(batch.generating, 1)
        _put_unfinished_first(batch.contexts)
        self._count(step)
        if settings.chunk_unit is not None and step.num_tokens > settings.max_num_tokens:
            step.trimmed = trim(batch.contexts, step.num_tokens - settings.max_num_tokens, self._size)
            _put_unfinished_first(batch.contexts)
            self._count(step)
        step.chunks = [(request, request.position, request.chunk) for request in batch.contexts]

    def _claim(self, request: Request, step: RankStep) -> None:
        """Claim what is cached of a prompt, but for its last token; a chunk in the middle then ends with a block."""
        count = self.pool.num_cached(request.chain, (request.num_prompt - 1) // self._size)
        if count == 0:
            return
        request.blocks = self.pool.claim(request.chain, count)
        request.position = step.hits[request] = count * self._size
        end = min(request.position + request.chunk, request.num_prompt)
        if end < request.num_prompt:
            end -= end % self._size
        request.chunk = end - request.position

    def grow(self, generating: list[Request], num_iterations: int) -> None:
        """Give generating requests the blocks for their next iterations."""
        size, count = self._size, num_iterations * self._num_decoded
        for request in generating:
            request.slots += num_iterations if request.is_dummy else count
            if len(request.blocks) * size < request.slots:
                self._grow(request)

    def _grow(self, request: Request) -> None:
        """Take blocks for a request's slots."""
        missing = -(-request.slots // self._size) - len(request.blocks)
        if missing > 0:
            request.blocks += self.pool.take(missing)

    def _shrink(self, request: Request, count: int) -> None:
        """Give back the slots of rejected guesses."""
        request.slots -= count
        while len(request.blocks) > -(-request.slots // self._size):
            self.pool.give_back(request.blocks.pop())

    def _count(self, step: RankStep) -> None:
        num_dummies = sum([request.is_dummy for request in step.batch.generating])
        step.num_tokens = sum([request.chunk for request in step.batch.contexts])
        step.num_tokens += (len(step.batch.generating) - num_dummies) * self._num_decoded + num_dummies

    # States

    def reset_paused(self, step: RankStep) -> None:
        """Let paused requests start again."""
        for request in step.passed.paused:
            if request.state != ENDED or self._settings.pauses_ended:
                request.pause()

    def advance(self, step: RankStep) -> None:
        """Count the chunks of a step as computed."""
        for request, _, chunk in step.chunks:
            if request.state == CONTEXT:
                request.position += chunk
                request.chunk = 0
                if request.position >= request.num_prompt:
                    request.state = GENERATING

    def sample(self, step: RankStep, accepted: dict[Request, int]) -> None:
        """Record the tokens that a step has brought, with so many accepted guesses."""
        for request, start, chunk in step.chunks:
            if request.state != ENDED and start + chunk == request.num_prompt:
                request.add_outputs(1)
                self.may_end |= request.state == ENDED
        if self._num_decoded > 1:
            self._sample_guesses(step, accepted)
            return
        for request in step.batch.generating:
            if request.state != ENDED and not request.is_dummy:
                request.num_outputs += 1
                if request.num_outputs >= request.last_output:
                    request.state = ENDED
                    self.may_end = True

    def _sample_guesses(self, step: RankStep, accepted: dict[Request, int]) -> None:
        """Record the tokens of generating requests and their guesses; what was rejected leaves its slots."""
        for request in step.batch.generating:
            if request.state != ENDED and not request.is_dummy:
                num_accepted = accepted.get(request, 0)
                request.add_outputs(1 + num_accepted)
                self.may_end |= request.state == ENDED
                if request.state != ENDED and request.blocks:
                    self._shrink(request, self._num_decoded - 1 - num_accepted)

    def mark_last(self, step: RankStep) -> None:
        """Leave out of batches from now on those whose token in flight is the last."""
        last = [request for request, _, _ in step.chunks if request.num_outputs + 1 >= request.num_left]
        last += [request for request in step.batch.generating if request.num_outputs + 1 >= request.num_left]
        for request in last:
            if request.state == GENERATING:
                request.state = COMPLETING

    def end(self) -> list[Request]:
        """Let cancelled and ended requests leave."""
        if not self.may_end:
            return []
        self.may_end = False
        gone = [request for request in self.active if request.state == ENDED or request.is_cancelled]
        for request in gone:
            if request.is_context_only and not request.is_cancelled:
                self._store(request)  # its blocks stay
            else:
                self._release(request)
            request.state = ENDED
            self.active.remove(request)
        return gone

    def leave(self, request: Request, *, has_kv: bool) -> None:
        """Let a request leave that no step computes; without its KV, nothing of it is stored."""
        if has_kv:
            self._store(request)
        self.pool.release(request.blocks)
        request.blocks = []
        request.state = ENDED
        self.active.remove(request)

    def store(self, step: RankStep) -> None:
        """Make prompts of a step findable that are complete by now, or with `stores_chunks` what was computed of them.

        With overlap, the last chunk may still be in flight.
        """
        for request, _, _ in step.chunks:
            if request.blocks and (request.state != CONTEXT or self._settings.stores_chunks):
                self._store(request)


def _put_unfinished_first(contexts: list[Request]) -> None:
    """Order contexts again, now that their chunks are known: those that end a prompt last."""
    contexts.sort(key=_ends_prompt)


def _ends_prompt(request: Request) -> bool:
    return request.position + request.chunk >= request.num_prompt
