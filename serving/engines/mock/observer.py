"""What a mocker's rank shows of itself to those who count what it does."""

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mocker import Engine, Sequence
from mocker.batch import NOBODY
from mocker.step import CountedOutput, StepOutput
from serving.engines.mock.live import Live, live_of
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
            num_decoded: tokens that requests got after their first.
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


class RankWatch:
    """Tells an observer what happens to the requests of one rank."""

    def __init__(self, observer: Observer, engine: Engine) -> None:
        self._observer = observer
        self._engine = engine
        self._has_lost = False  # a request that it had told of, since the last step

    def begin(self, live: Live, request: PreprocessedRequest) -> None:
        """Tell of a queued request, and of its client's leaving it."""
        self._observer.on_queued(live, request)
        drop = live.stream.on_cancel

        def leave() -> None:
            self._has_lost = True
            self._observer.on_left(live, has_stopped=live.stream.has_stopped)
            if drop is not None:
                drop()

        live.stream.on_cancel = leave

    def abort(self, live: Live, *, is_asked: bool) -> None:
        """Tell of a request that the engine ended, maybe because its client asked for that."""
        self._has_lost = True
        if is_asked:
            self._observer.on_left(live, has_stopped=False)
        else:
            self._observer.on_aborted(live)

    def report(self, decoded: list[Sequence], output: StepOutput) -> None:
        """Tell of a step."""
        if self._has_lost:
            self._has_lost = False
            decoded = [sequence for sequence in decoded if not live_of(sequence).stream.is_over]
        if len(self._engine.log.starts_s) >= MANY_GAPS:
            self._observer.on_gaps(take_gaps(self._engine))
        ahead = self._engine.ahead
        preempted = ahead.preempted if ahead is not None else NOBODY
        self._observer.on_step(
            output.end,
            sum([count for _, count in output.emitted]) if isinstance(output, CountedOutput) else len(decoded),
            [live_of(sequence) for sequence in output.sampled],
            [live_of(sequence) for sequence in output.finished],
            [live_of(sequence) for sequence in preempted if sequence in decoded or sequence in output.sampled],
        )


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
    view = engine.view()
    return Queues(
        num_running=view.num_running,
        num_waiting=view.num_waiting + num_planned,
        num_deferred=view.num_loading + view.num_loaded + view.num_fetching + num_planned,
        num_kv_wanted=view.num_to_load,
        num_kv_loading=view.num_loading,
        num_kv_loaded=view.num_loaded,
        kv_usage=1.0 - view.num_free_blocks / view.num_blocks,
    )


def take_gaps(engine: Engine) -> Gaps:
    """Return the gaps between tokens since the last call."""
    first, slope, curve, num_steps, num_tokens = np.array(engine.take_gaps()).reshape(-1, 5).T
    lengths = num_steps.astype(np.int64)
    row = np.repeat(np.arange(len(lengths)), lengths)
    step = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return Gaps(first[row] + step * (slope[row] + step * curve[row]), num_tokens[row])
