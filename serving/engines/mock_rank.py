"""One rank of the mocker: a simulated engine core in a loop that sleeps for the duration of each step."""

import asyncio
import contextlib
import math
from collections.abc import Callable
from functools import partial
from time import monotonic

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from mocker import BlockChain, Engine, Sequence
from mocker.batch import NOBODY
from mocker.step import StepOutput
from mocker.timing.choose import SimulatedEngine
from mocker.timing.model import Faster
from mocker.work import work_of
from serving.engines.kv_params import Part, part_of
from serving.engines.mock_answers import LogProbabilities
from serving.engines.mock_author import Author, Plan
from serving.engines.mock_events import EventSink
from serving.engines.mock_handover import Handover, block_keys
from serving.engines.mock_live import Live, live_of
from serving.engines.mock_observer import MANY_GAPS, Gaps, Observer, Queues, queues_of, take_gaps
from serving.engines.mock_tiers import LiveTiers
from serving.engines.timer import StepTimer
from serving.model.tokenizer import ByteTokenizer
from serving.router.hashing import block_hashes, sequence_hashes
from serving.runtime.messages import CallError
from serving.runtime.server import Stream
from serving.runtime.threads import in_thread
from serving.worker.engine import EngineLoad, Work
from serving.worker.protocol import PreprocessedRequest

Tokens = npt.NDArray[np.uint32]

