"""TensorRT-LLM's scheduler, iteration by iteration, for one engine or for the ranks of attention DP.

    step = scheduler.schedule()           # iteration n: who computes what
    settled = scheduler.update(accepted)  # what is known at its end

    plain      admit, schedule, wait or balance, free and reset the paused, allocate | advance n, sample n, end, store n
    overlap    admit, schedule, wait or balance, free the paused, allocate | sample n-1, reset the paused, advance n, end,
               store n-1, mark those whose last token is in flight

So with overlap an end token is seen one step late. Cancels are handled only where results are.

This order was read from TensorRT-LLM's `py_executor.py` and not run; what each part decides was (see the parts).
"""

from mocker.chain import BlockChain
from mocker.trtllm.assembly import new_rank, new_waiting
from mocker.trtllm.capacity import Passed
from mocker.trtllm.micro_batch import MicroBatch
from mocker.trtllm.rank import RankStep
from mocker.trtllm.request import GENERATING, TRANSFERRING, Request
from mocker.trtllm.router import Router
from mocker.trtllm.settings import Settings


class Iteration:
    """An iteration of all ranks."""

    __slots__ = ("admitted", "is_forward", "ranks")

    def __init__(self, admitted: list[list[Request]], ranks: list[RankStep]) -> None:
        self.admitted = admitted
        """For each rank, the requests that have become active."""
        self.ranks = ranks
        self.is_forward = False
        """Whether anything is computed."""


