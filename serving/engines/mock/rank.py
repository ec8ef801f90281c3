"""One rank of the mocker: a simulated engine core, its requests, and what others see of it."""

import asyncio

from mocker import Sequence, Step, new_engine
from mocker.contract import NeverAdmittedError
from mocker.prefix_cache_stats import PrefixCacheStats
from mocker.speculation.counts import DraftCounts
from mocker.timing.choose import SimulatedEngine
from mocker.timing.model import Faster
from serving.engines.kv.params import part_of
from serving.engines.mock.answers.author import Author
from serving.engines.mock.control import Control
from serving.engines.mock.delivery import Delivery
from serving.engines.mock.events import EventSink
from serving.engines.mock.intake import Intake, PartOf
from serving.engines.mock.kv.handover import Handover
from serving.engines.mock.kv.tiers import LiveTiers
from serving.engines.mock.live import Live, live_of
from serving.engines.mock.observer import Gaps, Observer, Queues, RankWatch, queues_of, take_gaps
from serving.model.tokenizer import ByteTokenizer
from serving.runtime.server import AnswerStream
from serving.worker.engine import EngineLoad, RankDrafts, RankWork
from serving.worker.protocol import PreprocessedRequest


class MockEngine:
    """Runs one simulated engine in real time."""

    def __init__(
        self,
        simulated: SimulatedEngine,
        *,
        events: EventSink | None = None,
        author: Author | None = None,
        max_waiting: int | None = None,
        handover: Handover | None = None,
        part_of: PartOf = part_of,
        tiers: LiveTiers | None = None,
        observer: Observer | None = None,
        bell: asyncio.Event | None = None,
    ) -> None:
        self.config = simulated.config
        """Its settings, those of other families as vLLM's."""
        self._usual_timing = simulated.timing
        self.engine = new_engine(
            simulated.settings,
            simulated.timing,
            num_blocks=simulated.num_blocks,
            num_ranks=simulated.num_ranks,
            host=simulated.host,
            layout=simulated.layout,
            adapters=simulated.adapters,
            kv_events=events is not None,
            acceptance=simulated.acceptance,
            stage_shares=simulated.stage_shares,
        )
        self._events = events
        self._handover = handover
        self._tiers = tiers
        watch = None if observer is None else RankWatch(observer, self.engine)
        self.control = Control(self, watch)
        """What is asked of the rank as a whole."""
        self._intake = Intake(
            self,
            author or Author(ByteTokenizer()),
            events=events,
            max_waiting=max_waiting,
            handover=handover,
            part_of=part_of,
            has_tiers=tiers is not None,
            watch=watch,
        )
        self._delivery = Delivery(self, handover, watch)
        if tiers is not None:
            tiers.connect(self.engine, self._follow_tiers)
        self.bell = bell or asyncio.Event()
        """Rings when there may be something to do; ranks that step together have one for all."""

    def submit(self, request: PreprocessedRequest, stream: AnswerStream) -> None:
        """Queue a request, or end it with an error if it can never fit or the queue is full."""
        self._intake.submit(request, stream)

    def add(self, live: Live) -> None:
        """Queue a request.

        Raises:
            ValueError: it can never fit.
        """
        self.engine.add(live.sequence)
        live.is_queued = True
        self.wake()

    def end(self, sequence: Sequence) -> None:
        """Send the end of a request whose KV was to be read, unless it has been sent."""
        self._delivery.end(sequence)

    def wake(self) -> None:
        """Check again whether there is something to do."""
        self.bell.set()

    def slow_down(self, factor: float) -> None:
        """Make each step, from the next on, take this many times as long as usual."""
        usual = self._usual_timing
        self.engine.change_timing(usual if factor == 1 else Faster(usual, 1 / factor, 1 / factor))

    def load(self) -> EngineLoad:
        """Report what the engine is doing."""
        view = self.engine.view()
        return EngineLoad(
            view.num_running,
            view.num_waiting,
            view.num_used_blocks,
            view.num_blocks,
            self.config.max_num_seqs,
            kv_tiers=() if self._tiers is None else self._tiers.load(),
            work=RankWork(*self.engine.backlog()),
            drafts=_drafts(self.draft_counts),
        )

    @property
    def num_blocks(self) -> int:
        """KV blocks on its GPU."""
        return self.engine.num_blocks

    @property
    def has_host_memory(self) -> bool:
        """Whether KV is kept beyond its GPU."""
        return self.engine.host_memory is not None

    @property
    def prefix_cache_stats(self) -> PrefixCacheStats:
        """What was looked up in its prefix cache."""
        return self.engine.prefix_cache_stats

    @property
    def draft_counts(self) -> DraftCounts | None:
        """What came of its drafts; None if it does not speculate."""
        return self.engine.draft_counts

    def queues(self) -> Queues:
        """Report what the requests here do now."""
        return queues_of(self.engine, self._intake.num_planned)

    def take_gaps(self) -> Gaps:
        """Return the times between tokens since the last call."""
        return take_gaps(self.engine)

    def close(self) -> None:
        """Take no more requests."""
        self._intake.close()

    def begin(self, now: float) -> Step | None:
        """Begin a step, if there is anything to do."""
        step = self._schedule(now)
        if self._handover is not None:
            self._delivery.follow_loads(self._handover)
        if self._tiers is not None:
            self._serve_tiers(self._tiers)
        if step is None:
            self.control.on_idle()
        return step

    def finish(self) -> None:
        """End the step in flight, and send what it made."""
        self._delivery.send(self.engine)
        if self._tiers is not None:
            self._serve_tiers(self._tiers)
        elif self._events is not None and self.engine.outbox.events:
            self._events.publish(self.engine.outbox.take_events())
        self.control.on_step_end()

    def _schedule(self, now: float) -> Step | None:
        while True:
            try:
                return self.engine.schedule(now)
            except NeverAdmittedError as error:
                self.control.fail(live_of(error.sequence), str(error))

    def _serve_tiers(self, tiers: LiveTiers) -> None:
        """Publish what has happened in the engine and in the tiers beyond its GPU, and do the work that it asks for."""
        events = self.engine.outbox.take_events() + tiers.take_events()
        beyond = tiers.take_reports()
        if self._events is not None and (events or beyond):
            self._events.publish(events, beyond)
        tiers.act(self.engine.outbox.take_tier_work())

    def _follow_tiers(self) -> None:
        """Handle what has changed beyond the GPU."""
        assert self._tiers is not None
        self._serve_tiers(self._tiers)
        self.wake()


def _drafts(counts: DraftCounts | None) -> RankDrafts | None:
    """Return what came of drafts, to be reported."""
    if counts is None:
        return None
    return RankDrafts(counts.steps, counts.drafts, tuple(counts.accepted), counts.batches)