PartOf = Callable[[PreprocessedRequest], Part | None]
"""Returns which part of a request is done here."""


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
        max_loras: int | None = None,
        observer: Observer | None = None,
    ) -> None:
        config = self.config = simulated.config
        self._usual_timing = simulated.timing
        self.engine = Engine(
            config,
            simulated.timing,
            num_blocks=simulated.num_blocks,
            host=simulated.host,
            more=simulated.more,
            kv_events=events is not None,
            max_loras=max_loras,
        )
        self._events = events
        self._author = author or Author(ByteTokenizer())
        self._max_waiting = max_waiting
        self._handover = handover
        self._part_of = part_of
        self._tiers = tiers
        self._observer = observer
        self._has_lost = False  # an observed request, since the last step
        if tiers is not None:
            tiers.connect(self.engine, self._follow_tiers)
        self._resets: list[tuple[bool, asyncio.Future[bool]]] = []
        self._quiet: list[asyncio.Future[None]] = []
        self._bell = asyncio.Event()
        self._turn = asyncio.Lock()
        self._planned: set[asyncio.Task[None]] = set()
        self._order = 0

    def submit(self, request: PreprocessedRequest, stream: Stream) -> None:
        """Queue a request, or end it with an error if it can never fit or the queue is full."""
        if self._max_waiting is not None and self._num_waiting >= self._max_waiting:
            stream.end(f"{self._max_waiting} requests are already waiting for this engine", "overloaded")
            return
        arrival_s = monotonic()
        tokens = np.frombuffer(bytes(request.token_ids.data), "<u4")
        try:
            asked = self._part_of(request)
            if asked is not None and asked.is_prefill and not asked.is_answered:
                answer = self._author.first(request, tokens)
            elif self._author.may_be_formed(request):
                self._plan_apart(request, stream, tokens, asked, arrival_s)
                return
            else:
                answer = self._author.plan(request, tokens, most=self.config.max_model_len)
        except ValueError as error:
            stream.end(str(error), "invalid")
            return
        self._queue(request, stream, tokens, asked, answer, arrival_s)

    @property
    def _num_waiting(self) -> int:
        """Requests that wait for their turn, or for their answer to be planned."""
        scheduler = self.engine.scheduler
        return len(scheduler.waiting) + len(scheduler.fetching) + len(self._planned)

    def _plan_apart(
        self, request: PreprocessedRequest, stream: Stream, tokens: Tokens, asked: Part | None, arrival_s: float
    ) -> None:
        """Queue a request once its answer is settled, in a thread: other requests go on meanwhile."""
        plan = partial(self._author.plan, request, tokens, most=self.config.max_model_len)

        async def settle() -> None:
            try:
                async with self._turn:  # one thread: whoever hangs up and asks again does not get another
                    if stream.is_over:
                        return
                    answer = await in_thread(plan)
                if not stream.is_over:
                    self._queue(request, stream, tokens, asked, answer, arrival_s)
            except ValueError as error:
                stream.end(str(error), "invalid")
            except Exception as error:
                stream.fail(error)

        task = asyncio.create_task(settle())
        self._planned.add(task)
        task.add_done_callback(self._planned.discard)

    def _queue(
        self,
        request: PreprocessedRequest,
        stream: Stream,
        tokens: Tokens,
        asked: Part | None,
        answer: Plan,
        arrival_s: float,
    ) -> None:
        size = self.config.block_size
        output = answer.output
        ids = self._names(request, tokens, output)
        chain = BlockChain(ids)
        if self._events is not None:
            chain.payload = self._events.content(request, tokens, output)
        self._order += 1
        sequence = Sequence(
            self._order,
            num_prompt=len(tokens),
            max_tokens=answer.limit,
            stop_after=answer.stop_after,
            chain=chain,
            priority=request.priority,
            arrival=float(self._order),
            adapter="" if request.cache_scope is None else request.cache_scope.lora_name,
        )
        sequence.reads_cache = request.sampling_options.get("prompt_logprobs") is None  # as in vLLM
        log_probabilities = LogProbabilities.wanted(self._author.words, request.sampling_options)
        live = sequence.payload = Live(tokens, output, stream, log_probabilities, sequence, arrival_s)
        live.has_tiers = self._tiers is not None
        live.request_id = request.request_id
        live.reason = answer.reason
        if answer.embedding is not None:
            live.embed(answer.embedding)
        stream.on_cancel = lambda: self.engine.abort(sequence)
        stream.on_unblocked = live.flush
        try:
            if asked is None:
                self.add(live)
            else:
                live.keys = block_keys(tokens, ids, num_full=len(tokens) // size, block_size=size)
                live.is_held = request.is_held and asked.is_prefill
                self._share(live, asked)
        except (ValueError, CallError) as error:
            stream.on_cancel = None
            stream.end(str(error), error.kind if isinstance(error, CallError) else "invalid")
            return
        if self._observer is not None:
            self._observe(self._observer, live, request)

    def _observe(self, observer: Observer, live: Live, request: PreprocessedRequest) -> None:
        """Let a queued request be observed, including its client's leaving it."""
        observer.on_queued(live, request)
        drop = live.stream.on_cancel

        def leave() -> None:
            self._has_lost = True
            observer.on_left(live, has_stopped=live.stream.has_stopped)
            if drop is not None:
                drop()

        live.stream.on_cancel = leave

    def _names(self, request: PreprocessedRequest, tokens: Tokens, output: list[int]) -> list[int]:
        """Name the blocks of a prompt and its answer; the frontend has named those of a prompt that anyone may share."""
        size, scope = self.config.block_size, request.cache_scope
        given = request.sequence_hashes if scope is None else None
        hashes = np.frombuffer(bytes(given.data), "<u8").tolist() if given else []
        root = hashes[-1] if hashes else None
        if scope is not None:
            root = xxh3_64_intdigest(msgspec.msgpack.encode(scope))
        tail = np.concatenate([tokens[len(hashes) * size :], np.array(output, np.uint32)])
        named: list[int] = hashes + sequence_hashes(block_hashes(tail, size), root)
        return named

    def _share(self, live: Live, asked: Part) -> None:
        """Start our part of a request; another worker does the rest.

        Raises:
            ValueError: it is not for this worker, or can never fit.
            CallError: the two workers cannot meet here.
        """
        handover = self._handover
        if handover is None:
            raise ValueError(
                "kv_transfer_params are for a prefill or decode worker; this one was started without --role"
            )
        live.stream.on_cancel = lambda: handover.cancel(self, live)
        handover.begin(self, live, asked)

    def add(self, live: Live) -> None:
        """Queue a request.

        Raises:
            ValueError: it can never fit.
        """
        self.engine.add(live.sequence)
        live.is_queued = True
        self.wake()

    def wake(self) -> None:
        """Check again whether there is something to do."""
        self._bell.set()

    def slow_down(self, factor: float) -> None:
        """Make each step, from the next on, take this many times as long as usual."""
        usual = self._usual_timing
        self.engine.change_timing(usual if factor == 1 else Faster(usual, 1 / factor, 1 / factor))

    async def reset_prefix_cache(self, *, preempts_running: bool = False) -> bool:
        """Forget all cached blocks, once the step in flight has ended; return False if any is in use.

        Raises:
            RuntimeError: see `mocker.engine.Engine.reset_prefix_cache`.
        """
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._resets.append((preempts_running, done))
        if self.engine.step is None:
            self._reset()
        return await done

    def lives(self) -> list[Live]:
        """Return the requests that the engine has."""
        scheduler = self.engine.scheduler
        found = [each.payload for each in (*scheduler.running, *scheduler.queued(), *scheduler.holding)]
        return [live for live in found if isinstance(live, Live)]

    def abort(self, live: Live, *, is_asked: bool = False) -> None:
        """End a request with what was generated so far, and say so to its client, who may have asked for that."""
        self.engine.abort(live.sequence)
        live.stream.on_cancel = None
        if self._observer is not None:
            self._has_lost = True
            if is_asked:
                self._observer.on_left(live, has_stopped=False)
            else:
                self._observer.on_aborted(live)
        live.abort()
        self.wake()

    async def until_quiet(self) -> None:
        """Wait until no step is in flight and nothing can be scheduled: for a paused engine, until the pause is complete."""
        done = asyncio.get_running_loop().create_future()
        self._quiet.append(done)
        self.wake()
        await done

    def _be_quiet(self) -> None:
        quiet, self._quiet = self._quiet, []
        for done in quiet:
            if not done.done():
                done.set_result(None)

    def _reset(self) -> None:
        resets, self._resets = self._resets, []
        for preempts_running, done in resets:
            try:
                is_reset = self.engine.reset_prefix_cache(preempts_running=preempts_running)
            except RuntimeError as error:
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(is_reset)

    def load(self) -> EngineLoad:
        """Report what the engine is doing."""
        scheduler = self.engine.scheduler
        pool = scheduler.pool
        return EngineLoad(
            len(scheduler.running),
            scheduler.num_waiting,
            pool.num_blocks - pool.num_free,
            pool.num_blocks,
            self.config.max_num_seqs,
            kv_tiers=() if self._tiers is None else self._tiers.load(),
            work=Work(*work_of(scheduler)),
        )

    def queues(self) -> Queues:
        """Report what the requests here do now."""
        return queues_of(self.engine, len(self._planned))

    def take_gaps(self) -> Gaps:
        """Return the times between tokens since the last call."""
        return take_gaps(self.engine)

    async def run(self) -> None:
        """Step forever."""
        engine, timer = self.engine, StepTimer()
        try:
            await self._step(engine, timer)
        finally:
            timer.close()
            for task in self._planned:
                task.cancel()

    async def _step(self, engine: Engine, timer: StepTimer) -> None:
        now = monotonic()  # uvloop's own clock only counts milliseconds
        while True:
            self._bell.clear()  # a ring from here on may be too late for this step
            step = engine.schedule(now)
            if self._handover is not None:
                self._follow_loads(self._handover)
            if self._tiers is not None:
                self._serve_tiers(self._tiers)
            if step is None:
                if self._quiet and not (engine.scheduler.holding and engine.scheduler.pause != "all"):
                    self._be_quiet()
                await self._wait()
                now = monotonic()
                continue
            if self._handover is not None:
                self._handover.on_step(self, step)
            # Deadlines are absolute: a late timer delays one step, not all later ones.
            await timer.until(step.end)
            self._send(engine)
            if self._resets:
                self._reset()
            now = step.end

    async def _wait(self) -> None:
        """Wait until something arrives, or a copy between GPU and host ends."""
        wake_s = self.engine.wake_s
        if wake_s == math.inf:
            await self._bell.wait()
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._bell.wait(), max(wake_s - monotonic(), 0.0))

    def _send(self, engine: Engine) -> None:
        decoded = engine.decoded()
        output = engine.complete()
        if self._observer is not None:
            self._report(self._observer, decoded, output)
        for sequence in output.finished:
            live = sequence.payload
            assert isinstance(live, Live)
            if not sequence.is_remote_decode:
                live.finish()
            else:
                live.is_plain = (
                    False  # the last token comes with where the KV is, as a client may leave after that token
                )
        for sequence in (*decoded, *output.sampled):
            live = sequence.payload
            assert isinstance(live, Live)
            made = live.made = live.made + 1
            if live.is_plain and live.end is None and live.sent == made - 1 and not live.stream.is_blocked:
                live.stream.send(live.output[live.sent])
                live.sent = made
            elif not (sequence.is_remote_decode and sequence.is_over):
                live.flush()
        if self._handover is not None:
            self._end_shared(self._handover, output.finished)
        if self._tiers is not None:
            self._serve_tiers(self._tiers)
        elif self._events is not None and engine.has_events:
            self._events.publish(engine.take_events())

    def _report(self, observer: Observer, decoded: list[Sequence], output: StepOutput) -> None:
        """Report a step to the observer."""
        if self._has_lost:
            self._has_lost = False
            decoded = [sequence for sequence in decoded if not live_of(sequence).stream.is_over]
        if len(self.engine.log.starts_s) >= MANY_GAPS:
            observer.on_gaps(self.take_gaps())
        ahead = self.engine.ahead
        preempted = ahead.preempted if ahead is not None else NOBODY
        observer.on_step(
            output.end,
            len(decoded),
            [live_of(sequence) for sequence in output.sampled],
            [live_of(sequence) for sequence in output.finished],
            [live_of(sequence) for sequence in preempted if sequence in decoded or sequence in output.sampled],
        )

    def _serve_tiers(self, tiers: LiveTiers) -> None:
        """Update the bytes beyond the GPU as the engine reports, and do the tier work that it asks for."""
        events = self.engine.take_events() + self.engine.take_host_events()
        if events:
            tiers.note(events)
        beyond = tiers.take_reports()
        if self._events is not None and (events or beyond):
            self._events.publish(events, beyond)
        tiers.act(self.engine.take_tier_work())

    def _follow_tiers(self) -> None:
        """Handle what has changed beyond the GPU."""
        assert self._tiers is not None
        self._serve_tiers(self._tiers)
        self.wake()

    def _follow_loads(self, handover: Handover) -> None:
        """Read KV that there are blocks for now, and send the tokens that came with what was read."""
        if loads := self.engine.take_loads():
            handover.on_loads(self, loads)
        for sequence in self.engine.shipped:
            live = sequence.payload
            assert isinstance(live, Live)
            live.made += 1
            live.flush()

    def _end_shared(self, handover: Handover, finished: list[Sequence]) -> None:
        """End those finished requests that are shared with another worker."""
        for sequence in finished:
            live = sequence.payload
            assert isinstance(live, Live)
            if sequence.is_remote_decode:
                handover.on_finished(self, live)
            elif live.load is not None:
                self.end(sequence)

    def end(self, sequence: Sequence) -> None:
        """Send the end of a request whose KV was to be read, unless it has been sent."""
        live = sequence.payload
        assert isinstance(live, Live) and live.load is not None
        if sequence.is_failed and live.load.error is not None:
            kind = "engine" if live.load.is_directed else live.load.error.kind
            live.stream.end(f"the KV of its prompt did not arrive: {live.load.error}", kind)
            return
        if sequence.is_token_shipped:
            live.made = max(live.made, 1)  # that may be all that was asked for
        live.finish()
        live.flush()