class Scheduler:
    """Decides who is computed. It counts iterations and does not know the time."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.ranks = [new_rank(settings) for _ in range(settings.num_ranks or 1)]
        self.waiting: list[Request] = []
        """Requests that are not active yet, the next one first."""
        self.dropped: list[Request] = []
        """Cancelled requests that have left the queue in the last `update`."""
        self.batch_waiting, self.balance = new_waiting(settings)
        self._router = Router(max_active=settings.active_limit)
        self._previous: list[RankStep | None] = [None for _ in self.ranks]  # with overlap: launched, and not known yet
        self._last = self._nothing()
        self._has_cancels = False  # since cancelled requests last left the queue
        self.is_open = False
        """Whether the last iteration has not ended: `update` does that."""

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Cancel a request; it leaves where results are handled."""
        request.is_cancelled = self._has_cancels = True
        for rank in self.ranks:
            rank.may_end = True

    def end_transfer(self, request: Request) -> None:
        """Let a request generate whose prompt's KV has come; its first output came with it."""
        if request.state == TRANSFERRING:
            request.state = GENERATING
            request.add_outputs(1)
            for rank in self.ranks:
                rank.may_end = True

    # The first half of an iteration

    def schedule(self, *, takes_new: bool = True) -> Iteration:
        """Close the next step of all ranks; without `takes_new`, prompts that have not started are left alone."""
        iteration = Iteration(self._admit() if takes_new else [[] for _ in self.ranks], [])
        dummies = self._add_dummies()
        iteration.ranks = [rank.schedule(takes_new=takes_new) for rank in self.ranks]
        for rank, dummy in zip(self.ranks, dummies, strict=True):
            if dummy is not None:
                rank.active.remove(dummy)
        for step, dummy in zip(iteration.ranks, dummies, strict=True):
            step.dummy = dummy
        self._withhold(iteration.ranks)
        self._pad(iteration.ranks)
        iteration.is_forward = not any(step.is_empty for step in iteration.ranks)
        for rank, step in zip(self.ranks, iteration.ranks, strict=True):
            rank.free_paused(step)
            if not self.settings.has_overlap:
                rank.reset_paused(step)
            rank.start_transfers(step)
            if iteration.is_forward:
                rank.allocate(step)
        self._last, self.is_open = iteration, True
        return iteration

    def repeat(self, num_iterations: int) -> None:
        """Schedule the last step for more iterations, in which nothing happens but a token for each request."""
        self.ranks[0].grow(self._last.ranks[0].batch.generating, num_iterations)
        self.is_open = True

    def skip(self) -> None:
        """Begin an iteration in which nothing is scheduled."""
        self._last, self.is_open = self._nothing(), True

    def _nothing(self) -> Iteration:
        return Iteration([[] for _ in self.ranks], [RankStep(Passed(), MicroBatch()) for _ in self.ranks])

    def _admit(self) -> list[list[Request]]:
        """Let waiting requests become active, in order; those that cannot run yet count, too."""
        if self.settings.num_ranks is None:
            room = max(self.settings.active_limit - len(self.ranks[0].active), 0)
            admitted = [self.waiting[:room]]
            del self.waiting[:room]
        else:
            active = [rank.active for rank in self.ranks]
            admitted = self._router.deal(self._router.take(self.waiting, active), active)
        for rank, requests in zip(self.ranks, admitted, strict=True):
            rank.active += requests
        return admitted

    def _add_dummies(self) -> list[Request | None]:
        """Give each rank without requests a dummy, if another has some: all compute a step together."""
        if self.settings.num_ranks is None or not any(rank.active for rank in self.ranks):
            return [None for _ in self.ranks]
        dummies = [None if rank.active else new_dummy() for rank in self.ranks]
        for rank, dummy in zip(self.ranks, dummies, strict=True):
            if dummy is not None:
                rank.active.append(dummy)
        return dummies

    def _withhold(self, steps: list[RankStep]) -> None:
        """Let contexts wait, if batch waiting or the balance says so."""
        batches = [step.batch for step in steps]
        if self.balance is not None:
            withholds = self.balance.withholds(batches)
        else:
            withholds = self.batch_waiting is not None and self.batch_waiting.withholds(batches[0])
        if withholds:
            for step in steps:
                step.is_held = bool(step.batch.contexts)
                step.batch.contexts = []

    def _pad(self, steps: list[RankStep]) -> None:
        """Give each rank whose batch is empty a dummy, if it has room."""
        if self.settings.num_ranks is None:
            return
        for rank, step in zip(self.ranks, steps, strict=True):
            if step.is_empty and rank.active and len(rank.active) < self.settings.active_limit:
                step.dummy, step.is_padded = new_dummy(), True
                step.batch.generating.append(step.dummy)

    # The second half

    @property
    def has_in_flight(self) -> bool:
        """Whether a step before the last one is not known yet."""
        return any(step is not None for step in self._previous)

    def settled_step(self, index: int) -> RankStep | None:
        """Return the step of a rank whose tokens the next `update` brings."""
        iteration = self._last
        if not self.settings.has_overlap:
            return iteration.ranks[index] if iteration.is_forward else None
        return None if self._is_stuck(iteration, index) else self._previous[index]

    def _is_stuck(self, iteration: Iteration, index: int) -> bool:
        """Return whether a rank has a batch that may not run: with overlap, what it computed before stays unknown then."""
        return not (iteration.is_forward or iteration.ranks[index].is_empty or self.settings.settles_stuck)

    def update(self, accepted: dict[Request, int]) -> list[list[Request] | None]:
        """End an iteration, with so many guesses accepted; return for each rank the requests that ended, None if it settled none."""
        assert self.is_open, "schedule first"
        iteration, self.is_open = self._last, False
        self.dropped = []
        ended = [self._end(iteration, index, accepted) for index in range(len(self.ranks))]
        if any(gone is not None for gone in ended):
            self.drop_cancelled()
        for rank, step in zip(self.ranks, iteration.ranks, strict=True):
            if step.dummy is not None:
                rank.pool.release(step.dummy.blocks)
        return ended

    def drop_cancelled(self) -> None:
        """Let cancelled requests leave the queue."""
        self.dropped = []
        if not self._has_cancels:
            return
        self._has_cancels = False
        self.dropped = [request for request in self.waiting if request.is_cancelled]
        for request in self.dropped:
            self.waiting.remove(request)

    def _end(self, iteration: Iteration, index: int, accepted: dict[Request, int]) -> list[Request] | None:
        rank, step, settled = self.ranks[index], iteration.ranks[index], self.settled_step(index)
        has_overlap = self.settings.has_overlap
        if not has_overlap:
            rank.advance(step)
        if settled is not None:
            rank.sample(settled, accepted)
        if has_overlap:
            rank.reset_paused(step)
            rank.advance(step)
        gone = None
        if settled is not None:
            gone = rank.end()
            rank.store(settled)
        if has_overlap:
            if iteration.is_forward:
                rank.mark_last(step)
            if not self._is_stuck(iteration, index):
                self._previous[index] = step if iteration.is_forward else None
        return gone


def new_dummy() -> Request:
    """Return a request that only keeps a rank busy."""
    dummy = Request(-1, num_prompt=0, max_tokens=1, chain=BlockChain([]))
    dummy.state, dummy.is_dummy = GENERATING, True
    return dummy
