"""Random workloads for TensorRT-LLM's scheduler, carried out through `Engine` and, beside it, by the scheduler alone."""

import math
import random
from dataclasses import dataclass

from hypothesis import strategies as st

from mocker import BlockChain, BlockRemoved, Sequence
from mocker.contract import NeverAdmittedError
from mocker.engine import Engine
from mocker.timing.constant import Constant
from mocker.trtllm import core as module
from mocker.trtllm.block_pool import OutOfBlocksError
from mocker.trtllm.config import TrtllmConfig
from mocker.trtllm.core import TrtllmCore
from mocker.trtllm.request import Request
from mocker.trtllm.scheduler import Scheduler
from mocker.trtllm.settings import settings_of

configs = st.builds(
    TrtllmConfig,
    tokens_per_block=st.sampled_from([1, 2, 4, 16]),
    max_batch_size=st.integers(1, 6),
    max_num_tokens=st.sampled_from([16, 24, 24, 64]),
    capacity_scheduler_policy=st.sampled_from(["GUARANTEED_NO_EVICT", *["MAX_UTILIZATION"] * 2, "STATIC_BATCH"]),
    enable_chunked_context=st.booleans(),
    context_chunking_policy=st.sampled_from(["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"]),
    batch_wait_timeout_iters=st.sampled_from([0, 0, 3]),
    batch_wait_max_tokens_ratio=st.sampled_from([0.3, 0.9]),
    enable_block_reuse=st.booleans(),
    disable_overlap_scheduler=st.booleans(),
    max_seq_len=st.sampled_from([None, None, 30]),
)


