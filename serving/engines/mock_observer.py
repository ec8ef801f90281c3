"""What a mocker's rank shows of itself to those who count what it does."""

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mocker import Engine
from mocker.sequence import LOADING
from mocker.step import StepLog
from serving.engines.mock_live import Live
from serving.worker.protocol import PreprocessedRequest

MANY_GAPS = 1 << 14
"""Rows of times between tokens that gather before they are reported to an observer, unless somebody asks earlier."""


class Gaps(NamedTuple):
    """Times between tokens (s), and how many tokens came after each."""

    seconds: npt.NDArray[np.float64]
    counts: npt.NDArray[np.float64]


class Observer(Protocol):
    """Sees what happens to the requests of one rank, as it happens. What can be read off the rank is not reported."""

    def on_queued(self, live: Live, request: PreprocessedRequest) -> None:
        """A request waits for its turn."""
        ...

    def on_step(
        self, end_s: float, num_decoded: int, prefilled: list[Live], finished: list[Live], preempted: list[Live]
    ) -> None:
        """A step has ended, and its output is about to be sent.

        Args:
            end_s: when it ended, on the engine's clock.
            num_decoded: requests that got another token.
            prefilled: requests whose prompt is computed now, those that were preempted before included: they got a token.
            finished: requests that ended with this step.
            preempted: requests that got a token, and will have to wait for the next.
        """
        ...

    def on_gaps(self, gaps: Gaps) -> None:
        """Tokens came, with these times between them; reported now and then."""
        ...

    def on_aborted(self, live: Live) -> None:
        """The engine itself ended a request, because it is paused."""
        ...

    def on_left(self, live: Live, *, has_stopped: bool) -> None:
        """Nobody waits for the rest of an answer: because a stop string ended it, or the client hung up or had it aborted."""
        ...


class Queues(NamedTuple):
    """The requests of a rank by what they do now, and the share of its KV blocks in use."""

    num_running: int
    num_waiting: int
    """Those deferred included."""
    num_deferred: int
    """Requests that wait for something other than their turn: their KV, or the form of their answer."""
    num_kv_wanted: int
    """Requests whose KV another engine has, and whose load has not started."""
    num_kv_loading: int
    num_kv_loaded: int
    """Requests whose KV has arrived, and that do not run yet."""
    kv_usage: float


def queues_of(engine: Engine, num_planned: int) -> Queues:
    """Return what the requests of an engine do; the answers of some more are still being planned."""
    scheduler = engine.scheduler
    pool, holding = scheduler.pool, scheduler.holding
    num_loading = sum([each.state == LOADING for each in holding])
    return Queues(
        num_running=len(scheduler.running),
        num_waiting=scheduler.num_waiting + num_planned,
        num_deferred=len(holding) + len(scheduler.fetching) + num_planned,
        num_kv_wanted=sum([each.is_remote_prefill for each in scheduler.waiting]),
        num_kv_loading=num_loading,
        num_kv_loaded=len(holding) - num_loading,
        kv_usage=1.0 - pool.num_free / pool.num_blocks,
    )


def take_gaps(engine: Engine) -> Gaps:
    """Return the gaps between tokens since the last call, from the engine's log, which is empty then."""
    engine.split_log(0.0)
    log, engine.log = engine.log, StepLog()
    first, slope, curve, num_steps, num_tokens = np.array(log.rows).reshape(-1, 5).T
    lengths = num_steps.astype(np.int64)
    row = np.repeat(np.arange(len(lengths)), lengths)
    step = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return Gaps(first[row] + step * (slope[row] + step * curve[row]), num_tokens[row])


def prefilling_tokens(engine: Engine) -> int:
    """Return the tokens of the prompts that have no token yet: of whole prompts, however much of them is computed."""
    scheduler = engine.scheduler
    unfinished = (*scheduler.queued(), *scheduler.holding, *scheduler.running)
    return sum(sequence.num_prompt for sequence in unfinished if sequence.first_token_s < 0)