@dataclass
class Call:
    """A request of a workload."""

    number: int
    at_s: float
    prompt: int
    output: int
    stop: int | None
    text: tuple[int, int, int]
    """A group that shares its first blocks, how many of them, and which of five texts follows."""
    aborted_s: float | None

    def chain(self, size):
        group, depth, own = self.text
        ids = [(group, place) if place < depth else (group, depth, own, place) for place in range(self.prompt // size)]
        chain = BlockChain(ids)
        chain.payload = self.number
        return chain

    def sequence(self, size):
        chain = self.chain(size)
        return Sequence(self.number, num_prompt=self.prompt, max_tokens=self.output, stop_after=self.stop, chain=chain)


@st.composite
def workloads(draw, config, max_requests=14):
    """Draw requests that fit; some share prefixes, some are alike."""
    rng = random.Random(draw(st.integers(0, 1 << 32)))
    calls, now = [], 0.0
    longest = 60 if config.enable_chunked_context else config.max_num_tokens
    for number in range(draw(st.integers(1, max_requests))):
        now += rng.choice([0.0, 0.0, rng.random() / 8, rng.random()])
        prompt = rng.randint(1, min(longest, (config.max_seq_len or 99) - 1, 40))
        text = rng.randrange(2), rng.randrange(5) * 4, rng.randrange(5)
        output = rng.choice([1, 2, rng.randint(1, 8), rng.randint(1, 40)])
        stop = rng.randint(1, output) if rng.random() < 0.3 else None
        aborted_s = now + 4 * rng.random() if rng.random() < 0.2 else None
        calls.append(Call(number, now, prompt, output, stop, text, aborted_s))
    return calls


@st.composite
def scenarios(draw):
    """Draw settings, a number of blocks and a workload."""
    config = draw(configs)
    calls = draw(workloads(config))
    most = max([call.prompt + call.output for call in calls], default=1)
    return config, -(-most // config.tokens_per_block) + draw(st.integers(0, 30 // config.tokens_per_block + 2)), calls


IS_COMPILED = not module.__file__.endswith(".py")
"""Whether the core is compiled, so that no class can be derived from it here."""


class WatchedCore(TrtllmCore):
    """A core that keeps what it was asked and what it decided: see `decided`."""

    def __init__(self, config, num_blocks):
        super().__init__(config, num_blocks)
        self.decisions = []
        self.happened = []
        self.num_asked = 0

    def schedule(self):
        batch = super().schedule()
        self.num_asked += 1
        if batch is not None:
            self.decisions.append(
                (
                    self.num_asked,
                    [s.id for s in batch.decodes],
                    [(s.id, count) for s, count in batch.chunks],
                    [s.id for s in batch.preempted],
                    self.num_free_blocks,
                )
            )
        return batch

    def add(self, sequence):
        self.happened.append((self.num_asked, "add", sequence.id))
        super().add(sequence)

    def abort(self, sequence):
        if not sequence.is_over:
            self.happened.append((self.num_asked, "abort", sequence.id))
        super().abort(sequence)


@dataclass
class Drive:
    """What can be seen of a workload that an engine carried out."""

    core: TrtllmCore
    log: list[object]
    rows: list[object]
    gaps: list[float]
    events: list[object]
    num_steps: int
    ended_by: OutOfBlocksError | None = None


def drive(config, num_blocks, calls, *, max_iterations):
    """Carry out a workload as the drivers do."""
    core = (TrtllmCore if IS_COMPILED else WatchedCore)(config, num_blocks)
    engine = Engine(config, core, Constant(0.25, 0.125))
    happenings = sorted(
        [(call.at_s, 0, call.number, call) for call in calls]
        + [(call.aborted_s, 1, call.number, call) for call in calls if call.aborted_s is not None]
    )
    sequences, found, now = {}, Drive(core, [], [], [], [], 0), 0.0

    def happen(kind, call):
        if kind == 0:
            sequences[call.number] = call.sequence(config.tokens_per_block)
            engine.add(sequences[call.number])
        else:
            engine.abort(sequences[call.number])

    try:
        while happenings or not engine.is_idle:
            while happenings and happenings[0][0] <= now:
                _, kind, _, call = happenings.pop(0)
                happen(kind, call)
            try:
                step = engine.schedule(now, max_iterations=max_iterations)
            except NeverAdmittedError as error:
                found.log.append((now, "never admitted", error.sequence.id))
                engine.abort(error.sequence)
                continue
            if step is None:
                if engine.is_stuck:
                    stuck = engine.sequences()[0]
                    found.log.append((now, "stuck", stuck.id))
                    engine.abort(stuck)
                    continue
                if not happenings:
                    assert engine.is_idle, "nothing can happen any more, but requests are left"
                    break
                now = max(now, happenings[0][0])
                continue
            found.num_steps += 1
            while happenings and happenings[0][0] < step.end:
                at_s, kind, _, call = happenings.pop(0)
                engine.advance(at_s)
                known = {
                    number: engine.num_known_tokens(each) for number, each in sequences.items() if not each.is_over
                }
                found.log.append((at_s, known))
                happen(kind, call)
                step.cut(at_s)
            decoded = [sequence.id for sequence in engine.decoded()]
            batch = step.batch
            output = engine.complete()
            now = output.end
            if batch.chunks or batch.preempted or output.finished:
                finished = [(s.id, s.finish_reason) for s in output.finished]
                found.log.append((now, batch.chunks and [(s.id, n) for s, n in batch.chunks], finished, decoded))
                found.log.append((now, engine.num_free_blocks, engine.view(), engine.backlog()))
            for event in engine.outbox.take_events():
                places = range(event.start, event.stop)
                is_removal = isinstance(event, BlockRemoved)  # one block after the other, in a leap or not
                found.events += [
                    (is_removal, event.chain.payload, place) for place in places[:: -1 if is_removal else 1]
                ]
    except OutOfBlocksError as error:
        found.ended_by = error
        return found
    assert engine.num_free_blocks == engine.num_blocks
    assert not core.sequences()
    found.rows = [
        (s.id, s.first_scheduled_s, s.first_token_s, s.num_preemptions, s.cached_tokens) for s in sequences.values()
    ]
    data = engine.log.rows
    for place in range(0, len(data), 5):
        first, slope, curve, count, tokens = data[place : place + 5]
        found.gaps += [first + j * (slope + j * curve) for j in range(int(count)) for _ in range(int(tokens))]
    found.gaps.sort()
    return found


def decided(config, num_blocks, calls, happened, num_asked):
    """Let the scheduler alone decide `num_asked` times; return its decisions as `WatchedCore` keeps them."""
    scheduler = Scheduler(settings_of(config, num_blocks))
    rank, size = scheduler.ranks[0], config.tokens_per_block
    of_number = {call.number: call for call in calls}
    requests, decisions = {}, []
    for asked in range(num_asked):
        for when, what, number in happened:
            if when != asked:
                continue
            call = of_number[number]
            if what == "add":
                requests[number] = Request(
                    number,
                    num_prompt=call.prompt,
                    max_tokens=min(call.output, (config.max_seq_len or math.inf) - call.prompt),
                    chain=call.chain(size),
                    stop_after=call.stop,
                )
                scheduler.add(requests[number])
            else:
                scheduler.cancel(requests[number])
        was_idle = not scheduler.has_in_flight
        iteration = scheduler.schedule()
        while was_idle and not iteration.is_forward and _drop_cancelled(scheduler):
            scheduler.update({})
            iteration = scheduler.schedule()
        step = iteration.ranks[0]
        if iteration.is_forward or step.passed.paused:
            decisions.append(
                (
                    asked + 1,
                    [request.id for request in step.batch.generating],
                    [(request.id, count) for request, _, count in step.chunks],
                    [request.id for request in step.passed.paused],
                    rank.pool.num_free,
                )
            )
        scheduler.update({})
    return decisions


def _drop_cancelled(scheduler):
    """Drop what was cancelled while nothing can run: the scheduler itself does so only where results are."""
    ended = scheduler.ranks[0].end()
    scheduler.drop_cancelled()
    return ended or scheduler.dropped
